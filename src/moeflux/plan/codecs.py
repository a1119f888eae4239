"""How a conversion by the rules of a config.json stores each weight: for byte counts and for writing such files."""

from __future__ import annotations

from moeflux.core.errors import ConfigError
from moeflux.formats.quant import Affine, BlockFp8, Codec, Plain
from moeflux.formats.quant_rules import QuantRules
from moeflux.models.spec import ModelSpec, Moe, Shape, Weight


def planned_codec(weight: Weight, spec: ModelSpec, rules: QuantRules) -> Codec:
    """Of a trunk weight."""
    if weight.kind not in ("matrix", "embedding") or not weight.quantizable:
        return Plain(rules.dtype)
    fp8 = weight.kind == "matrix" and weight is not spec.head and not weight.name.endswith(".mlp.gate.weight")
    return _rule_codec(weight.name.removesuffix(".weight"), weight.shape, spec, rules, fp8=fp8)


def planned_experts(layer: int, moe: Moe, spec: ModelSpec, rules: QuantRules) -> dict[str, tuple[Codec, Shape]]:
    """Of one expert: gate, up and down."""
    base = spec.names.experts.format(layer=layer)
    shapes = {"gate": (moe.width, spec.hidden), "up": (moe.width, spec.hidden), "down": (spec.hidden, moe.width)}
    return {
        name: (_rule_codec(f"{base}.switch_mlp.{name}_proj", shape, spec, rules, fp8=True), shape)
        for name, shape in shapes.items()
    }


def _rule_codec(module: str, shape: Shape, spec: ModelSpec, rules: QuantRules, *, fp8: bool) -> Codec:
    if rules.fp8_block is not None:
        left_alone = any(name in spec.names.stored(module) for name in rules.unconverted)
        return BlockFp8(rules.fp8_block, "F32") if fp8 and not left_alone else Plain(rules.dtype)
    rule = rules.affine_rule(spec.names.stored(module))
    if rule is None or shape[-1] % rule.group:
        return Plain(rules.dtype)  # MLX leaves a module alone that its groups do not divide
    if shape[-1] * rule.bits % 32:
        raise ConfigError(f"{shape[-1]} inputs of {rule.bits} bits do not fill whole words", where=f"config.json: {module}")
    return Affine(rule.bits, rule.group, rules.dtype)
