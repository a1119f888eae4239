"""A prompt that begins as an earlier one did: how long until its first token, cold, and from states in memory or on disk.

The first prompt ends its last message but one where the second departs from it, as when an agent asks anew after the same
system prompt, tools and history. All three ways must give the same bits, or it is an error. Before each, another prompt
fills the memory with experts, as in a process that has run for a while. Afterwards the sequence takes a step and goes back
to a checkpoint a few times, which must not change a bit either.
"""

from __future__ import annotations

import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from moeflux.bench.limits import Samples
from moeflux.bench.routing import TokenStream
from moeflux.core.config import EngineConfig
from moeflux.core.errors import NumericError
from moeflux.formats.checkpoint import read_config
from moeflux.models.registry import read_spec
from moeflux.runtime.engine import Engine
from moeflux.session.entry import Limits
from moeflux.session.prefixes import PrefixStore
from moeflux.session.session import PrefixUse, Session

WAYS = ("cold", "memory", "disk")
WARM_UP = 512  # tokens of another prompt
ACTS = ("checkpoint", "step", "restore")
RETURNS = 5  # times that a sequence takes a step and goes back
Say = Callable[[str], None]


@dataclass(frozen=True)
class PrefixReport:
    tokens: int
    shared: int
    seconds: dict[str, Samples]  # to the first token, by way
    usage: dict[str, PrefixUse]
    going_back: dict[str, Samples]  # seconds of a checkpoint, of a token after it, and of restoring it
    kept_bytes: int  # in memory, of both prompts' states
    plan: dict[str, Any]

    def ratio(self, way: str) -> tuple[float, float]:
        """Cold over warm: least against least, median against median."""
        cold, warm = self.seconds["cold"], self.seconds[way]
        return min(cold.values) / min(warm.values), cold.median / warm.median

    def as_dict(self) -> dict[str, Any]:
        return {
            "tokens": self.tokens,
            "shared": self.shared,
            **{f"{way}_s": list(self.seconds[way].values) for way in WAYS},
            **{f"{way}_computed": self.usage[way].computed for way in WAYS},
            **{f"{way}_ratio": list(self.ratio(way)) for way in WAYS[1:]},
            **{f"{act}_ms": [1e3 * t for t in self.going_back[act].values] for act in ACTS},
            "kept_bytes": self.kept_bytes,
            **self.plan,
        }


def bench_prefix(
    config: EngineConfig, tokens: int, shared: int, repeats: int, routing: str, folder: Path | None, say: Say
) -> PrefixReport:
    """`config.prefixes` is what states may take in memory. The disk's are read by an engine that was opened anew."""
    runs = _Runs(config, tokens, shared)
    vocab = read_spec(read_config(config.model)).vocab
    for number in range(repeats):
        with tempfile.TemporaryDirectory(prefix="moeflux-prefixes-", dir=folder) as kept_in:
            stream = TokenStream(routing, vocab, number)
            first = stream.take(tokens)
            second = [*first[:shared], *stream.take(tokens - shared)]
            expected = runs.in_memory(stream, first, second, Path(kept_in))
            say(f"repeat {number + 1} of {repeats}, cold: {runs.seconds['cold'][-1]:.2f} s")
            say(f"from memory: {runs.seconds['memory'][-1]:.2f} s, {runs.usage['memory'].computed} tokens computed")
            runs.from_disk(stream, second, Path(kept_in), expected)
            say(f"from disk, opened anew: {runs.seconds['disk'][-1]:.2f} s, {runs.usage['disk'].computed} tokens computed")
    return runs.report()


class _Runs:
    """Engines one after the other; what one of them needed is gone when the next one plans its memory."""

    def __init__(self, config: EngineConfig, tokens: int, shared: int) -> None:
        self.config, self.tokens, self.shared = config, tokens, shared
        self.seconds: dict[str, list[float]] = {way: [] for way in WAYS}
        self.going_back: dict[str, list[float]] = {act: [] for act in ACTS}
        self.usage: dict[str, PrefixUse] = {}
        self.kept_bytes = 0
        self.plan: dict[str, Any] = {}

    def in_memory(self, stream: TokenStream, first: list[int], second: list[int], kept_in: Path) -> Any:
        """The logits of the cold run."""
        boundaries = (self.shared, self.tokens)
        with Engine(self.config) as engine:
            self.plan = {"share": engine.plan.share, "chunk_tokens": engine.plan.chunk_tokens}
            _warm_up(engine, stream)
            expected, self.usage["cold"] = _ask(Session(engine, None, None), second, (), self.seconds["cold"])
            store = PrefixStore(engine, Limits(disk_bytes=sys.maxsize), kept_in)
            Session(engine, store).sync(first, boundaries=boundaries)
            store.flush()  # the second prompt comes later
            session = Session(engine, store)
            found, self.usage["memory"] = _ask(session, second, boundaries, self.seconds["memory"])
            _check("memory", expected, found)
            _go_back(session, second[-1], self.going_back)
            self.kept_bytes = store.ram_bytes
            store.flush()
            store.close()
        return expected

    def from_disk(self, stream: TokenStream, second: list[int], kept_in: Path, expected: Any) -> None:
        with Engine(self.config) as engine:
            store = PrefixStore(engine, Limits(disk_bytes=sys.maxsize), kept_in)
            _warm_up(engine, stream)
            store.drop(second)  # what the run before kept of it
            found, self.usage["disk"] = _ask(
                Session(engine, store), second, (self.shared, self.tokens), self.seconds["disk"]
            )
            _check("disk", expected, found)
            store.close()

    def report(self) -> PrefixReport:
        times, back = _samples(self.seconds), _samples(self.going_back)
        return PrefixReport(self.tokens, self.shared, times, self.usage, back, self.kept_bytes, self.plan)


def _samples(seconds: dict[str, list[float]]) -> dict[str, Samples]:
    return {name: Samples(tuple(values)) for name, values in seconds.items()}


def _ask(session: Session, prompt: list[int], boundaries: tuple[int, ...], seconds: list[float]) -> tuple[Any, PrefixUse]:
    start = time.perf_counter()
    usage = session.sync(prompt, boundaries=boundaries)
    seconds.append(time.perf_counter() - start)
    return session.logits, usage


def _go_back(session: Session, token: int, seconds: dict[str, list[float]]) -> None:
    position, steps = len(session.sequence), list[Any]()
    acts: tuple[Callable[[], Any], ...] = (
        session.sequence.checkpoint,
        lambda: steps.append(session.advance(token).copy()),
        lambda: session.sequence.restore(position),
    )
    for _ in range(RETURNS):
        for name, act in zip(ACTS, acts, strict=True):
            start = time.perf_counter()
            act()
            seconds[name].append(time.perf_counter() - start)
        _check("the restored checkpoint", steps[0], steps[-1])


def _check(way: str, expected: Any, found: Any) -> None:
    if not np.array_equal(expected, found):
        raise NumericError(f"the logits from {way} are not those of the first run")


def _warm_up(engine: Engine, stream: TokenStream) -> None:
    """Experts in memory are not what is compared."""
    Session(engine, None, None).sync(stream.take(min(WARM_UP, engine.plan.context)))
