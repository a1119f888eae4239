"""The experts of a checkpoint as the native store wants them: components at extents, and matrices that look into them."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np

import moeflux._native as _native
from moeflux.formats.experts import ExpertLayout, ExpertTable, Projection
from moeflux.formats.quant import Affine, BlockFp8, Codec, Plain, Shape

Place = tuple[int, int]  # number of the component in the expert, offset in it
NOWHERE: Place = (-1, 0)


def native_layers(tables: Iterable[ExpertTable], keep_scales: bool = False) -> list[_native.ExpertLayer | None]:
    """By layer number; None for layers without routed experts."""
    by_layer = {table.layer: native_layer(table, keep_scales) for table in tables}
    return [by_layer.get(layer) for layer in range(max(by_layer) + 1)]


def native_layer(table: ExpertTable, keep_scales: bool = False) -> _native.ExpertLayer:
    layer = _native.ExpertLayer(table.n_experts)
    named = [(projection.name, component) for projection in table.layout.projections for component in projection.components]
    extents = [table.extents(expert) for expert in range(table.n_experts)]
    for i, (projection, component) in enumerate(named):
        files = np.array([expert[i].file for expert in extents], dtype=np.int64)
        offsets = np.array([expert[i].offset for expert in extents], dtype=np.int64)
        kept = keep_scales and not component.is_weight
        layer.component(projection, component.name, component.dtype, component.nbytes, files, offsets, kept)
    first = 0
    for stored in table.layout.projections:
        _add_matrices(layer, stored, first)
        first += len(stored.components)
    return layer


def slot_sizes(layout: ExpertLayout, keep_scales: bool = False) -> list[int]:
    """Of the components that lie in a slot."""
    return [component.nbytes for component in layout.components() if component.is_weight or not keep_scales]


def _add_matrices(layer: _native.ExpertLayer, stored: Projection, first: int) -> None:
    """A stored gate_up is two matrices, the gate's rows above."""
    if stored.name != "gate_up":
        _add_matrix(layer, stored.name, stored.codec, stored.shape, [(first + i, 0) for i in range(len(stored.components))])
        return
    half = (stored.shape[0] // 2, stored.shape[1])
    for name, of in (("gate", 0), ("up", 1)):
        places = [(first + i, of * (component.nbytes // 2)) for i, component in enumerate(stored.components)]
        _add_matrix(layer, name, stored.codec, half, places)


def _add_matrix(layer: _native.ExpertLayer, name: str, codec: Codec, shape: Shape, places: list[Place]) -> None:
    rows, cols = shape
    weight, scales, biases = [*places, NOWHERE, NOWHERE][:3]
    match codec:
        case Plain(dtype):
            layer.matrix(name, rows, cols, "plain", dtype, 0, 0, 0, weight, scales, biases)
        case Affine(bits, group, dtype):
            layer.matrix(name, rows, cols, "affine", dtype, bits, group, 0, weight, scales, biases)
        case BlockFp8(block, dtype):
            layer.matrix(name, rows, cols, "fp8", dtype, 0, 0, block[0], weight, scales, biases)
