"""Several sequences decoding at once: tokens per second of all together, and what each token costs the drive."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from moeflux.bench.limits import Samples
from moeflux.bench.routing import TokenStream
from moeflux.runtime.batch import Segment
from moeflux.runtime.engine import Engine
from moeflux.runtime.scheduler import Scheduler

SIZES = (1, 2, 4, 8, 16)


@dataclass(frozen=True)
class BatchRow:
    """`size` sequences together. Rates are per second."""

    size: int
    tokens: int  # of all together, per repeat
    rate: Samples
    bytes_per_token: float  # read from the drive
    hit_rate: float  # of distinct experts, whose bytes were there when they were asked for
    asked_per_step: float  # distinct experts of all layers
    speed_up: tuple[float, float] | None  # best and median, against one sequence where that was measured too

    def as_dict(self) -> dict[str, Any]:
        return {
            "size": self.size,
            "tokens": self.tokens,
            "tok_s": [self.rate.best, self.rate.median],
            "step_ms": [1e3 * self.size / self.rate.best, 1e3 * self.size / self.rate.median],
            "bytes_per_token": self.bytes_per_token,
            "hit_rate": self.hit_rate,
            "asked_per_step": self.asked_per_step,
            "speed_up": self.speed_up and list(self.speed_up),
        }


def bench_batch(
    engine: Engine,
    sizes: Sequence[int] = SIZES,
    tokens: int = 16,
    context: int = 32,
    repeats: int = 3,
    routing: str = "uniform",
    together: bool = False,
) -> list[BatchRow]:
    """Each sequence has a stream of tokens of its own: with "local" routing, topics of its own, or the same if `together`.

    Sizes take turns within a repeat, so that a drift of the machine meets all of them.
    """
    topics = 0 if together else None
    streams = [TokenStream(routing, engine.spec.vocab, seed, topics) for seed in range(max(sizes))]
    rates: dict[int, list[float]] = {size: [] for size in sizes}
    reads: dict[int, list[tuple[int, int, int]]] = {size: [] for size in sizes}
    for _ in range(repeats):
        for size in sizes:
            seconds, read = _decode(engine, streams[:size], tokens, context)
            rates[size].append(size * tokens / seconds)
            reads[size].append(read)
    rows = []
    for size in sizes:
        n_bytes, hits, asked = (sum(column) for column in zip(*reads[size], strict=True))
        steps, rate = tokens * repeats, Samples(tuple(rates[size]))
        alone = Samples(tuple(rates[1])) if 1 in rates else None
        faster = (rate.best / alone.best, rate.median / alone.median) if alone else None
        hit_rate = hits / asked if asked else 1.0
        rows.append(BatchRow(size, size * tokens, rate, n_bytes / (size * steps), hit_rate, asked / steps, faster))
    return rows


def _decode(engine: Engine, streams: Sequence[TokenStream], tokens: int, context: int) -> tuple[float, tuple[int, int, int]]:
    """Seconds, and bytes read, hits and experts asked for meanwhile."""
    scheduler, chunk = Scheduler(engine, most=len(streams)), engine.plan.chunk_tokens
    for stream in streams:
        sequence, prompt = engine.sequence(), stream.take(context)
        for start in range(0, context, chunk):
            engine.forward(Segment(sequence, prompt[start : start + chunk], "none"))
        text = iter(stream.take(tokens))
        job = scheduler.submit(sequence, [next(text)], partial(_follow, text))
        job.kind = "decode"  # its prompt has been run
    store = engine.model.experts.store
    before, begin = store.stats(), time.perf_counter()
    scheduler.run()
    seconds = time.perf_counter() - begin
    stats = store.stats().since(before)
    return seconds, (stats.bytes_read, stats.hits, stats.asked)


def _follow(text: Iterator[int], _: object) -> list[int]:
    return [token] if (token := next(text, None)) is not None else []
