"""The resident weights: every weight of the spec found in the checkpoint, checked against it, and given to the backend."""

from __future__ import annotations

import re
from collections.abc import Set
from dataclasses import dataclass, replace

import numpy as np

from moeflux.backends.ops import Handle, LayerWeights, Ops
from moeflux.core.errors import FormatError
from moeflux.formats.checkpoint import Checkpoint
from moeflux.formats.experts import ExpertTable
from moeflux.formats.files import Extent
from moeflux.formats.quant import Matrix, Plain, Shape, decode
from moeflux.formats.tensors import TensorView
from moeflux.models.spec import Layer, Mla, ModelSpec, Moe, Weight, Weights


@dataclass(frozen=True)
class Trunk:
    embedding: Handle
    layers: tuple[LayerWeights, ...]
    final_norm: Handle
    head: Handle


def check_trunk(spec: ModelSpec, checkpoint: Checkpoint) -> dict[str, TensorView]:
    """The view of every trunk weight, by name. Reads no weight; anything missing, misshapen or not understood raises."""
    views: dict[str, TensorView] = {}
    for weight in spec.weights():
        for name, shape in _stored(weight, checkpoint):
            views[name] = _checked(checkpoint, name, shape, weight)
    used = {extent for view in views.values() for extent in view.extents}
    for layer, moe in spec.moe_layers():
        table = _checked_experts(spec, checkpoint, layer, moe)
        used.update(extent for source in table.sources for extent in source)
    _refuse_unknown(spec, checkpoint, used)
    return views


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


def _stored(weight: Weight, checkpoint: Checkpoint) -> list[tuple[str, Shape]]:
    """Names and shapes under which this checkpoint keeps the weight."""
    if weight.split and not checkpoint.has(weight.name) and checkpoint.has(weight.split[0][0]):
        return list(weight.split)
    if weight.kind == "conv":  # a depthwise kernel: HF keeps [C, 1, K], MLX [C, K, 1]
        channels, width = weight.shape
        return [(weight.name, (channels, 1, width) if checkpoint.layout == "hf" else (channels, width, 1))]
    return [(weight.name, weight.shape)]


def _checked(checkpoint: Checkpoint, name: str, shape: Shape, weight: Weight) -> TensorView:
    view = checkpoint.tensor(name)
    if view.shape != shape:
        raise FormatError(
            f"has shape {list(view.shape)}, config.json says {list(shape)}",
            where=view.where,
            hint="does config.json belong to these weights?",
        )
    if weight.kind not in ("matrix", "embedding") and not isinstance(view.codec, Plain):
        raise FormatError(f"is quantised ({view.codec}), which a {weight.kind} never is", where=view.where)
    return view


def _checked_experts(spec: ModelSpec, checkpoint: Checkpoint, layer: int, moe: Moe) -> ExpertTable:
    table = checkpoint.experts(layer)
    where = f"{checkpoint.files.paths[table.sources[0][0].file]}: {spec.names.experts.format(layer=layer)}"
    if table.n_experts != moe.router.n_experts:
        raise FormatError(f"{table.n_experts} experts, config.json says {moe.router.n_experts}", where=where)
    if table.layout.shape("gate") != (moe.width, spec.hidden):
        raise FormatError(
            f"experts of shape {list(table.layout.shape('gate'))}, config.json says {[moe.width, spec.hidden]}", where=where
        )
    return table


def _refuse_unknown(spec: ModelSpec, checkpoint: Checkpoint, used: Set[Extent]) -> None:
    """A tensor inside a layer that no role asks for would silently change the math, so it is refused."""
    for name in sorted(checkpoint.names):
        if re.match(r"model\.layers\.\d+\.", name) and checkpoint.extent(name) not in used:
            raise FormatError(f"the {spec.model_type} family has no place for this tensor", where=checkpoint.where(name))
