"""A view of one tensor of a checkpoint: codec, logical shape, and where its components lie. No bytes are touched."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from moeflux.formats.files import Extent
from moeflux.formats.quant import Codec, Component, Shape


@dataclass(frozen=True)
class TensorView:
    name: str  # as stored
    codec: Codec
    shape: Shape
    extents: tuple[Extent, ...]  # one for each of the codec's components
    path: Path  # of the file that holds the first of them

    @property
    def components(self) -> tuple[Component, ...]:
        return self.codec.components(self.shape)

    @property
    def where(self) -> str:
        """File and tensor, for errors."""
        return f"{self.path}: {self.name}"

    @property
    def nbytes(self) -> int:
        return sum(extent.length for extent in self.extents)
