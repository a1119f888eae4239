"""Experts read when they are needed and dropped when the layer is done: the store's interface without a cache."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from types import TracebackType

import numpy as np

from moeflux.formats.checkpoint import Checkpoint
from moeflux.formats.files import Bytes
from moeflux.formats.quant import Matrix


class Lease:
    """Permission to read some experts of one layer, until it is released."""

    def __init__(self, checkpoint: Checkpoint, layer: int, ids: Iterable[int]) -> None:
        self._checkpoint = checkpoint
        self._table = checkpoint.experts(layer)
        self._granted = frozenset(ids)

    def matrices(self, expert: int) -> Mapping[str, Matrix]:
        if expert not in self._granted:
            raise KeyError(f"expert {expert} of layer {self._table.layer} is not part of this lease")
        slot: Bytes = np.empty(self._table.layout.nbytes, dtype=np.uint8)
        start = 0
        for extent in self._table.extents(expert):
            self._checkpoint.files.read(extent, slot[start : start + extent.length])
            start += extent.length
        file = self._checkpoint.files.paths[self._table.extents(expert)[0].file].name
        return self._table.layout.matrices(slot, f"{file}: layer {self._table.layer}, expert {expert}")

    def release(self) -> None:
        self._granted = frozenset()

    def __enter__(self) -> Lease:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.release()


class DemandExperts:
    """`acquire` gives a lease, as the store's does. One expert's bytes are in memory at a time."""

    def __init__(self, checkpoint: Checkpoint) -> None:
        self._checkpoint = checkpoint

    def acquire(self, layer: int, ids: Iterable[int]) -> Lease:
        return Lease(self._checkpoint, layer, ids)
