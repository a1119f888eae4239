"""The store of a checkpoint's routed experts: a fixed number of slots in memory, leases on them, hints for later.

A slot is empty, filling, ready, leased or failed. Why leased bytes never change:
  1. Bytes of a slot change only while it is filling.
  2. Filling starts only from a slot that nobody has leased, and that is decided under one mutex.
  3. A slot becomes ready under that mutex, after its last reader has written its last byte.
  4. A lease is taken under the same mutex and ends only when its owner says so.
Where scales are kept, those of an expert are read with it the first time, and lie beside the slots unchanged from then on.
A failed read never becomes ready: whoever waits for it gets the error, and the next to ask for the expert starts anew.

Demands come before hints in the readers' queue; a hint never takes a slot that this token has asked for. No choice made here
(size, policy, reader, hints) changes which bytes a lease shows, so none changes a result.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import Literal, Self

import numpy as np
import numpy.typing as npt

import moeflux._native as _native
from moeflux.core.errors import OptionError, StateError
from moeflux.core.log import log
from moeflux.formats.checkpoint import Checkpoint
from moeflux.formats.experts import ExpertLayout, ExpertTable
from moeflux.formats.quant import Matrix
from moeflux.store.cancel import CancelFlag
from moeflux.store.index import native_layers, slot_sizes
from moeflux.store.policy import Ids, as_ids, check_policy, join_swept, layer_floor
from moeflux.store.reader import PythonReaders
from moeflux.store.stats import StoreStats

READERS = ("native", "python")


@dataclass(frozen=True)
class StoreOptions:
    """`n_slots`: experts in memory at most. `k`: experts that one token asks of a layer. `sweep_slots`: how many slots a
    sweep may take from the rest of the memory at a time. `keep_scales`: scales and biases of every expert stay in memory
    once they were read, beside the slots. `under_way`: bytes that are read at a time at most, 0 for any."""

    n_slots: int
    k: int
    policy: str = "lru"
    reader: Literal["native", "python", "manual"] = "native"
    direct: bool = False
    n_readers: int = 4
    sweep_slots: int = 16
    keep_scales: bool = False
    under_way: int = 0

    def __post_init__(self) -> None:
        check_policy(self.policy)
        if self.reader not in (*READERS, "manual"):
            raise OptionError(
                f"unknown reader {self.reader!r}", where="option 'reader'", hint=f"one of {', '.join(READERS)}"
            )
        for name, least in (("n_slots", 1), ("k", 1), ("n_readers", 1), ("sweep_slots", 1)):
            if getattr(self, name) < least:
                raise OptionError(f"{getattr(self, name)} is too few", where=f"option {name!r}", hint=f"at least {least}")


def slot_bytes(layouts: Iterable[ExpertLayout], direct: bool, keep_scales: bool = False) -> int:
    """Bytes of memory for one expert, whichever it is. Direct reads need room for whole pages."""
    return max(slot_bytes_of(slot_sizes(layout, keep_scales), direct) for layout in set(layouts))


def slot_bytes_of(sizes: Sequence[int], direct: bool) -> int:
    """The same for components of these sizes."""
    return int(_native.slot_bytes(list(sizes), direct))


class Lease:
    """Permission to read the experts asked for, until it is released. One thread at a time uses it."""

    def __init__(self, native: _native.StoreLease, table: ExpertTable, source: str) -> None:
        self._native: _native.StoreLease | None = native
        self._table = table
        self._source = source

    @property
    def native(self) -> _native.StoreLease:
        if self._native is None:
            raise StateError("the lease was released")
        return self._native

    def next(self, *, wait: bool = True, cancel: CancelFlag | None = None) -> list[int]:
        """Experts that are ready and were not named before: at first those in memory, later those that arrived.

        Waits where there is none yet, until `cancel` is set. Empty: all were named, or, without `wait`, none is ready now.
        """
        return self.native.next(wait, cancel.native if cancel else None)

    def wait(self) -> None:
        """Until every expert is there."""
        while self.next():
            pass

    def matrices(self, expert: int) -> dict[str, Matrix]:
        """gate, up and down of an expert that `next` named, as views into its slot: good until the release."""
        return self._table.layout.assemble(self.native.views(expert), f"{self._source}, expert {expert}")

    def release(self, experts: Iterable[int] | None = None) -> None:
        """These experts, or all: their slots may be filled anew."""
        if self._native is None:
            return
        if experts is not None:
            self._native.release_some(list(experts))
            return
        self._native.release()
        self._native = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.release()


class ExpertStore:
    """The experts of these layers. Opens files of its own; the checkpoint may be closed before it.

    Of no use in a child of fork(): StateError.
    """

    def __init__(self, checkpoint: Checkpoint, layers: Iterable[int], options: StoreOptions) -> None:
        self.options = options
        self._tables = {layer: checkpoint.experts(layer) for layer in layers}
        self._paths = checkpoint.files.paths
        floor = layer_floor(options.n_slots, len(self._tables), options.k)
        native = native_layers(self._tables.values(), options.keep_scales)
        n_native = options.n_readers if options.reader == "native" else 0
        paths = [str(path) for path in self._paths]
        self.native = _native.open_store(
            paths, native, options.n_slots, floor, options.policy, options.direct, n_native, options.sweep_slots,
            options.under_way,
        )  # fmt: skip
        self._readers: PythonReaders | None = None
        if options.reader == "python":
            try:
                self._readers = PythonReaders(self.native, self._paths, options.n_readers, direct=options.direct)
            except BaseException:
                self.native.close()
                raise
        self._tell_notes()

    @property
    def n_experts(self) -> int:
        """Of all layers."""
        return sum(table.n_experts for table in self._tables.values())

    def acquire(self, layer: int, ids: Ids, *, sweep: bool = False, swept: Ids = ()) -> Lease:
        """A lease on these experts. Starts the reads that are missing and waits for none.

        `sweep`: every one is used once and released early (`Lease.release`), and there may be more than fit.
        `swept`: experts besides, for which that holds.
        """
        asked, n_swept = join_swept(ids, sweep, swept)
        lease = self.native.acquire(layer, asked, n_swept)
        table = self._tables[layer]
        return Lease(lease, table, f"{self._paths[table.sources[0][0].file].name}: layer {layer}")

    def hint(self, layer: int, ids: Ids, *, sweep: bool = False, soon: bool = False) -> None:
        """Experts that will likely be asked for. May do nothing.

        `sweep`: by a sweep; takes no slot but free ones and what sweeps left behind. `soon`: read before other hints.
        """
        self.native.hint(layer, as_ids(ids), sweep, soon)

    def next_token(self) -> bool:
        """A new token begins. Whether the demands of the one before took more than half of the slots."""
        return self.native.next_token()

    def stats(self) -> StoreStats:
        self._tell_notes()
        return StoreStats(**self.native.stats())

    def resident(self) -> npt.NDArray[np.bool_]:
        """[layer, expert]: whether all its bytes are in memory now. Cheap enough for every token."""
        return np.frombuffer(self.native.resident(), dtype=np.bool_).reshape(max(self._tables) + 1, -1)

    def close(self) -> None:
        """Ends the readers after the reads they are in; whoever waits gets a ClosedError. Closing twice is fine."""
        if not self.native.here:  # a child of fork(): its readers are the parent's
            return
        self._tell_notes()
        self.native.close()
        if self._readers:
            self._readers.join()

    def _tell_notes(self) -> None:
        for note in self.native.take_notes():
            log.warning("%s", note)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()
