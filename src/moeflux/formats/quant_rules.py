"""Which codec the config says a module has: MLX's `quantization` block or a float8 `quantization_config`.

Files have the last word on *whether* a module is quantised (its scales exist or they do not); the config says *how*.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from reprlib import repr as shown
from typing import Any

from moeflux.core.errors import ConfigError
from moeflux.formats.quant import AFFINE_BITS, AFFINE_GROUPS

_FLOAT_NAMES = {"bfloat16": "BF16", "float16": "F16", "float32": "F32"}


@dataclass(frozen=True)
class AffineRule:
    bits: int
    group: int


@dataclass(frozen=True)
class QuantRules:
    """`affine`/`overrides`: MLX, by stored module path. `fp8_block`: block-scaled float8. Neither: plain floats."""

    dtype: str
    affine: AffineRule | None = None
    overrides: Mapping[str, AffineRule | None] = field(default_factory=dict)  # None: left unquantised
    fp8_block: tuple[int, int] | None = None
    unconverted: tuple[str, ...] = ()  # modules a float8 checkpoint leaves alone

    def affine_rule(self, modules: tuple[str, ...]) -> AffineRule | None:
        """The rule of a module that may go by any of these names."""
        for module in modules:
            if module in self.overrides:
                return self.overrides[module]
        return self.affine


def read_quant_rules(config: Mapping[str, Any]) -> QuantRules:
    text = config.get("text_config")
    text = text if isinstance(text, Mapping) else {}
    name = next((c[k] for c in (config, text) for k in ("dtype", "torch_dtype") if isinstance(c.get(k), str)), "bfloat16")
    dtype = _FLOAT_NAMES.get(name.removeprefix("torch."), "BF16")
    blocks = [
        (f"{path}{key}", source[key])
        for path, source in (("", config), ("text_config.", text))
        for key in ("quantization", "quantization_config")
        if source.get(key)
    ]
    if not blocks:
        return QuantRules(dtype)
    where, block = blocks[0]
    if not isinstance(block, Mapping):
        raise ConfigError(f"expected an object, found {shown(block)}", where=f"config.json: {where}")
    method = block.get("quant_method")
    if method == "fp8":
        return _fp8(dtype, block, where)
    if "bits" in block and "group_size" in block and method in (None, "mlx"):
        return _affine(dtype, block, where)
    raise ConfigError(
        f"quantisation method {shown(method)} is not supported",
        where=f"config.json: {where}.quant_method",
        hint="supported: MLX affine (bits, group_size) and fp8 with weight_block_size",
    )


def _affine(dtype: str, block: Mapping[str, Any], where: str) -> QuantRules:
    default = _affine_rule(block, where)
    overrides: dict[str, AffineRule | None] = {}
    for module, value in block.items():
        if isinstance(value, Mapping):
            overrides[module] = _affine_rule({**value, "mode": value.get("mode", block.get("mode"))}, f"{where}.{module}")
        elif value is False:
            overrides[module] = None
        elif value is True:
            overrides[module] = default
    return QuantRules(dtype, affine=default, overrides=overrides)


def _affine_rule(block: Mapping[str, Any], where: str) -> AffineRule:
    checks = (("mode", ("affine", None)), ("bits", AFFINE_BITS), ("group_size", AFFINE_GROUPS))
    for key, allowed in checks:
        if block.get(key) not in allowed or isinstance(block.get(key), bool):
            raise ConfigError(
                f"{shown(block.get(key))} is not supported",
                where=f"config.json: {where}.{key}",
                hint=f"one of: {', '.join(str(a) for a in allowed if a is not None)}",
            )
    return AffineRule(int(block["bits"]), int(block["group_size"]))


def _fp8(dtype: str, block: Mapping[str, Any], where: str) -> QuantRules:
    for key, allowed in (("fmt", ("e4m3", None)), ("activation_scheme", ("dynamic", None))):
        if block.get(key) not in allowed:
            raise ConfigError(f"{shown(block.get(key))} is not supported", where=f"config.json: {where}.{key}")
    size = block.get("weight_block_size")
    if size != [128, 128]:
        raise ConfigError(
            f"{shown(size)} is not supported", where=f"config.json: {where}.weight_block_size", hint="[128, 128]"
        )
    unconverted = block.get("modules_to_not_convert") or []
    if not isinstance(unconverted, list) or not all(isinstance(name, str) for name in unconverted):
        raise ConfigError(
            f"expected a list of names, found {shown(unconverted)}", where=f"config.json: {where}.modules_to_not_convert"
        )
    return QuantRules(dtype, fp8_block=(128, 128), unconverted=tuple(unconverted))
