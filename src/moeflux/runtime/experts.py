"""The routed experts of an open model: a store, and who is told which of them were chosen.

`acquire(layer, ids)` gives a lease, which hands the experts out as they arrive.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from types import TracebackType
from typing import Any

import numpy as np
import numpy.typing as npt

from moeflux.backends.ops import Handle, Ops, Span
from moeflux.core.errors import StateError
from moeflux.formats.checkpoint import Checkpoint
from moeflux.formats.quant import Matrix
from moeflux.models.spec import ModelSpec
from moeflux.runtime.lossy import requantised
from moeflux.store.cancel import CancelFlag
from moeflux.store.device import DeviceMemory, DeviceTier
from moeflux.store.index import slot_sizes
from moeflux.store.store import ExpertStore, StoreOptions
from moeflux.store.store import Lease as StoreLease
from moeflux.store.trace import TraceRecorder

Progress = Callable[[int, int], None]  # bytes done, bytes in all
Ids = npt.NDArray[Any]  # [T, k]


class Lease:
    """Experts that were asked for, handed out as they arrive. Used once, by one thread, until it is released."""

    def __init__(self, lease: StoreLease, ops: Ops, n_experts: int, bits: int | None = None) -> None:
        self._lease: StoreLease | None = lease
        self._ops = ops
        self._n_experts = n_experts
        self._bits = bits

    def arrivals(self, cancel: CancelFlag | None = None) -> Iterator[tuple[Handle, list[int]]]:
        """A bank and the experts in it: those in memory first. Good until the next one is asked for."""
        while experts := self._open.next(cancel=cancel):
            if cancel:
                cancel.check()
            bank = self._ops.new_bank(self._n_experts)
            matrices = [self._matrices(expert) for expert in experts]  # a bank may look into them, so they live as long
            for expert, found in zip(experts, matrices, strict=True):
                self._ops.put_expert(bank, expert, found)
            yield bank, experts
            self._open.release(experts)  # what is still waited for may need the slots

    def _matrices(self, expert: int) -> dict[str, Matrix]:
        found = self._open.matrices(expert)
        return found if self._bits is None else requantised(found, self._bits)

    @property
    def _open(self) -> StoreLease:
        if self._lease is None:
            raise StateError("the lease was released")
        return self._lease

    def release(self) -> None:
        if self._lease is not None:
            self._lease.release()
            self._lease = None

    def __enter__(self) -> Lease:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.release()


class Experts:
    """The experts of one engine."""

    def __init__(
        self, spec: ModelSpec, checkpoint: Checkpoint, ops: Ops, options: StoreOptions, bits: int | None = None
    ) -> None:
        """`bits`: experts are requantised to so many whenever they are handed out."""
        self._ops = ops
        self._bits = bits
        self._tables = {layer: checkpoint.experts(layer) for layer, _ in spec.moe_layers()}
        self.store = ExpertStore(checkpoint, self._tables, options)
        self._recorder: TraceRecorder | None = None

    @property
    def n_experts(self) -> int:
        return self.store.n_experts

    @property
    def native(self) -> Handle | None:
        """The store for native code; None where experts are requantised on their way."""
        return self.store.native if self._bits is None else None

    @property
    def expert_bytes(self) -> dict[int, int]:
        """By layer: of one expert."""
        return {layer: table.layout.nbytes for layer, table in self._tables.items()}

    @property
    def read_bytes(self) -> dict[int, int]:
        """By layer: what is read of an expert that is not in memory, but for the first time where scales are kept."""
        return {layer: sum(slot_sizes(t.layout, self.store.options.keep_scales)) for layer, t in self._tables.items()}

    def load_all(self, progress: Progress | None = None) -> None:
        """Every expert into memory, for a store that has a slot for each."""
        total, done = sum(table.nbytes for table in self._tables.values()), 0
        for layer, table in self._tables.items():
            with self.store.acquire(layer, range(table.n_experts)) as lease:
                lease.wait()
            done += table.nbytes
            if progress:
                progress(done, total)

    def tell(self, recorder: TraceRecorder) -> None:
        """From now on it is told what every forward chose."""
        self._recorder = recorder

    @property
    def recording(self) -> bool:
        return self._recorder is not None

    def record(self, layer: int, ids: Ids) -> None:
        """ids [T, k]: chosen in a step that leases by itself. `acquire` does it for all others."""
        if self._recorder:
            self._recorder.record(layer, ids)

    def next_token(self) -> None:
        self.store.next_token()

    def begin_step(self, tokens: Sequence[int], decodes: Sequence[bool]) -> None:
        """`decodes`: by token."""
        if self._recorder:
            self._recorder.begin(tokens, decodes)

    def acquire(self, layer: int, ids: Ids, spans: Sequence[Span] = ()) -> Lease:
        """ids [T, k]. Starts the reads that are missing and waits for none.

        Rows that no span calls decoding are a prompt's.
        """
        self.record(layer, ids)
        decoding = np.zeros(len(ids), dtype=bool)
        for span in spans:
            decoding[span.rows] = span.decodes
        lease = self.store.acquire(layer, ids[decoding], swept=ids[~decoding])
        return Lease(lease, self._ops, self._tables[layer].n_experts, self._bits)

    def open_tier(self, memory: DeviceMemory) -> DeviceTier:
        """Experts in a device's memory, above this store."""

        def acquire(layer: int, experts: list[int], sweep: bool) -> Lease:
            lease = self.store.acquire(layer, experts, sweep=sweep)
            return Lease(lease, self._ops, self._tables[layer].n_experts, self._bits)

        return DeviceTier(memory, acquire)

    def close(self) -> None:
        self.store.close()
