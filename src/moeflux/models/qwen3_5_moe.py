"""Qwen3.5-MoE and Qwen3.6-MoE: like Qwen3-Next with separate delta-net projections; the text part of a VL model.

The interleaved multi-axis rotary positions of the VL model are plain positions for text, so they are read and not used.
"""

from __future__ import annotations

from moeflux.core.names import TensorNames
from moeflux.models.fields import Fields
from moeflux.models.hybrid import hybrid_layer, read_gated_attention
from moeflux.models.model import build_model, read_hidden
from moeflux.models.parts import MAX_LAYERS, SKIP_ROTARY, qwen_moe, read_delta_net, read_hybrid_pattern
from moeflux.models.spec import ModelSpec

MODEL_TYPES = ("qwen3_5_moe", "qwen3_5_moe_text")

NAMES = TensorNames(
    prefixes=(
        ("language_model.model.", "model."),
        ("language_model.lm_head.", "lm_head."),
        ("model.language_model.", "model."),
    ),
    skipped=(
        (r"^(model\.)?visual\.|vision_tower\.|vision_model\.", "vision"),
        (r"^(language_model\.)?mtp\.", "MTP"),
        SKIP_ROTARY,
    ),
    experts="model.layers.{layer}.mlp",
)


def read_spec(fields: Fields, root: Fields, model_type: str) -> ModelSpec:
    fields.only("norm_topk_prob", True)
    fields.only("mlp_only_layers", [])
    hidden = read_hidden(fields)
    n_layers = fields.whole("num_hidden_layers", high=MAX_LAYERS)
    attention = read_gated_attention(fields, hidden)
    delta = read_delta_net(fields, fused=False)
    full = read_hybrid_pattern(fields, n_layers)
    moe = qwen_moe(fields, normalize=True)
    layers = tuple(hybrid_layer(i, hidden, attention if full[i] else delta, moe) for i in range(n_layers))
    return build_model(fields, root, model_type, layers, norm_offset=1, names=NAMES)
