"""Forwards that are measured: how long they took, and what the expert store did meanwhile."""

from __future__ import annotations

import time
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from moeflux.backends.native.ops import NativeOps
from moeflux.bench.routing import overlap
from moeflux.core.errors import OptionError
from moeflux.runtime.batch import Segment
from moeflux.runtime.engine import Engine
from moeflux.store.stats import StoreStats
from moeflux.store.trace import TraceRecorder


@dataclass(frozen=True)
class Lap:
    """What happened between two looks. Bytes are 0 where routing was not recorded."""

    tokens: int
    forwards: int
    seconds: float  # of the forwards alone
    native_seconds: float
    stats: StoreStats
    needed: tuple[int, ...]  # by forward: bytes of the distinct experts that it asked for
    missing: tuple[int, ...]  # of those, not in memory when the forward began: they had to be read, whatever the cache did
    guessed: int  # by the next layer's router, where there was a guess: experts named,
    asked: int  # asked for,
    foreseen: int  # and both

    @property
    def needed_bytes(self) -> int:
        return sum(self.needed)

    @property
    def missing_bytes(self) -> int:
        return sum(self.missing)


class Watch:
    """Runs forwards of one engine. What is not a forward, like choosing tokens, takes no time here."""

    def __init__(self, engine: Engine, recorder: TraceRecorder | None) -> None:
        ops = engine.model.ops
        if not isinstance(ops, NativeOps):
            raise OptionError("speed is measured on the native backend", where="option 'backend'")
        self.engine, self.ops = engine, ops
        self._recorder = recorder
        self._layers = [layer for layer, _ in engine.spec.moe_layers()]
        self._expert_bytes = engine.model.experts.expert_bytes
        self._read_bytes = engine.model.experts.read_bytes
        self._last: npt.NDArray[np.int16] | None = None
        self._overlaps: list[float] = []
        self._reset()

    @property
    def overlap(self) -> float | None:
        """Of decoded tokens with the one before, over all layers; None where there were none."""
        return float(np.mean(self._overlaps)) if self._overlaps else None

    def forward(self, segment: Segment) -> None:
        store = self.engine.model.experts.store
        before = store.resident() if self._recorder else None
        start, native = time.perf_counter(), self.ops.native_seconds
        self.engine.forward(segment)
        self._seconds += time.perf_counter() - start
        self._native_seconds += self.ops.native_seconds - native
        self._tokens += len(segment.tokens)
        self._forwards += 1
        if self._recorder and before is not None:
            self._account(before, self._recorder.last_step())

    def lap(self) -> Lap:
        """Since the last lap."""
        stats, guesses = self._counters()
        lap = Lap(
            self._tokens,
            self._forwards,
            self._seconds,
            self._native_seconds,
            stats.since(self._stats),
            tuple(self._needed),
            tuple(self._missing),
            *(now - then for now, then in zip(guesses, self._guesses, strict=True)),
        )
        self._reset()
        return lap

    def _account(self, before: npt.NDArray[np.bool_], chosen: npt.NDArray[np.int16]) -> None:
        needed = missing = 0
        for row, layer in enumerate(self._layers):
            experts = np.unique(chosen[:, row])
            needed += len(experts) * self._expert_bytes[layer]
            missing += int((~before[layer, experts]).sum()) * self._read_bytes[layer]
        self._needed.append(needed)
        self._missing.append(missing)
        if len(chosen) == 1 and self._last is not None:
            self._overlaps.append(overlap(self._last, chosen[0]))
        self._last = chosen[-1]

    def _counters(self) -> tuple[StoreStats, tuple[int, int, int]]:
        stream = self.engine.model.runner.stream
        return self.engine.stats(), (stream.guessed, stream.asked, stream.foreseen) if stream else (0, 0, 0)

    def _reset(self) -> None:
        self._tokens = self._forwards = 0
        self._needed: list[int] = []
        self._missing: list[int] = []
        self._seconds = self._native_seconds = 0.0
        self._stats, self._guesses = self._counters()
