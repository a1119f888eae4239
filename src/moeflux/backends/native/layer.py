"""A layer of the trunk as one native object, so that all layers of a step are one call instead of a dozen each.

Streaming weights empties the caches, so each Python call in between costs several times what it does when measured alone.
"""

from __future__ import annotations

from functools import cache

import numpy as np

import moeflux._native as _native
from moeflux.backends.ops import LayerWeights
from moeflux.backends.rope import frequencies, mla_scale, rotation_scale
from moeflux.models.spec import Attention, DeltaNet, Mla, Moe, Rope


def fuse_layer(w: LayerWeights, eps: float) -> _native.Layer | None:
    """None for a layer with biases, which is rare enough to be run block by block."""
    handles = {"mixer_norm": w.mixer_norm, "ffn_norm": w.ffn_norm, **w.mixer, **w.ffn}
    if any(role.endswith(".bias") for role in handles):
        return None
    layer = _native.Layer()
    layer.common(len(w.mixer_norm), eps)
    for role, handle in handles.items():
        if isinstance(handle, np.ndarray):
            layer.vector(role, handle)
        elif isinstance(handle, _native.Heads):
            layer.heads(role, handle)
        else:
            layer.matrix(role, handle)
    match w.spec.mixer:
        case Attention() as a:
            layer.attention(a.n_heads, a.n_kv_heads, a.head_dim, a.gated, rotation(a.rope))
        case Mla() as m:
            layer.latent(m.n_heads, m.nope_dim, m.kv_rank, mla_scale(m), m.norm_eps, rotation(m.rope))
        case DeltaNet() as d:
            layer.delta(d.n_key_heads, d.n_value_heads, d.key_dim, d.value_dim, d.conv_width)
    if isinstance(w.spec.ffn, Moe):
        r = w.spec.ffn.router
        layer.routing(r.kind == "noaux_tc", r.n_experts, r.k, r.n_groups, r.top_groups, r.normalize, r.scale)
    layer.check(w.spec.mixer_norm.name)
    return layer


@cache
def rotation(rope: Rope) -> _native.Rotation:
    return _native.Rotation(frequencies(rope).tolist(), rotation_scale(rope), rope.pairing == "interleaved")
