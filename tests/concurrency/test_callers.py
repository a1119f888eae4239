"""Several threads on one engine: one forward at a time; closing it meanwhile; calling it from inside of itself."""

from __future__ import annotations

import signal
import time
from functools import partial
from threading import Event, Thread

import numpy as np
import pytest

import moeflux
from concurrency.callers import NAME, PATIENCE_S, WAYS, at_once, prompt, run, stuck_drive
from moeflux import Segment, Trace
from moeflux.runtime.batch import Batch
from moeflux.runtime.forward import forward

THREADS = 4


@pytest.fixture(params=WAYS)
def options(request):
    return WAYS[request.param]


@pytest.fixture
def engine(mlx, options):
    with moeflux.load(mlx(NAME), context=8192, sequences=8, **options) as engine:
        yield engine


def test_every_thread_gets_what_it_gets_alone(engine):
    alone = [run(engine, seed) for seed in range(THREADS)]
    for _ in range(2):
        for found, expected in zip(at_once(*(partial(run, engine, seed) for seed in range(THREADS))), alone, strict=True):
            np.testing.assert_array_equal(found, expected)


def test_prompts_beside_steps(engine):
    """Sweeps and steps use the same stream and the same scratch."""
    long = prompt(9, 300)
    (expected,) = engine.forward(Segment(engine.sequence(), long))
    alone = run(engine, 1, 20)
    found = at_once(partial(run, engine, 1, 20), *[lambda: engine.forward(Segment(engine.sequence(), long))[0]] * 3)
    np.testing.assert_array_equal(found[0], alone)
    for logits in found[1:]:
        np.testing.assert_array_equal(logits, expected)


@pytest.mark.parametrize("options", [WAYS["resident"], WAYS["streaming"]], ids=["resident", "streaming"])
def test_native_code_needs_no_engine_to_be_safe(engine):
    """Whoever calls the layers directly waits too."""
    expected = [engine.forward(Segment(engine.sequence(), prompt(seed, 30)))[0] for seed in range(THREADS)]

    def direct(seed):
        return [forward(engine.model, Batch((Segment(engine.sequence(), prompt(seed, 30)),)))[0] for _ in range(10)]

    for found, logits in zip(at_once(*(partial(direct, seed) for seed in range(THREADS))), expected, strict=True):
        for one in found:
            np.testing.assert_array_equal(one, logits)


def test_closing_while_others_run(mlx, options):
    """Each ends with a typed error; nothing crashes or hangs, wherever the forward is."""
    for attempt in range(6):
        engine = moeflux.load(mlx(NAME), sequences=4, **options)

        def use(seed, engine=engine):
            while True:
                run(engine, seed)

        def close(engine=engine, attempt=attempt):
            time.sleep(0.004 * attempt)  # at different places of a forward
            engine.close()

        *errors, closed = at_once(partial(use, 1), partial(use, 2), close)
        assert [type(error) for error in errors] == [moeflux.ClosedError] * 2
        assert closed is None
        with pytest.raises(moeflux.ClosedError):
            engine.score([1])
        engine.close()


def test_closing_ends_a_wait_for_the_drive(mlx, monkeypatch):
    engine = moeflux.load(mlx(NAME), **WAYS["python-readers"])
    sequence = engine.sequence()
    with stuck_drive(monkeypatch) as waiting:
        outcome = []

        def use():
            try:
                engine.forward(Segment(sequence, [1]))
            except moeflux.MoefluxError as error:
                outcome.append(error)

        user, closer = Thread(target=use), Thread(target=engine.close)
        user.start()
        assert waiting.wait(PATIENCE_S)
        closer.start()
        user.join(PATIENCE_S / 6)
        assert [type(error) for error in outcome] == [moeflux.ClosedError]
        assert not sequence.usable
    closer.join(PATIENCE_S)
    assert not closer.is_alive()


class Caller(Trace):
    """Does something with the engine from inside of its forward."""

    def __init__(self, action):
        super().__init__()
        self.action, self.errors = action, []

    def record(self, *_):
        try:
            self.action()
        except moeflux.MoefluxError as error:
            self.errors.append(error)


def test_a_forward_inside_of_a_forward_is_refused(engine):
    other = engine.sequence()
    inside = Caller(lambda: engine.forward(Segment(other, [1])))
    (logits,) = engine.forward(Segment(engine.sequence(), [5, 6], trace=inside))
    assert {type(error) for error in inside.errors} == {moeflux.StateError}
    assert "inside of a forward" in str(inside.errors[0])
    assert other.usable
    np.testing.assert_array_equal(logits[0], engine.score([5, 6])[1])


def test_closing_from_inside_of_a_forward(mlx, options):
    engine = moeflux.load(mlx(NAME), **options)
    inside = Caller(engine.close)
    with pytest.raises(moeflux.ClosedError):
        engine.forward(Segment(engine.sequence(), [5, 6], trace=inside))
    assert engine._model is None


@pytest.mark.parametrize("options", [WAYS["resident"], WAYS["streaming"]], ids=["resident", "streaming"])
def test_a_signal_handler_that_calls_the_engine(engine):
    """It runs in the middle of the native call: refused, and the forward goes on unharmed."""
    tokens, errors = prompt(3, 2000), []
    (expected,) = engine.forward(Segment(engine.sequence(), tokens))

    def handler(*_):
        for action in (lambda: engine.score([1]), lambda: forward(engine.model, Batch((Segment(engine.sequence(), [1]),)))):
            try:
                action()
            except moeflux.MoefluxError as error:
                errors.append(error)

    before = signal.signal(signal.SIGALRM, handler)
    signal.setitimer(signal.ITIMER_REAL, 0.02, 0.02)
    try:
        (logits,) = engine.forward(Segment(engine.sequence(), tokens))
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
    np.testing.assert_array_equal(logits, expected)
    assert errors
    assert {type(error) for error in errors} == {moeflux.StateError}


def test_a_second_thread_waits_and_is_let_in(engine, monkeypatch):
    """The first is held inside of its forward until the second has surely come."""
    entered, go = Event(), Event()

    def hold():
        entered.set()
        assert go.wait(PATIENCE_S)

    results = []
    first = Thread(target=lambda: engine.forward(Segment(engine.sequence(), [5], trace=Caller(hold))))
    second = Thread(target=lambda: results.append(engine.forward(Segment(engine.sequence(), [5]))[0]))
    first.start()
    assert entered.wait(PATIENCE_S)
    second.start()
    second.join(0.05)
    assert second.is_alive()
    go.set()
    first.join(PATIENCE_S)
    second.join(PATIENCE_S)
    np.testing.assert_array_equal(results[0], engine.score([5]))
