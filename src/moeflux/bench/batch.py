"""Several sequences decoding at once: tokens per second of all together, and what each token costs the drive."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import numpy.typing as npt

from moeflux.bench.limits import Samples
from moeflux.runtime.batch import Segment
from moeflux.runtime.batching import Batcher
from moeflux.runtime.engine import Engine

SEED = 0
SIZES = (1, 2, 4, 8)


@dataclass(frozen=True)
class BatchRow:
    """`size` sequences together. Rates are per second."""

    size: int
    tokens: int  # of all together, per repeat
    rate: Samples
    bytes_per_token: float  # read from the drive
    hit_rate: float

    def as_dict(self) -> dict[str, Any]:
        return {
            "size": self.size,
            "tokens": self.tokens,
            "tok_s": [self.rate.best, self.rate.median],
            "step_ms": [1e3 * self.size / self.rate.best, 1e3 * self.size / self.rate.median],
            "bytes_per_token": self.bytes_per_token,
            "hit_rate": self.hit_rate,
        }


def bench_batch(
    engine: Engine,
    sizes: Sequence[int] = SIZES,
    tokens: int = 16,
    context: int = 32,
    repeats: int = 3,
    vocabulary: int | None = None,
) -> list[BatchRow]:
    """Each sequence has tokens of its own, drawn evenly from `vocabulary` different ones; fewer mean more locality.

    Sizes take turns within a repeat, so that a drift of the machine meets all of them.
    """
    random = np.random.default_rng(SEED)
    chosen = random.choice(engine.spec.vocab, size=min(vocabulary or engine.spec.vocab, engine.spec.vocab), replace=False)
    rates: dict[int, list[float]] = {size: [] for size in sizes}
    reads: dict[int, list[tuple[int, int, int]]] = {size: [] for size in sizes}
    for _ in range(repeats):
        for size in sizes:
            seconds, read = _decode(engine, size, tokens, context, random, chosen)
            rates[size].append(size * tokens / seconds)
            reads[size].append(read)
    rows = []
    for size in sizes:
        n_bytes, hits, asked = (sum(column) for column in zip(*reads[size], strict=True))
        per_token = n_bytes / (size * tokens * repeats)
        rows.append(BatchRow(size, size * tokens, Samples(tuple(rates[size])), per_token, hits / asked if asked else 1.0))
    return rows


def _decode(
    engine: Engine, size: int, tokens: int, context: int, random: np.random.Generator, chosen: npt.NDArray[np.int64]
) -> tuple[float, tuple[int, int, int]]:
    """Seconds, and bytes read, hits and experts asked for meanwhile."""
    batcher = Batcher(engine)
    for _ in range(size):
        sequence = engine.sequence()
        step = engine.plan.chunk_tokens
        prompt = random.choice(chosen, context).tolist()
        for start in range(0, context, step):
            engine.forward(Segment(sequence, prompt[start : start + step], "none"))
        text = iter(random.choice(chosen, tokens).tolist())
        batcher.submit(sequence, [next(text)], partial(_follow, text))
    store = engine.model.experts.store
    before, begin = store.stats(), time.perf_counter()
    batcher.run()
    seconds = time.perf_counter() - begin
    stats = store.stats().since(before)
    return seconds, (stats.bytes_read, stats.hits, stats.asked)


def _follow(text: Iterator[int], _: object) -> int | None:
    return next(text, None)
