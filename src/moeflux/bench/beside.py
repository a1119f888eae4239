"""A long prompt beside one sequence that decodes: what each of them loses, in turns and in slices.

Turns are what the scheduler does. Slices are the other way to share an engine: every step has the decoder's token and a few
of the prompt's. With experts on a drive a slice costs its distinct experts.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from moeflux.bench.limits import Samples
from moeflux.bench.routing import TokenStream
from moeflux.runtime.batch import Segment
from moeflux.runtime.engine import Engine
from moeflux.runtime.scheduler import Scheduler
from moeflux.runtime.sequence import Sequence

SLICE = 16
MOST_SECONDS = 60.0  # of one measurement in slices: what is left is taken to go on alike
WARM_UP = 32  # decoded tokens

Progress = Callable[[int, int], None]


@dataclass(frozen=True)
class BesideRow:
    way: str  # turns or slices
    prompt: Samples  # seconds of the prompt against those alone
    decode: Samples  # tokens per second meanwhile against those alone

    def as_dict(self) -> dict[str, Any]:
        return {
            "way": self.way,
            "prompt_times_alone": [min(self.prompt.values), self.prompt.median],
            "decode_share": [self.decode.best, self.decode.median],
        }


@dataclass(frozen=True)
class BesideReport:
    tokens: int
    prompt_s: Samples  # alone
    decode_s: Samples  # tokens per second alone
    rows: tuple[BesideRow, ...]

    def as_dict(self) -> dict[str, Any]:
        return {
            "tokens": self.tokens,
            "prompt_alone_s": [min(self.prompt_s.values), self.prompt_s.median],
            "decode_alone_tok_s": [self.decode_s.best, self.decode_s.median],
            "rows": [row.as_dict() for row in self.rows],
        }


def bench_beside(
    engine: Engine,
    tokens: int = 4096,
    repeats: int = 1,
    routing: str = "uniform",
    ways: tuple[str, ...] = ("turns", "slices"),
    progress: Progress | None = None,
) -> BesideReport:
    """Within a repeat: the prompt alone, decoding alone, then both together in each way."""
    bench = _Bench(engine, tokens, routing)
    bench.warm_up()
    alone: list[float] = []
    rates: list[float] = []
    together: dict[str, list[tuple[float, float]]] = {way: [] for way in ways}
    done, total = 0, repeats * (2 + len(ways))
    for _ in range(repeats):
        for step in ("prompt", "decode", *ways):
            if step == "prompt":
                alone.append(bench.prompt_alone())
            elif step == "decode":
                rates.append(bench.decode_alone())
            else:
                seconds, rate = bench.turns() if step == "turns" else bench.slices()
                together[step].append((seconds / alone[-1], rate / rates[-1]))
            done += 1
            if progress:
                progress(done, total)
    rows = (
        BesideRow(way, Samples(tuple(p for p, _ in pairs)), Samples(tuple(d for _, d in pairs)))
        for way, pairs in together.items()
    )
    return BesideReport(tokens, Samples(tuple(alone)), Samples(tuple(rates)), tuple(rows))


class _Bench:
    def __init__(self, engine: Engine, tokens: int, routing: str) -> None:
        self._engine, self._n = engine, tokens
        self._stream = TokenStream(routing, engine.spec.vocab, 0)
        self._decoder = engine.sequence()

    def warm_up(self) -> None:
        self._engine.forward(Segment(self._decoder, self._stream.take(16), "none", kind="prompt"))
        self._decode(WARM_UP)

    def _decode(self, n: int) -> float:
        """Seconds for so many tokens."""
        start = time.perf_counter()
        for token in self._stream.take(n):
            self._engine.forward(Segment(self._decoder, [token], kind="decode"))
        return time.perf_counter() - start

    def decode_alone(self) -> float:
        return WARM_UP / self._decode(WARM_UP)

    def prompt_alone(self) -> float:
        """Seconds, through the scheduler."""
        scheduler, start = Scheduler(self._engine, most=2), time.perf_counter()
        scheduler.submit(self._engine.sequence(), self._stream.take(self._n), lambda _: [])
        scheduler.run()
        return time.perf_counter() - start

    def turns(self) -> tuple[float, float]:
        """Seconds of the prompt, and decoded tokens per second until its end."""
        scheduler, over = Scheduler(self._engine, most=2), list[float]()
        decoded = _Decoder(self._stream, over)
        job = scheduler.submit(self._decoder, self._stream.take(1), decoded)
        scheduler.step()
        start = time.perf_counter()
        decoded.n = 0

        def end(_: object) -> list[int]:
            over.append(time.perf_counter())
            return []

        scheduler.submit(self._engine.sequence(), self._stream.take(self._n), end)
        while not over or not job.done:
            scheduler.step()
        seconds = over[0] - start
        return seconds, decoded.at_end / seconds

    def slices(self) -> tuple[float, float]:
        prompt, start, n = self._engine.sequence(), time.perf_counter(), 0
        done = 0
        for chunk in _cut(self._stream.take(self._n)):
            self._forward(prompt, chunk)
            n, done = n + 1, done + len(chunk)
            if time.perf_counter() - start > MOST_SECONDS:
                break
        seconds = time.perf_counter() - start
        return seconds * self._n / done, n / seconds

    def _forward(self, prompt: Sequence, chunk: list[int]) -> None:
        token = self._stream.take(1)
        self._engine.forward(Segment(self._decoder, token, kind="decode"), Segment(prompt, chunk, "none", kind="prompt"))


class _Decoder:
    """Goes on until the prompt is over, and counts."""

    def __init__(self, stream: TokenStream, over: list[float]) -> None:
        self._stream, self._over = stream, over
        self.n = self.at_end = 0

    def __call__(self, _: object) -> list[int]:
        if self._over:
            self.at_end = self.n
            return []
        self.n += 1
        return self._stream.take(1)


def _cut(tokens: list[int]) -> Iterator[list[int]]:
    for at in range(0, len(tokens), SLICE):
        yield tokens[at : at + SLICE]
