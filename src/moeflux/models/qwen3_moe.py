"""Qwen3-MoE: grouped-query attention with per-head norms, softmax router, no shared expert."""

from __future__ import annotations

from moeflux.core.names import TensorNames
from moeflux.models.fields import Fields
from moeflux.models.model import build_model, read_hidden
from moeflux.models.parts import (
    MAX_LAYERS,
    SKIP_ROTARY,
    attention_weights,
    layer,
    read_attention,
    read_dense_layers,
    read_softmax_router,
)
from moeflux.models.rope import read_rope
from moeflux.models.spec import Attention, Dense, Ffn, Layer, ModelSpec, Moe

MODEL_TYPES = ("qwen3_moe",)

NAMES = TensorNames(prefixes=(), skipped=(SKIP_ROTARY,), experts="model.layers.{layer}.mlp")


def read_spec(fields: Fields, root: Fields, model_type: str) -> ModelSpec:
    fields.only("use_sliding_window", False)
    hidden = read_hidden(fields)
    n_layers = fields.whole("num_hidden_layers", high=MAX_LAYERS)
    n_heads, n_kv_heads, head_dim = read_attention(fields, hidden)
    mixer = Attention(
        n_heads,
        n_kv_heads,
        head_dim,
        read_rope(fields, head_dim, "half", theta=10_000.0),
        gated=False,
        bias=fields.flag("attention_bias", default=False),
    )
    router = read_softmax_router(fields, normalize=fields.flag("norm_topk_prob", default=False))
    moe = Moe(router, fields.whole("moe_intermediate_size"), shared_width=0, shared_gated=False)
    dense = read_dense_layers(fields, n_layers)

    def build(i: int) -> Layer:
        base = f"model.layers.{i}"
        ffn: Ffn = Dense(fields.whole("intermediate_size")) if dense[i] else moe
        return layer(base, hidden, mixer, ffn, attention_weights(f"{base}.self_attn", hidden, mixer))

    layers = tuple(build(i) for i in range(n_layers))
    return build_model(fields, root, model_type, layers, norm_offset=0, names=NAMES)
