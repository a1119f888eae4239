"""A run that is told to end, by a flag or by a signal: soon, with its own error, and nothing else is harmed."""

from __future__ import annotations

import dataclasses
import signal
import time
from threading import Thread, Timer

import numpy as np
import pytest

import moeflux
from concurrency.callers import NAME, PATIENCE_S, WAYS, prompt, run, stuck_drive
from moeflux import CancelFlag, Segment, Trace

LONG = prompt(0, 3000)


@pytest.fixture(params=["resident", "streaming", "numpy"])
def engine(mlx, request):
    with moeflux.load(mlx(NAME), context=8192, **WAYS[request.param]) as engine:
        engine.plan = dataclasses.replace(engine.plan, chunk_tokens=8192)  # long prompts in one forward
        yield engine


def interrupt(*_):
    raise KeyboardInterrupt


@pytest.fixture
def alarm():
    """After so many seconds, what Ctrl-C does."""
    before = signal.signal(signal.SIGALRM, interrupt)
    yield lambda seconds: signal.setitimer(signal.ITIMER_REAL, seconds)
    signal.setitimer(signal.ITIMER_REAL, 0)
    signal.signal(signal.SIGALRM, before)


def test_a_flag(engine):
    flag, sequence = CancelFlag(), engine.sequence()
    assert not flag.is_set
    flag.set()
    assert flag.is_set
    with pytest.raises(moeflux.CancelledError):
        engine.forward(Segment(sequence, [5]), cancel=flag)
    assert sequence.usable  # nothing was begun
    flag.clear()
    (logits,) = engine.forward(Segment(sequence, [5]), cancel=flag)
    np.testing.assert_array_equal(logits, engine.score([5]))


def test_a_long_prompt_ends_long_before_its_end(engine):
    tokens = LONG if engine.config.backend == "native" else LONG[:200]
    expected = run(engine, 1)
    start = time.perf_counter()
    engine.forward(Segment(engine.sequence(), tokens, "none"))
    whole = time.perf_counter() - start
    flag, sequence = CancelFlag(), engine.sequence()
    timer = Timer(whole / 8, flag.set)
    timer.start()
    with pytest.raises(moeflux.CancelledError):
        engine.forward(Segment(sequence, tokens, "none"), cancel=flag)
    timer.join()
    with pytest.raises(moeflux.StateError, match="CancelledError"):
        engine.forward(Segment(sequence, [1]))
    sequence.truncate(0)
    np.testing.assert_array_equal(engine.forward(Segment(sequence, tokens[:9], "all"))[0], engine.score(tokens[:9]))
    np.testing.assert_array_equal(run(engine, 1), expected)


class Setter(Trace):
    """Sets a flag in the middle of a layer."""

    def __init__(self, flag, layer):
        super().__init__()
        self.flag, self.layer, self.seen = flag, layer, []

    def record(self, layer, name, *_):
        self.seen.append(layer)
        if layer == self.layer:
            self.flag.set()


def test_block_by_block_it_is_heard_in_the_layer(engine):
    flag = CancelFlag()
    trace = Setter(flag, 1)
    with pytest.raises(moeflux.CancelledError):
        engine.forward(Segment(engine.sequence(), [5], trace=trace), cancel=flag)
    assert max(trace.seen) == 1


@pytest.mark.parametrize("n", [1, 40], ids=["step", "prompt"])
@pytest.mark.parametrize("trace", [None, Trace()], ids=["at once", "block by block"])
def test_it_ends_a_wait_for_the_drive(mlx, monkeypatch, n, trace):
    with moeflux.load(mlx(NAME), **WAYS["python-readers"]) as engine:
        flag, sequence, outcome = CancelFlag(), engine.sequence(), []

        def use():
            try:
                engine.forward(Segment(sequence, prompt(1, n), trace=trace), cancel=flag)
            except moeflux.MoefluxError as error:
                outcome.append(error)

        with stuck_drive(monkeypatch) as waiting:
            user = Thread(target=use)
            user.start()
            assert waiting.wait(PATIENCE_S)
            flag.set()
            user.join(PATIENCE_S / 6)
            assert [type(error) for error in outcome] == [moeflux.CancelledError]
            assert not sequence.usable
        alone = run(engine, 1)
    with moeflux.load(mlx(NAME)) as engine:
        np.testing.assert_array_equal(run(engine, 1), alone)


@pytest.mark.parametrize("n", [1, 40], ids=["step", "prompt"])
@pytest.mark.parametrize("trace", [None, Trace()], ids=["at once", "block by block"])
def test_a_signal_ends_a_wait_for_the_drive(mlx, monkeypatch, alarm, n, trace):
    with moeflux.load(mlx(NAME), **WAYS["python-readers"]) as engine:
        with stuck_drive(monkeypatch) as waiting:
            alarm(0.05)
            with pytest.raises(KeyboardInterrupt):
                engine.forward(Segment(engine.sequence(), prompt(1, n), trace=trace))
            assert waiting.is_set()
        alone = run(engine, 1)
    with moeflux.load(mlx(NAME)) as engine:
        np.testing.assert_array_equal(run(engine, 1), alone)


def test_a_signal_in_a_prompt(engine, alarm):
    tokens = LONG if engine.config.backend == "native" else LONG[:200]
    start = time.perf_counter()
    engine.forward(Segment(engine.sequence(), tokens, "none"))
    whole = time.perf_counter() - start
    alarm(whole / 8)
    with pytest.raises(KeyboardInterrupt):
        engine.forward(Segment(engine.sequence(), tokens, "none"))


def test_a_handler_that_sets_the_flag(engine):
    """As the command line does at the first Ctrl-C."""
    tokens, flag = LONG if engine.config.backend == "native" else LONG[:200], CancelFlag()
    before = signal.signal(signal.SIGALRM, lambda *_: flag.set())
    signal.setitimer(signal.ITIMER_REAL, 0.02)
    try:
        with pytest.raises(moeflux.CancelledError):
            engine.forward(Segment(engine.sequence(), tokens, "none"), cancel=flag)
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


def test_a_prefill_hears_it_inside_of_a_chunk(engine, monkeypatch):
    tokens, flag = LONG if engine.config.backend == "native" else LONG[:200], CancelFlag()
    monkeypatch.setattr(engine, "plan", dataclasses.replace(engine.plan, chunk_tokens=len(tokens)))
    timer = Timer(0.02, flag.set)
    timer.start()
    sequence = engine.sequence()
    with pytest.raises(moeflux.CancelledError):
        engine.prefill(sequence, tokens, None, flag)
    timer.join()
    assert len(sequence) == 0
