"""How soon a forward hears that it is cancelled, in the middle of a chunk of a prompt."""

from __future__ import annotations

import random
import time
from collections.abc import Callable
from dataclasses import dataclass
from threading import Timer
from typing import Any

from moeflux.bench.routing import TokenStream
from moeflux.core.errors import CancelledError
from moeflux.runtime.batch import Segment
from moeflux.runtime.cancel import CancelFlag
from moeflux.runtime.engine import Engine

Progress = Callable[[int, int], None]


@dataclass(frozen=True)
class CancelReport:
    tokens: int
    layer_ms: float  # of the chunk, on average
    heard_ms: tuple[float, ...]  # from the cancelling to the end of the forward, ascending

    def at(self, share: float) -> float:
        """The time within which so many of all were heard."""
        return self.heard_ms[min(len(self.heard_ms) - 1, int(share * len(self.heard_ms)))]

    def as_dict(self) -> dict[str, Any]:
        return {
            "tokens": self.tokens,
            "layer_ms": self.layer_ms,
            "p50_ms": self.at(0.5),
            "p99_ms": self.at(0.99),
            "max_ms": self.heard_ms[-1],
            "samples": len(self.heard_ms),
        }


def bench_cancel(engine: Engine, samples: int = 50, within: float = 0.25, progress: Progress | None = None) -> CancelReport:
    """Cancelled by another thread at random times in the first part of a chunk: all layers of a kind are alike."""
    chunk = engine.plan.chunk_tokens
    stream = TokenStream("uniform", engine.spec.vocab, 0)
    start = time.perf_counter()
    engine.forward(Segment(engine.sequence(), stream.take(chunk), "none", kind="prompt"))
    seconds, heard, chance = time.perf_counter() - start, [], random.Random(0)
    for i in range(samples):
        heard.append(_heard(engine, stream.take(chunk), chance.uniform(0.02, within) * seconds))
        if progress:
            progress(i + 1, samples)
    return CancelReport(chunk, 1e3 * seconds / len(engine.spec.layers), tuple(sorted(1e3 * value for value in heard)))


def _heard(engine: Engine, tokens: list[int], after: float) -> float:
    flag, when = CancelFlag(), list[float]()

    def cancel() -> None:
        when.append(time.perf_counter())
        flag.set()

    timer = Timer(after, cancel)
    timer.start()
    try:
        engine.forward(Segment(engine.sequence(), tokens, "none", kind="prompt"), cancel=flag)
    except CancelledError:
        return time.perf_counter() - when[0]
    finally:
        timer.join()
    return 0.0
