"""The end of a process, and a process that becomes two, while an engine is at work. Each in a process of its own."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from concurrency.callers import NAME, WAYS

TIMES = 2  # what goes wrong here does so only most of the time

EXIT = """
import sys, threading
import moeflux
from concurrency.callers import run

engine = moeflux.load({folder!r}, sequences=4, **{options!r})
begun = threading.Event()

def use():
    while True:
        run(engine, 1)
        begun.set()

for _ in range({threads}):
    threading.Thread(target=use, daemon=True).start()
assert begun.wait(60)
sys.exit(3)
"""

FORK = """
import os, sys, threading, time, signal
import numpy as np
import moeflux
from moeflux import Segment
from concurrency.callers import run

signal.alarm(50)  # inherited by nobody: the child sets its own
engine = moeflux.load({folder!r}, sequences=4, **{options!r})
expected = run(engine, 1)
sequence = engine.sequence()
begun, stop = threading.Event(), threading.Event()

def use():
    while not stop.is_set():
        run(engine, 2)
        begun.set()

others = [threading.Thread(target=use) for _ in range({threads})]
for other in others:
    other.start()
    assert begun.wait(40)
for _ in range({times}):
    child = os.fork()
    if child == 0:
        signal.alarm(30)
        uses = [
            lambda: engine.forward(Segment(sequence, [1])), lambda: engine.score([1]), engine.stats, engine.sequence,
            lambda: engine.spec, {native}
        ]
        for use in uses:
            try:
                use()
            except moeflux.StateError as error:
                assert str(os.getpid()) in str(error) and "load the model again" in str(error), error
            else:
                sys.exit(5)
        with moeflux.load({folder!r}, **{options!r}) as own:
            np.testing.assert_array_equal(run(own, 1), expected)
        {close}
        sys.exit(4)
    _, status = os.waitpid(child, 0)
    assert os.waitstatus_to_exitcode(status) == 4, os.waitstatus_to_exitcode(status)
    np.testing.assert_array_equal(run(engine, 1), expected)
stop.set()
for other in others:
    other.join()
np.testing.assert_array_equal(run(engine, 1), expected)
engine.close()
"""

# Past the engine's own door.
NATIVE = """
lambda: engine._model.experts.store.stats(), lambda: engine._model.experts.store.acquire(0, [1]),
lambda: engine._model.experts.store.hint(0, [1]), lambda: engine._model.experts.store.next_token(),
"""


@pytest.fixture(params=WAYS)
def way(request):
    return WAYS[request.param]


@pytest.fixture
def script(mlx, way):
    def run(text: str, **values) -> subprocess.CompletedProcess[str]:
        code = text.format(folder=str(mlx(NAME)), options=way, **values)
        environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[1])}
        return subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, timeout=90)

    return run


@pytest.mark.parametrize("threads", [1, 3])
def test_exit_while_threads_are_inside(script, threads):
    for _ in range(TIMES):
        done = script(EXIT, threads=threads)
        assert (done.returncode, done.stderr) == (3, "")


@pytest.mark.parametrize(("threads", "close"), [(0, "engine.close()"), (2, "pass")], ids=["closed", "left open"])
def test_fork(script, threads, close):
    """A child is told to load its own, at once, and leaves without waiting for its parent's threads."""
    done = script(FORK, threads=threads, close=close, native=NATIVE, times=TIMES)
    assert (done.returncode, done.stderr) == (0, "")
