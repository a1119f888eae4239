"""Qwen3-Next: gated delta net and gated attention in turn, gated shared expert, norms stored less 1."""

from __future__ import annotations

from moeflux.core.names import TensorNames
from moeflux.models.fields import Fields
from moeflux.models.hybrid import hybrid_layer, read_gated_attention
from moeflux.models.model import build_model, read_hidden
from moeflux.models.parts import (
    MAX_LAYERS,
    SKIP_ROTARY,
    qwen_moe,
    read_delta_net,
    read_dense_layers,
    read_hybrid_pattern,
)
from moeflux.models.spec import Dense, Ffn, Layer, ModelSpec

MODEL_TYPES = ("qwen3_next",)

NAMES = TensorNames(prefixes=(), skipped=((r"^mtp\.", "MTP"), SKIP_ROTARY), experts="model.layers.{layer}.mlp")


def read_spec(fields: Fields, root: Fields, model_type: str) -> ModelSpec:
    hidden = read_hidden(fields)
    n_layers = fields.whole("num_hidden_layers", high=MAX_LAYERS)
    attention = read_gated_attention(fields, hidden)
    delta = read_delta_net(fields, fused=True)
    full = read_hybrid_pattern(fields, n_layers)
    moe = qwen_moe(fields, normalize=fields.flag("norm_topk_prob", default=True))
    dense = read_dense_layers(fields, n_layers)

    def build(i: int) -> Layer:
        ffn: Ffn = Dense(fields.whole("intermediate_size")) if dense[i] else moe
        return hybrid_layer(i, hidden, attention if full[i] else delta, ffn)

    layers = tuple(build(i) for i in range(n_layers))
    return build_model(fields, root, model_type, layers, norm_offset=1, names=NAMES)
