"""The resident weights, read and given to the backend."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np

from moeflux.backends.ops import Handle, LayerWeights, Ops
from moeflux.core.errors import FormatError
from moeflux.formats.checkpoint import Checkpoint
from moeflux.formats.quant import Matrix, decode
from moeflux.formats.tensors import TensorView
from moeflux.models.spec import Layer, Mla, ModelSpec, Weight, Weights


@dataclass(frozen=True)
class Trunk:
    embedding: Handle
    layers: tuple[LayerWeights, ...]
    final_norm: Handle
    head: Handle


def load_trunk(spec: ModelSpec, checkpoint: Checkpoint, ops: Ops, views: dict[str, TensorView]) -> Trunk:
    """`views`: what `check_trunk` found."""
    offset = spec.norm_offset if checkpoint.layout == "hf" else 0

    def read(name: str) -> Matrix:
        """Straight into the backend's memory, so that no weight is in memory twice, not even while it is loaded."""
        return checkpoint.load(views[name], ops.place)

    def load(weight: Weight) -> Handle:
        if weight.kind == "matrix":
            return ops.load_matrix(read(weight.name))
        matrix = checkpoint.load(views[weight.name])
        values = decode(matrix).reshape(weight.shape)
        if not np.isfinite(values).all():
            raise FormatError("holds NaN or infinity", where=matrix.source, hint="the file is damaged; download it again")
        return ops.load_vector(values + np.float32(offset) if weight.kind == "norm" and offset else values)

    def load_block(weights: Weights, block: object) -> dict[str, Handle]:
        handles: dict[str, Handle] = {}
        for role, weight in weights.items():
            if not weight.split:
                handles[role] = load(weight)
            elif weight.name in views:
                assert isinstance(block, Mla)
                handles["embed_q"], handles["unembed_out"] = ops.load_kv_b(read(weight.name), block)
            else:
                for name, _ in weight.split:
                    handles[name.split(".")[-2]] = ops.load_heads(read(name))
        return handles

    def load_layer(layer: Layer) -> LayerWeights:
        mixer = load_block(layer.mixer_weights, layer.mixer)
        ffn = load_block(layer.ffn_weights, layer.ffn)
        weights = LayerWeights(layer, mixer, ffn, load(layer.mixer_norm), load(layer.ffn_norm))
        return replace(weights, fused=ops.fuse(weights, spec.norm_eps))

    layers = tuple(load_layer(layer) for layer in spec.layers)
    table = read(spec.embedding.name)
    head = load(spec.head) if spec.head else ops.load_matrix(table)
    return Trunk(ops.load_embedding(table), layers, load(spec.final_norm), head)
