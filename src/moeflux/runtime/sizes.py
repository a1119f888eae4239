"""Byte and parameter counts of a model, from its spec and either its files or what config.json says about them."""

from __future__ import annotations

from dataclasses import dataclass

from moeflux.formats.checkpoint import Checkpoint
from moeflux.formats.quant import describe, nbytes
from moeflux.formats.quant_rules import QuantRules
from moeflux.models.spec import Attention, DeltaNet, Mixer, Mla, ModelSpec
from moeflux.runtime.codecs import planned_codec, planned_experts
from moeflux.runtime.trunk import check_trunk

BF16_BYTES, F32_BYTES = 2, 4


@dataclass(frozen=True)
class Sizes:
    """All in bytes unless the name says otherwise."""

    total_params: int
    active_params: int  # that one token is multiplied with: all of the trunk but the embedding table, and k experts
    trunk: int
    trunk_read_per_token: int  # the trunk but the embedding table
    expert: int  # the largest, where layers differ
    experts: int
    streamed_per_token: int  # k experts of each layer, nothing cached
    state_per_token: int  # keys and values in bf16
    state_per_sequence: int  # recurrent state in f32, whatever the length
    expert_codec: str


def measure(spec: ModelSpec, checkpoint: Checkpoint) -> Sizes:
    """From the files."""
    views = check_trunk(spec, checkpoint)
    tables = {layer: checkpoint.experts(layer) for layer, _ in spec.moe_layers()}
    first = next(iter(tables.values()))
    return _sizes(
        spec,
        trunk=sum(view.nbytes for view in views.values()),
        embedding=views[spec.embedding.name].nbytes if spec.head else 0,
        expert_bytes={layer: table.layout.nbytes for layer, table in tables.items()},
        expert_codec=", ".join(dict.fromkeys(describe(p.codec) for p in first.layout.projections)),
    )


def predict(spec: ModelSpec, rules: QuantRules) -> Sizes:
    """From config.json alone: what files converted by those rules would hold."""
    codecs = {weight.name: planned_codec(weight, spec, rules) for weight in spec.weights()}
    experts = {layer: planned_experts(layer, moe, spec, rules) for layer, moe in spec.moe_layers()}
    first = next(iter(experts.values()))
    return _sizes(
        spec,
        trunk=sum(nbytes(codecs[w.name], w.shape) for w in spec.weights()),
        embedding=nbytes(codecs[spec.embedding.name], spec.embedding.shape) if spec.head else 0,
        expert_bytes={i: sum(nbytes(codec, shape) for codec, shape in parts.values()) for i, parts in experts.items()},
        expert_codec=", ".join(dict.fromkeys(describe(codec) for codec, _ in first.values())),
    )


def _sizes(spec: ModelSpec, *, trunk: int, embedding: int, expert_bytes: dict[int, int], expert_codec: str) -> Sizes:
    layers = spec.moe_layers()
    trunk_params = sum(weight.count for weight in spec.weights())
    one = {i: 3 * moe.width * spec.hidden for i, moe in layers}
    read_params = trunk_params - (spec.embedding.count if spec.head else 0)
    return Sizes(
        total_params=trunk_params + sum(one[i] * moe.router.n_experts for i, moe in layers),
        active_params=read_params + sum(one[i] * moe.router.k for i, moe in layers),
        trunk=trunk,
        trunk_read_per_token=trunk - embedding,
        expert=max(expert_bytes.values()),
        experts=sum(expert_bytes[i] * moe.router.n_experts for i, moe in layers),
        streamed_per_token=sum(expert_bytes[i] * moe.router.k for i, moe in layers),
        state_per_token=sum(_values_per_token(layer.mixer) * BF16_BYTES for layer in spec.layers),
        state_per_sequence=sum(_recurrent_values(layer.mixer) * F32_BYTES for layer in spec.layers),
        expert_codec=expert_codec,
    )


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
