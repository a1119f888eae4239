"""Byte and parameter counts of a model, from its spec and either its files or what config.json says about them."""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Any

from moeflux.core.config import Kv
from moeflux.formats.checkpoint import Checkpoint
from moeflux.formats.quant import Codec, Component, Shape, describe
from moeflux.formats.quant_rules import QuantRules
from moeflux.formats.tensors import TensorView
from moeflux.models.spec import Attention, DeltaNet, Mixer, Mla, ModelSpec
from moeflux.plan.codecs import planned_codec, planned_experts
from moeflux.plan.slot_size import kept_bytes
from moeflux.plan.views import check_trunk

BF16_BYTES, F32_BYTES = 2, 4

Parts = tuple[int, ...]  # bytes of each component of a weight


@dataclass(frozen=True)
class Sizes:
    """All in bytes unless the name says otherwise."""

    total_params: int
    active_params: int  # that one token is multiplied with: all of the trunk but the embedding table, and k experts
    trunk: int
    trunk_matrices: Parts  # components of its matrices, in the order in which they are loaded
    trunk_vectors: int  # all others in f32
    trunk_read_per_token: int  # the trunk but the embedding table
    expert: int  # the largest, where layers differ
    expert_parts: tuple[Parts, ...]  # sizes of an expert's components; more than one where layers differ
    weight_parts: tuple[Parts, ...]  # without scales and biases
    kept_scales: int  # memory for the scales and biases of all experts
    experts: int
    n_experts: int  # in all layers together
    working_set: int  # experts that one token needs: k of each layer
    streamed_per_token: int  # k experts of each layer, nothing cached
    weights_per_token: int  # the same without scales and biases
    state_per_token: int  # keys and values in bf16
    state_per_sequence: int  # recurrent state in f32, whatever the length
    expert_codec: str

    def as_dict(self) -> dict[str, Any]:
        return {field.name: getattr(self, field.name) for field in fields(self) if field.name != "trunk_matrices"}

    def kept_per_token(self, kv: Kv) -> int:
        """Keys and values as they are kept."""
        return self.state_per_token * (F32_BYTES // BF16_BYTES if kv == "f32" else 1)

    @property
    def integer(self) -> bool:
        """Whether experts are multiplied as integers, with activations rounded to int8."""
        return all(name.startswith("affine") for name in self.expert_codec.split(", "))


def measure(spec: ModelSpec, checkpoint: Checkpoint, views: dict[str, TensorView] | None = None) -> Sizes:
    """From the files. `views`: what `check_trunk` found, if it was asked already."""
    views = check_trunk(spec, checkpoint) if views is None else views
    tables = {layer: checkpoint.experts(layer) for layer, _ in spec.moe_layers()}
    first = next(iter(tables.values()))
    return _sizes(
        spec,
        stored={name: tuple(extent.length for extent in view.extents) for name, view in views.items()},
        experts={layer: tuple(table.layout.components()) for layer, table in tables.items()},
        expert_codec=", ".join(dict.fromkeys(describe(p.codec) for p in first.layout.projections)),
    )


def predict(spec: ModelSpec, rules: QuantRules) -> Sizes:
    """From config.json alone: what files converted by those rules would hold."""
    codecs = {weight.name: planned_codec(weight, spec, rules) for weight in spec.weights()}
    experts = {layer: planned_experts(layer, moe, spec, rules) for layer, moe in spec.moe_layers()}
    first = next(iter(experts.values()))
    return _sizes(
        spec,
        stored={w.name: _part_sizes(codecs[w.name], w.shape) for w in spec.weights()},
        experts={i: tuple(c for codec, shape in e.values() for c in codec.components(shape)) for i, e in experts.items()},
        expert_codec=", ".join(dict.fromkeys(describe(codec) for codec, _ in first.values())),
    )


def _part_sizes(codec: Codec, shape: Shape) -> Parts:
    return tuple(component.nbytes for component in codec.components(shape))


def _sizes(
    spec: ModelSpec, *, stored: dict[str, Parts], experts: dict[int, tuple[Component, ...]], expert_codec: str
) -> Sizes:
    """`stored`: sizes of the components of each trunk weight. `experts`: the components of an expert of each layer."""
    layers = spec.moe_layers()
    trunk = sum(sum(sizes) for sizes in stored.values())
    embedding = sum(stored[spec.embedding.name]) if spec.head else 0
    parts = {i: tuple(c.nbytes for c in components) for i, components in experts.items()}
    weights = {i: tuple(c.nbytes for c in components if c.is_weight) for i, components in experts.items()}
    scales = {i: [c.nbytes for c in components if not c.is_weight] for i, components in experts.items()}
    expert_bytes = {i: sum(sizes) for i, sizes in parts.items()}
    trunk_params = sum(weight.count for weight in spec.weights())
    one = {i: 3 * moe.width * spec.hidden for i, moe in layers}
    read_params = trunk_params - (spec.embedding.count if spec.head else 0)
    return Sizes(
        total_params=trunk_params + sum(one[i] * moe.router.n_experts for i, moe in layers),
        active_params=read_params + sum(one[i] * moe.router.k for i, moe in layers),
        trunk=trunk,
        trunk_matrices=_trunk_matrices(spec, stored),
        trunk_vectors=sum(w.count * F32_BYTES for w in spec.weights() if w.kind not in ("matrix", "embedding")),
        trunk_read_per_token=trunk - embedding,
        expert=max(expert_bytes.values()),
        expert_parts=tuple(dict.fromkeys(parts.values())),
        weight_parts=tuple(dict.fromkeys(weights.values())),
        kept_scales=sum(kept_bytes(moe.router.n_experts, scales[i]) for i, moe in layers),
        experts=sum(expert_bytes[i] * moe.router.n_experts for i, moe in layers),
        n_experts=sum(moe.router.n_experts for _, moe in layers),
        working_set=sum(moe.router.k for _, moe in layers),
        streamed_per_token=sum(expert_bytes[i] * moe.router.k for i, moe in layers),
        weights_per_token=sum(sum(weights[i]) * moe.router.k for i, moe in layers),
        state_per_token=sum(_values_per_token(layer.mixer) * BF16_BYTES for layer in spec.layers),
        state_per_sequence=sum(_recurrent_values(layer.mixer) * F32_BYTES for layer in spec.layers),
        expert_codec=expert_codec,
    )


def _trunk_matrices(spec: ModelSpec, stored: dict[str, Parts]) -> Parts:
    found: list[int] = []
    for weight in spec.weights():
        if weight.kind in ("matrix", "embedding"):
            names = [weight.name] if weight.name in stored else [name for name, _ in weight.split]
            found += [n for name in names for n in stored[name]]
    return tuple(found)


def _values_per_token(mixer: Mixer) -> int:
    match mixer:
        case Attention():
            return 2 * mixer.n_kv_heads * mixer.head_dim
        case Mla():
            return mixer.latent_dim
        case DeltaNet():
            return 0


def _recurrent_values(mixer: Mixer) -> int:
    if not isinstance(mixer, DeltaNet):
        return 0
    return (mixer.conv_width - 1) * mixer.channels + mixer.n_value_heads * mixer.key_dim * mixer.value_dim
