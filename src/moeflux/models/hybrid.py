"""What Qwen3-Next and Qwen3.5 have in common: layers of gated attention or gated delta net."""

from __future__ import annotations

from moeflux.models.fields import Fields
from moeflux.models.parts import attention_weights, delta_weights, layer, read_attention
from moeflux.models.rope import read_rope
from moeflux.models.spec import Attention, DeltaNet, Ffn, Layer


def read_gated_attention(fields: Fields, hidden: int) -> Attention:
    fields.only("attn_output_gate", True)
    fields.only("mamba_ssm_dtype", "float32")
    n_heads, n_kv_heads, head_dim = read_attention(fields, hidden)
    return Attention(
        n_heads,
        n_kv_heads,
        head_dim,
        read_rope(fields, head_dim, "half", theta=10_000_000.0, partial=0.25),
        gated=True,
        bias=fields.flag("attention_bias", default=False),
    )


def hybrid_layer(index: int, hidden: int, mixer: Attention | DeltaNet, ffn: Ffn) -> Layer:
    base = f"model.layers.{index}"
    if isinstance(mixer, Attention):
        weights = attention_weights(f"{base}.self_attn", hidden, mixer)
    else:
        weights = delta_weights(f"{base}.linear_attn", hidden, mixer)
    return layer(base, hidden, mixer, ffn, weights)
