"""What this machine can do at best, measured beside everything else: on shared machines only ratios of one run count."""

from __future__ import annotations

import os
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from itertools import pairwise
from statistics import median

from moeflux.backends.native.ops import NativeOps
from moeflux.formats.checkpoint import Checkpoint
from moeflux.plan.drive import ExpertReads
from moeflux.plan.page_cache import forget
from moeflux.runtime.engine import Engine

BUFFER_BYTES = 2**30
DRIVE_SECONDS = 0.5  # of each look at the drive


@dataclass(frozen=True)
class Samples:
    """Repeated measurements of one rate; higher is better."""

    values: tuple[float, ...]

    @property
    def best(self) -> float:
        return max(self.values)

    @property
    def median(self) -> float:
        return median(self.values)

    @property
    def around(self) -> tuple[float, ...]:
        """Of a limit that was looked at before, between and after repeats: what it was around each of them."""
        return tuple((a + b) / 2 for a, b in pairwise(self.values))


class Limits:
    """The read bandwidth and the integer rate of a backend's threads. Call `sample` between what is measured."""

    def __init__(self, ops: NativeOps, buffer_bytes: int = BUFFER_BYTES) -> None:
        self._ops = ops
        self._buffer = ops.allocate(buffer_bytes)
        self._buffer[:] = 1  # so that every page is there
        self._read: list[float] = []
        self._multiply: list[float] = []

    def sample(self) -> None:
        """The better of two reads, because one takes milliseconds and is easily disturbed."""
        self._read.append(len(self._buffer) / min(self._ops.time_read(self._buffer) for _ in range(2)))
        self._multiply.append(self._ops.multiply_rate())

    def read_until(self, done: threading.Event) -> float:
        """Bytes per second while something else runs; not a sample."""
        start, n_bytes = time.perf_counter(), 0
        while n_bytes == 0 or not done.is_set():
            self._ops.time_read(self._buffer)
            n_bytes += len(self._buffer)
        return n_bytes / (time.perf_counter() - start)

    @property
    def read(self) -> Samples:
        """Bytes per second."""
        return Samples(tuple(self._read))

    @property
    def multiply(self) -> Samples:
        """Multiply-adds per second."""
        return Samples(tuple(self._multiply))


class DriveLimit:
    """What the drive gives of an engine's experts, by the readers that its plan chose. Sampled like `Limits`."""

    def __init__(self, engine: Engine) -> None:
        self._direct, self._n_readers = engine.plan.direct, engine.plan.n_readers
        self._checkpoint = Checkpoint(engine.config.model, engine.spec.names)
        layers = [layer for layer, _ in engine.spec.moe_layers()]
        self._reads = ExpertReads(self._checkpoint, layers, weights_only=engine.plan.keep_scales)
        self._rates: list[float] = []
        self.cold = True  # all samples were
        self.forget()

    @property
    def rate(self) -> Samples:
        """Bytes per second."""
        return Samples(tuple(self._rates))

    def sample(self) -> None:
        self._rates.append(self.look())

    def look(self) -> float:
        """Bytes per second now; not a sample."""
        found = self._reads.sample(self._direct, self._n_readers, DRIVE_SECONDS)
        self.cold = self.cold and found.cold
        self.forget()
        return found.bytes_s

    def forget(self) -> None:
        """What buffered reads have left in the page cache."""
        if self._direct:
            return
        for path in self._checkpoint.files.paths:
            descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
            forget(descriptor, 0, 0)
            os.close(descriptor)

    def close(self) -> None:
        self._reads.close()
        self._checkpoint.close()


class AtOnce:
    """What drive and memory give while both are asked for all they have and nobody computes: they share the processor
    (system calls, interrupts) and the memory. Sampled like `Limits`. Memory is also read while the drive's readers begin and
    end, so it seems a little better than it is: a limit from this is rather too hard."""

    def __init__(self, limits: Limits, drive: DriveLimit) -> None:
        self._limits, self._drive = limits, drive
        self._rates: list[tuple[float, float]] = []

    def sample(self) -> None:
        done = threading.Event()
        with ThreadPoolExecutor(1) as beside:
            drive = beside.submit(self._drive.look)
            drive.add_done_callback(lambda _: done.set())
            read = self._limits.read_until(done)
        self._rates.append((drive.result(), read))

    @property
    def drive(self) -> Samples:
        """Bytes per second."""
        return Samples(tuple(drive for drive, _ in self._rates))

    @property
    def read(self) -> Samples:
        """Bytes of memory per second."""
        return Samples(tuple(read for _, read in self._rates))
