"""What a drive gives at best with a model's own records: random experts, past the page cache and through it, cold.

This is the ceiling that streaming is measured against: nothing is computed meanwhile.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from moeflux.bench.limits import Samples
from moeflux.formats.checkpoint import Checkpoint, read_config
from moeflux.models.registry import read_spec
from moeflux.plan.drive import ExpertReads, Sample

DEPTHS = (1, 2, 4, 8, 16)
Progress = Callable[[int, int], None]


@dataclass(frozen=True)
class IoRow:
    direct: bool
    n_readers: int
    cold: bool  # every sample
    rate: Samples  # bytes per second
    expert_bytes: int

    @property
    def expert_ms(self) -> tuple[float, float]:
        """Best and median of the mean time that a reader takes for one expert."""
        n = 1e3 * self.n_readers * self.expert_bytes
        return n / self.rate.best, n / self.rate.median

    def as_dict(self) -> dict[str, Any]:
        return {
            "direct": self.direct,
            "n_readers": self.n_readers,
            "cold": self.cold,
            "gb_s": [self.rate.best / 1e9, self.rate.median / 1e9],
            "expert_ms": list(self.expert_ms),
            "samples": len(self.rate.values),
        }


@dataclass(frozen=True)
class IoReport:
    model_type: str
    expert_bytes: int
    reads_per_expert: int
    rows: tuple[IoRow, ...]
    notes: tuple[str, ...]

    def as_dict(self) -> dict[str, Any]:
        return {
            "bench": "io",
            "model_type": self.model_type,
            "expert_bytes": self.expert_bytes,
            "reads_per_expert": self.reads_per_expert,
            "rows": [row.as_dict() for row in self.rows],
            "notes": list(self.notes),
        }


def bench_io(path: Path, repeats: int = 5, seconds: float = 0.5, progress: Progress | None = None) -> IoReport:
    """`repeats` rounds over all readers, so that a drive's moods meet all of them alike."""
    spec = read_spec(read_config(path))
    checkpoint = Checkpoint(path, spec.names)
    try:
        layers = [layer for layer, _ in spec.moe_layers()]
        first = checkpoint.experts(layers[0])
        with ExpertReads(checkpoint, layers) as reads:
            modes = (False,) if reads.no_direct else (True, False)
            cases = [(direct, n) for direct in modes for n in DEPTHS]
            samples: dict[tuple[bool, int], list[Sample]] = {case: [] for case in cases}
            for i in range(repeats):
                for j, (direct, n) in enumerate(cases):
                    samples[direct, n].append(reads.sample(direct, n, seconds))
                    if progress:
                        progress(i * len(cases) + j + 1, repeats * len(cases))
            notes = (reads.no_direct,) if reads.no_direct else ()
            rows = tuple(_row(direct, n, found, reads.expert_bytes) for (direct, n), found in samples.items())
        return IoReport(spec.model_type, first.layout.nbytes, len(first.sources), rows, notes)
    finally:
        checkpoint.close()


def _row(direct: bool, n_readers: int, samples: list[Sample], expert_bytes: int) -> IoRow:
    rates = Samples(tuple(sample.bytes_s for sample in samples))
    return IoRow(direct, n_readers, all(sample.cold for sample in samples), rates, expert_bytes)
