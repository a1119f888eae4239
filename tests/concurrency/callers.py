"""Threads that call an engine, and a drive that can be made to wait."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from threading import Barrier, Event, Timer
from typing import Any

import numpy as np
import pytest

from moeflux import Engine, Segment
from moeflux.store.reader import FileReader

PATIENCE_S = 60  # what hangs fails its own test

# One with linear attention and a shared expert; all experts in memory, or four of them.
NAME = "qwen3_5_moe_vl_fused-4bit-f32"
WAYS = {
    "resident": {"backend": "native"},
    "streaming": {"backend": "native", "slots": 4},
    "python-readers": {"backend": "native", "slots": 4, "reader": "python"},
    "numpy": {"backend": "numpy", "slots": 4},
}


def prompt(seed: int, n: int) -> list[int]:
    return [int(token) for token in np.random.default_rng(seed).integers(0, 512, n)]


def run(engine: Engine, seed: int, steps: int = 6) -> np.ndarray:
    """Logits of a prompt and of some steps after it, in a sequence of its own."""
    sequence = engine.sequence()
    rows = [engine.forward(Segment(sequence, prompt(seed, 14)))[0][0]]
    for _ in range(steps):
        rows.append(engine.forward(Segment(sequence, [int(np.argmax(rows[-1]))]))[0][0])
    return np.stack(rows)


def at_once(*calls: Callable[[], Any]) -> list[Any]:
    """What each returns, or raised, when all begin together."""
    barrier = Barrier(len(calls))

    def begin(call: Callable[[], Any]) -> Any:
        barrier.wait(PATIENCE_S)
        try:
            return call()
        except Exception as error:
            return error

    with ThreadPoolExecutor(len(calls)) as pool:
        return [future.result(PATIENCE_S) for future in [pool.submit(begin, call) for call in calls]]


@contextmanager
def stuck_drive(monkeypatch: pytest.MonkeyPatch) -> Iterator[Event]:
    """Reads of Python's readers wait until the block ends, or so long that the test has failed. The event: a read waits."""
    free, waiting = Event(), Event()
    whole = FileReader.read

    def read(self: FileReader, offset: int, into: memoryview) -> Any:
        waiting.set()
        free.wait()
        return whole(self, offset, into)

    rescue = Timer(PATIENCE_S / 3, free.set)
    rescue.start()
    with monkeypatch.context() as patch:
        patch.setattr(FileReader, "read", read)
        try:
            yield waiting
        finally:
            free.set()
            rescue.cancel()
            rescue.join()
