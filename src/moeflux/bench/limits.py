"""What this machine can do at best, measured beside everything else: on shared machines only ratios of one run count."""

from __future__ import annotations

from dataclasses import dataclass
from statistics import median

from moeflux.backends.native.ops import NativeOps

BUFFER_BYTES = 2**30


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

    @property
    def read(self) -> Samples:
        """Bytes per second."""
        return Samples(tuple(self._read))

    @property
    def multiply(self) -> Samples:
        """Multiply-adds per second."""
        return Samples(tuple(self._multiply))
