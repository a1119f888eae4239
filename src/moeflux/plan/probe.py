"""A short look at the machine: how fast its drive gives this model's experts, and by which reader; how fast memory is read.

About a second, and at most `MOST_SECONDS` unless a single read takes longer.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from moeflux.backends.base import Backend
from moeflux.formats.checkpoint import Checkpoint
from moeflux.plan.drive import ExpertReads, Sample

DEPTHS = (1, 4, 16)  # readers
SAMPLE_SECONDS = 0.1
MOST_SECONDS = 2.0
CLOSE = 0.5  # of the best rate: short samples are noisy, idle readers cost little, and too few cost speed
DIRECT_WORTH = 0.9  # of the buffered rate: direct reads leave the page cache and the processor alone
MEMORY_BYTES = 256 * 2**20


@dataclass(frozen=True)
class DriveProbe:
    """What was measured, and the reader that follows from it."""

    samples: tuple[Sample, ...]
    direct: bool
    n_readers: int
    bytes_s: float
    cold: bool  # whether the rate above was measured past or without the page cache
    seconds: float
    notes: tuple[str, ...]

    def as_dict(self) -> dict[str, Any]:
        return {**asdict(self), "samples": [sample.as_dict() for sample in self.samples]}


@dataclass(frozen=True)
class MemoryProbe:
    threads: int
    bytes_s: float  # read by all threads together
    macs_s: float  # integer multiply-adds from registers, of all threads together

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)


def probe_drive(
    checkpoint: Checkpoint, layers: Sequence[int], seconds: float = SAMPLE_SECONDS, *, weights_only: bool = False
) -> DriveProbe:
    """`seconds`: of each of up to eight samples. `weights_only`: as where scales are kept in memory."""
    start = time.perf_counter()
    samples: list[Sample] = []
    notes: list[str] = []
    with ExpertReads(checkpoint, layers, weights_only=weights_only) as reads:
        if reads.no_direct:
            notes.append(reads.no_direct)
        for n_readers in DEPTHS:
            for direct in (False,) if reads.no_direct else (True, False):
                if samples and time.perf_counter() - start + seconds > MOST_SECONDS:
                    break
                samples.append(reads.sample(direct, n_readers, seconds))
    if len(samples) < len(DEPTHS) * (1 if reads.no_direct else 2):
        notes.append(f"the drive is slow: {len(samples)} measurements took all the time there is for it")
    if not all(sample.cold for sample in samples):
        notes.append("some of the files could not be dropped from memory: buffered reads were not cold")
    best = choose(samples)
    elapsed = time.perf_counter() - start
    return DriveProbe(tuple(samples), best.direct, best.n_readers, best.bytes_s, best.cold, elapsed, tuple(notes))


def choose(samples: Sequence[Sample]) -> Sample:
    """The sample whose reader is the best choice. A rate that the page cache gave counts only where there is no other."""
    honest = [sample for sample in samples if sample.cold] or list(samples)
    best = max(honest, key=lambda sample: sample.bytes_s)
    direct = [sample for sample in honest if sample.direct]
    if direct and max(sample.bytes_s for sample in direct) >= DIRECT_WORTH * best.bytes_s:
        best = max(direct, key=lambda sample: sample.bytes_s)
    alike = [s for s in honest if s.direct == best.direct and s.bytes_s >= CLOSE * best.bytes_s]
    return max(alike, key=lambda sample: sample.n_readers)


def probe_memory(backend: Backend, n_bytes: int = MEMORY_BYTES) -> MemoryProbe | None:
    """None for a backend that does not measure itself."""
    found = backend.measure(n_bytes)
    return None if found is None else MemoryProbe(*found)
