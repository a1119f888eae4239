"""Where the routed experts come from: read when needed, or all in memory where they fit.

`acquire(layer, ids)` gives a lease, whose bank holds these experts at least; it may be used until the release.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from types import TracebackType
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from moeflux.backends.ops import Handle, Ops
from moeflux.core.errors import FormatError, StateError
from moeflux.formats.checkpoint import Checkpoint
from moeflux.formats.files import Bytes
from moeflux.formats.quant import Matrix, broken_part

Progress = Callable[[int, int], None]  # bytes done, bytes in all

N_READERS = 4


class Lease:
    """Permission to use the experts in `bank` that were asked for, until it is released."""

    def __init__(self, bank: Handle) -> None:
        self._bank: Handle | None = bank

    @property
    def bank(self) -> Handle:
        if self._bank is None:
            raise StateError("the lease was released")
        return self._bank

    def release(self) -> None:
        self._bank = None

    def __enter__(self) -> Lease:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.release()


Ids = npt.NDArray[Any]  # of any shape, repetitions allowed


class Experts(Protocol):
    def acquire(self, layer: int, ids: Ids) -> Lease: ...

    def resident(self, n_layers: int) -> list[Handle | None] | None:
        """The bank of each layer (None for one without experts) if every expert is in memory and stays there."""


class DemandExperts:
    """Reads the experts of a lease when it is taken, and forgets them with it."""

    def __init__(self, checkpoint: Checkpoint, ops: Ops) -> None:
        self._checkpoint = checkpoint
        self._ops = ops

    def acquire(self, layer: int, ids: Ids) -> Lease:
        table, ops = self._checkpoint.experts(layer), self._ops
        bank = ops.new_bank(table.n_experts)
        for expert in np.unique(ids).tolist():
            slot = ops.allocate(table.layout.nbytes)
            ops.put_expert(bank, expert, read_expert(self._checkpoint, layer, expert, slot))
        return Lease(bank)

    def resident(self, n_layers: int) -> None:
        return None


class ResidentExperts:
    """Every expert in memory, in slots side by side, one block of memory per layer."""

    def __init__(self, checkpoint: Checkpoint, ops: Ops, layers: Iterable[int], progress: Progress | None = None) -> None:
        self._banks: dict[int, Handle] = {}
        tables = {layer: checkpoint.experts(layer) for layer in layers}
        total, done = sum(table.nbytes for table in tables.values()), 0
        with ThreadPoolExecutor(N_READERS) as readers:
            for layer, table in tables.items():
                memory, size = ops.allocate(table.nbytes), table.layout.nbytes
                slots = [memory[e * size : (e + 1) * size] for e in range(table.n_experts)]
                read = partial(read_expert, checkpoint, layer)
                bank = self._banks[layer] = ops.new_bank(table.n_experts)
                for expert, matrices in enumerate(readers.map(read, range(table.n_experts), slots)):
                    ops.put_expert(bank, expert, matrices)
                done += table.nbytes
                if progress:
                    progress(done, total)

    def acquire(self, layer: int, ids: Ids) -> Lease:
        return Lease(self._banks[layer])

    def resident(self, n_layers: int) -> list[Handle | None]:
        return [self._banks.get(layer) for layer in range(n_layers)]


def read_expert(checkpoint: Checkpoint, layer: int, expert: int, slot: Bytes) -> dict[str, Matrix]:
    """Fill a slot and give its matrices, checked for broken scales."""
    table = checkpoint.experts(layer)
    extents = table.extents(expert)
    start = 0
    for extent in extents:
        checkpoint.files.read(extent, slot[start : start + extent.length])
        start += extent.length
    source = f"{checkpoint.files.paths[extents[0].file].name}: layer {layer}, expert {expert}"
    matrices = table.layout.matrices(slot, source)
    for matrix in matrices.values():
        if part := broken_part(matrix):
            hint = "the file is damaged; download it again"
            raise FormatError(f"{part} holds NaN or infinity", where=matrix.source, hint=hint)
    return matrices
