"""How fast a drive gives a model's own experts: random experts, each read component by component, by one or more readers.

A sample reads what no earlier sample read, as far as the model has that much. Buffered ones are taken from experts that are
not in the page cache, and leave none there; a sample says whether that worked (`cold`). What drives and hypervisors keep in
caches of their own cannot be seen from here.
"""

from __future__ import annotations

import errno
import mmap
import os
import threading
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import asdict, dataclass
from types import TracebackType
from typing import Any, Self

import numpy as np

from moeflux.core.errors import ReadError
from moeflux.core.pages import PAGE, round_up
from moeflux.formats.checkpoint import Checkpoint
from moeflux.formats.experts import ExpertTable
from moeflux.formats.files import Extent
from moeflux.plan.page_cache import cached_share, forget

SAMPLE_BYTES = 256 * 2**20  # at most, but for large experts
COLD_SHARE = 0.02  # of a sample may have been in the page cache
Expert = tuple[Extent, ...]


@dataclass(frozen=True)
class Sample:
    """One measurement; the bytes are those of whole experts."""

    direct: bool
    n_readers: int
    n_bytes: int
    seconds: float
    cold: bool

    @property
    def bytes_s(self) -> float:
        return self.n_bytes / self.seconds

    def as_dict(self) -> dict[str, Any]:
        return {**asdict(self), "bytes_s": self.bytes_s}


class ExpertReads:
    """Owns its own descriptors on the files of a checkpoint, past the page cache (where that is possible) and through it."""

    def __init__(self, checkpoint: Checkpoint, layers: Sequence[int], seed: int = 0, *, weights_only: bool = False) -> None:
        """`weights_only`: without scales and biases."""
        self._paths = checkpoint.files.paths
        self._tables = [checkpoint.experts(layer) for layer in layers]
        self._weights_only = weights_only
        self._order = self._shuffled(seed)
        self._buffered: list[int] = []
        self._direct: list[int] = []
        self.no_direct: str | None = None  # why not, where O_DIRECT does not work here
        try:
            self._buffered = [os.open(path, os.O_RDONLY | os.O_CLOEXEC) for path in self._paths]
            self._open_direct()
        except OSError as error:
            self.close()
            raise ReadError(error.strerror or str(error), where=str(error.filename)) from error

    @property
    def expert_bytes(self) -> int:
        return max(sum(extent.length for extent in self._extents(table, 0)) for table in self._tables)

    def sample(self, direct: bool, n_readers: int, seconds: float) -> Sample:
        """Read for about so long, or less where a sample is full before."""
        limit = max(SAMPLE_BYTES, 2 * n_readers * self.expert_bytes)
        batch, cold = (self._next(limit), True) if direct else self._next_cold(limit)
        n_bytes, elapsed = self._run(batch, self._direct if direct else self._buffered, n_readers, seconds)
        if not direct:
            self._forget(batch)
        return Sample(direct, n_readers, n_bytes, elapsed, cold)

    def close(self) -> None:
        for descriptors in (self._buffered, self._direct):
            while descriptors:
                os.close(descriptors.pop())

    def _shuffled(self, seed: int) -> Iterator[tuple[int, int]]:
        """(layer, expert) in random order, again and again."""
        counts = [table.n_experts for table in self._tables]
        pairs = np.array([(i, e) for i, n in enumerate(counts) for e in range(n)])
        random = np.random.default_rng(seed)
        while True:
            yield from (tuple(pair) for pair in random.permutation(pairs).tolist())

    def _open_direct(self) -> None:
        """Some file systems refuse O_DIRECT when a file is opened, some when it is read."""
        try:
            for path in self._paths:
                self._direct.append(os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_DIRECT))
            os.preadv(self._direct[0], [mmap.mmap(-1, PAGE)], 0)
        except OSError as error:
            if error.errno not in (errno.EINVAL, errno.EOPNOTSUPP):
                raise
            self.no_direct = f"O_DIRECT does not work on this file system ({error.strerror})"

    def _extents(self, table: ExpertTable, expert: int) -> Expert:
        both = zip(table.layout.components(), table.extents(expert), strict=True)
        return tuple(extent for component, extent in both if component.is_weight or not self._weights_only)

    def _next(self, limit: int) -> list[Expert]:
        """Experts of so many bytes, or all of them."""
        batch: list[Expert] = []
        left = limit
        for _ in range(sum(table.n_experts for table in self._tables)):
            layer, expert = next(self._order)
            batch.append(self._extents(self._tables[layer], expert))
            left -= sum(extent.length for extent in batch[-1])
            if left <= 0:
                break
        return batch

    def _next_cold(self, limit: int) -> tuple[list[Expert], bool]:
        """Rather experts that are not in the page cache than ones that must be dropped from it first."""
        candidates = self._next(3 * limit)
        candidates.sort(key=self._cached)
        batch, left = [], limit
        while candidates and left > 0:
            batch.append(candidates.pop(0))
            left -= sum(extent.length for extent in batch[-1])
        self._forget(expert for expert in batch if self._cached(expert) > 0)
        return batch, sum(map(self._cached, batch)) <= COLD_SHARE * len(batch)

    def _cached(self, expert: Expert) -> float:
        largest = max(expert, key=lambda extent: extent.length)  # stands for the others, which would cost as many calls
        return cached_share(self._buffered[largest.file], largest.offset, largest.length)

    def _forget(self, batch: Iterator[Expert] | list[Expert]) -> None:
        for expert in batch:
            for extent in expert:
                forget(self._buffered[extent.file], extent.offset, extent.length)

    def _run(self, batch: list[Expert], descriptors: list[int], n_readers: int, seconds: float) -> tuple[int, float]:
        """Bytes read, and the time until the last reader was done."""
        todo, lock = iter(batch), threading.Lock()
        size = max(extent.length for expert in batch for extent in expert)
        buffers = [mmap.mmap(-1, round_up(size, PAGE) + PAGE) for _ in range(n_readers)]
        for memory in buffers:
            memory.write(bytes(len(memory)))  # the first touch of a page is not the drive's time
        start = time.perf_counter()

        def work(memory: mmap.mmap) -> int:
            done = 0
            while time.perf_counter() - start < seconds:
                with lock:
                    expert = next(todo, None)
                if expert is None:
                    break
                for extent in expert:
                    self._read(descriptors, extent, memoryview(memory))
                    done += extent.length
            return done

        with ThreadPoolExecutor(n_readers) as readers:
            n_bytes = sum(readers.map(work, buffers))
        return n_bytes, max(time.perf_counter() - start, 1e-9)

    def _read(self, descriptors: list[int], extent: Extent, buffer: memoryview) -> None:
        """Past the page cache, in whole pages."""
        skip = extent.offset % PAGE if descriptors is self._direct else 0
        wanted = skip + extent.length
        end = round_up(wanted, PAGE) if descriptors is self._direct else wanted
        done = 0
        while done < wanted:
            try:
                n = os.preadv(descriptors[extent.file], [buffer[done:end]], extent.offset - skip + done)
            except OSError as error:
                raise ReadError(error.strerror or str(error), where=str(self._paths[extent.file])) from error
            if n == 0:
                raise ReadError(
                    f"only {max(0, done - skip)} of the {extent.length} bytes at {extent.offset} are left",
                    where=str(self._paths[extent.file]),
                    hint="it was shortened while open; download it again",
                )
            done += n

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        with suppress(OSError):
            self.close()
