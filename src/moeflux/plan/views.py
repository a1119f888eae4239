"""Every weight of the spec found in the checkpoint and checked against it, before any of them is read."""

from __future__ import annotations

import re
from collections.abc import Set

from moeflux.core.errors import FormatError
from moeflux.formats.checkpoint import Checkpoint
from moeflux.formats.experts import ExpertTable
from moeflux.formats.files import Extent
from moeflux.formats.quant import Plain, Shape
from moeflux.formats.tensors import TensorView
from moeflux.models.spec import ModelSpec, Moe, Weight


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


def skipped_note(checkpoint: Checkpoint) -> tuple[str, ...]:
    """One line about what the checkpoint holds and a text model does not need."""
    if not checkpoint.skipped:
        return ()
    kinds = ", ".join(f"{n} {kind} tensor{'s' if n > 1 else ''}" for kind, n in sorted(checkpoint.skipped.items()))
    return (f"skipped {kinds}: not part of the text model",)


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
