"""The routed experts of one layer: which components one expert has, and at which extents they lie.

Three layouts are found in the wild and give the same table:
  stacked   `….switch_mlp.{gate,up,down}_proj.weight` [E, …]      (MLX)
  fused     `….experts.gate_up_proj` [E, 2I, H] and `….experts.down_proj` [E, H, I]   (HF, newer Qwen)
  separate  `….experts.{e}.{gate,up,down}_proj.weight`              (HF)

A slot holds one expert: its components one after the other in the table's order, nothing between them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from moeflux.core.errors import FormatError, MissingTensorError
from moeflux.formats.dtypes import STORAGE
from moeflux.formats.files import Bytes, Extent
from moeflux.formats.quant import BlockFp8, Codec, Component, Matrix, Shape
from moeflux.formats.tensors import TensorView

PROJECTIONS = ("gate", "up", "down")


@dataclass(frozen=True)
class Projection:
    """One stored weight of an expert: `gate`, `up`, `down`, or `gate_up` (gate rows above up rows)."""

    name: str
    codec: Codec
    shape: Shape  # [out, in]

    @property
    def components(self) -> tuple[Component, ...]:
        return self.codec.components(self.shape)


@dataclass(frozen=True)
class ExpertLayout:
    """What a slot of this layer looks like; the same for all of its experts."""

    projections: tuple[Projection, ...]

    @property
    def nbytes(self) -> int:
        return sum(component.nbytes for component in self.components())

    def components(self) -> Iterator[Component]:
        for projection in self.projections:
            yield from projection.components

    def shape(self, name: str) -> Shape:
        """Logical shape of gate, up or down."""
        for projection in self.projections:
            if projection.name == name:
                return projection.shape
        n_out, n_in = self.projections[0].shape
        return (n_out // 2, n_in)

    def matrices(self, slot: Bytes, source: str) -> dict[str, Matrix]:
        """gate, up and down as views into a slot."""
        pieces, start = [], 0
        for component in self.components():
            pieces.append(slot[start : start + component.nbytes])
            start += component.nbytes
        return self.assemble(pieces, source)

    def assemble(self, pieces: Sequence[Bytes], source: str) -> dict[str, Matrix]:
        """gate, up and down as views into the bytes of the components, wherever these lie."""
        result: dict[str, Matrix] = {}
        rest = iter(pieces)
        for projection in self.projections:
            parts = {}
            for component in projection.components:
                parts[component.name] = next(rest).view(STORAGE[component.dtype]).reshape(component.shape)
            matrix = Matrix(projection.codec, projection.shape, parts, f"{source}.{projection.name}")
            if projection.name == "gate_up":
                result["gate"], result["up"] = matrix.halves()
            else:
                result[projection.name] = matrix
        return result


@dataclass(frozen=True)
class ExpertTable:
    """Geometry of one layer's experts."""

    layer: int
    n_experts: int
    layout: ExpertLayout
    sources: tuple[tuple[Extent, ...], ...]  # per component: one extent of the whole stack, or one per expert

    @property
    def nbytes(self) -> int:
        return self.n_experts * self.layout.nbytes

    def extents(self, expert: int) -> tuple[Extent, ...]:
        """One extent for each component, in slot order."""
        if not 0 <= expert < self.n_experts:
            raise IndexError(f"expert {expert} of {self.n_experts}")
        return tuple(self._cut(source, expert) for source in self.sources)

    def _cut(self, source: tuple[Extent, ...], expert: int) -> Extent:
        if len(source) == self.n_experts and self.n_experts > 1:
            return source[expert]
        stack = source[0]
        length = stack.length // self.n_experts
        return Extent(stack.file, stack.offset + expert * length, length)


def find_experts(
    base: str, layer: int, has: Callable[[str], bool], view: Callable[[str], TensorView], where: str
) -> ExpertTable:
    """Recognise the layout of the experts under `base` and table them."""
    if has(f"{base}.switch_mlp.gate_proj.weight"):
        return _stacked(layer, [(p, view(f"{base}.switch_mlp.{p}_proj.weight")) for p in PROJECTIONS])
    if has(f"{base}.experts.gate_up_proj"):
        return _stacked(layer, [(p, view(f"{base}.experts.{p}")) for p in ("gate_up_proj", "down_proj")])
    if has(f"{base}.experts.0.gate_proj.weight"):
        return _separate(base, layer, has, view)
    raise MissingTensorError(
        f"no experts for layer {layer}",
        where=f"{where}: {base}",
        hint="looked for switch_mlp.gate_proj.weight, experts.gate_up_proj and experts.0.gate_proj.weight",
    )


def _stacked(layer: int, views: list[tuple[str, TensorView]]) -> ExpertTable:
    n_experts = views[0][1].shape[0] if len(views[0][1].shape) == 3 else 0
    for _, view in views:
        if len(view.shape) != 3 or view.shape[0] != n_experts or n_experts == 0:
            raise FormatError(f"shape {list(view.shape)} is not a stack of {n_experts} experts", where=view.where)
    projections = tuple(Projection(name.removesuffix("_proj"), view.codec, view.shape[1:]) for name, view in views)
    sources = tuple((extent,) for _, view in views for extent in view.extents)
    return _table(layer, n_experts, projections, sources, views[0][1].where)


def _separate(base: str, layer: int, has: Callable[[str], bool], view: Callable[[str], TensorView]) -> ExpertTable:
    n_experts = 0
    while has(f"{base}.experts.{n_experts}.gate_proj.weight"):
        n_experts += 1
    projections: list[Projection] = []
    sources: list[tuple[Extent, ...]] = []
    for name in PROJECTIONS:
        views = [view(f"{base}.experts.{e}.{name}_proj.weight") for e in range(n_experts)]
        first = views[0]
        for other in views:
            if (other.codec, other.shape) != (first.codec, first.shape):
                raise FormatError(
                    f"{other.codec} of shape {list(other.shape)} differs from expert 0, "
                    f"{first.codec} of shape {list(first.shape)}",
                    where=other.where,
                )
        projections.append(Projection(name, first.codec, first.shape))
        sources += [tuple(v.extents[i] for v in views) for i in range(len(first.extents))]
    return _table(layer, n_experts, tuple(projections), tuple(sources), first.where)


def _table(
    layer: int, n_experts: int, projections: tuple[Projection, ...], sources: tuple[tuple[Extent, ...], ...], where: str
) -> ExpertTable:
    table = ExpertTable(layer, n_experts, ExpertLayout(projections), sources)
    if any(len(p.shape) != 2 for p in projections):
        raise FormatError(f"the experts of layer {layer} are not matrices", where=where)
    for p in projections:
        if p.name == "gate_up" and p.shape[0] % (2 * (p.codec.block[0] if isinstance(p.codec, BlockFp8) else 1)):
            raise FormatError(f"the {p.shape[0]} rows of gate_up in layer {layer} cannot be halved", where=where)
    hidden, width = table.layout.shape("gate")[::-1]
    if table.layout.shape("up") != (width, hidden) or table.layout.shape("down") != (hidden, width):
        shapes = ", ".join(f"{p.name} {list(p.shape)}" for p in projections)
        raise FormatError(f"the experts of layer {layer} do not fit together: {shapes}", where=where)
    return table
