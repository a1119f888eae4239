"""Many sequences at once: the same bits as alone, nobody starves, nobody is held up, and who leaves leaves nothing."""

from __future__ import annotations

import dataclasses
import gc
import weakref

import numpy as np
import pytest

import moeflux
from conftest import DATA
from moeflux.core.errors import BudgetError, CancelledError, InputError, OptionError, StateError
from moeflux.runtime.batching import LEAST_CHUNK, Batcher
from moeflux.session.entry import Limits
from moeflux.session.prefixes import PrefixStore
from moeflux.session.session import Session
from state.families import FAMILIES, HYBRID, PLAIN, fresh_logits, opened, text

MANY = {"sequences": 8}


class Reader:
    """Takes the most likely token n times, and keeps what it saw."""

    def __init__(self, n):
        self.left, self.tokens, self.logits = n, [], []

    def __call__(self, logits):
        self.logits.append(logits.copy())
        if self.left == 0:
            return None
        self.left -= 1
        self.tokens.append(int(logits.argmax()))
        return self.tokens[-1]


@pytest.fixture
def steps(monkeypatch):
    """The sizes of the segments of every forward."""
    seen = []
    forward = moeflux.Engine.forward

    def watched(self, *segments):
        seen.append([len(segment.tokens) for segment in segments])
        return forward(self, *segments)

    monkeypatch.setattr(moeflux.Engine, "forward", watched)
    return seen


@pytest.mark.parametrize("name", FAMILIES)
def test_together_as_alone(name):
    """Prompts of different lengths that begin at different times, some from a shared prefix."""
    engine = opened(name, prefixes="100MB", **MANY)
    batcher, prefixes = Batcher(engine), PrefixStore(engine, Limits(10**8))
    prompts = [text(40), text(3, 1), [*text(40), *text(20, 2)], text(90, 3), text(1, 4)]
    readers = [Reader(n) for n in (5, 9, 4, 3, 7)]
    sessions = []
    for prompt, reader in zip(prompts, readers, strict=True):
        session = Session(engine, prefixes)
        sessions.append((session, session.request(batcher, prompt, reader, breakpoints=[40])))
        batcher.step()
    batcher.run()
    for prompt, reader, (session, (request, usage)) in zip(prompts, readers, sessions, strict=True):
        assert request.done
        assert request.error is None
        assert usage.read + usage.computed == len(prompt)
        assert session.sequence.tokens == prompt + reader.tokens
        for i, logits in enumerate(reader.logits):
            np.testing.assert_array_equal(logits, fresh_logits(name, prompt + reader.tokens[:i]))
    assert sessions[2][1][1].read == 40


def test_decoding_goes_on_while_a_long_prompt_runs(steps):
    engine = opened(PLAIN, **MANY)
    batcher = Batcher(engine, step_seconds=0)  # every step is too slow, so prompts get the least
    short, long = Reader(60), Reader(0)
    batcher.submit(engine.sequence(), [5], short)
    batcher.step()
    batcher.submit(engine.sequence(), text(600), long)
    batcher.run()
    together = [sizes for sizes in steps if len(sizes) == 2]
    assert len(together) == -(-600 // LEAST_CHUNK)
    assert all(sizes[0] == 1 and sizes[1] <= LEAST_CHUNK for sizes in together)
    assert len(short.tokens) == 60
    assert len(long.logits) == 1


def test_prompts_get_more_where_there_is_time(steps):
    engine = opened(PLAIN, **MANY)
    batcher = Batcher(engine, step_seconds=3600)
    batcher.submit(engine.sequence(), [5], Reader(60))
    batcher.step()
    batcher.submit(engine.sequence(), text(600), Reader(0))
    batcher.run()
    sizes = [sizes[1] for sizes in steps if len(sizes) == 2]
    assert sizes[:4] == [16, 32, 64, 128]


def test_a_short_prompt_does_not_wait_for_a_long_one(steps, monkeypatch):
    engine = opened(PLAIN, **MANY)
    monkeypatch.setattr(engine, "plan", dataclasses.replace(engine.plan, chunk_tokens=40))
    batcher, order = Batcher(engine), []
    batcher.submit(engine.sequence(), text(600), lambda _: order.append("long"))
    batcher.submit(engine.sequence(), text(30, 1), lambda _: order.append("short"))
    batcher.run()
    assert order == ["short", "long"]
    assert max(sum(sizes) for sizes in steps) <= 40
    assert len(steps) <= 17


def test_no_more_than_the_plan_has_memory_for(steps):
    engine = opened(PLAIN, sequences=2)
    batcher = Batcher(engine)
    readers = [Reader(3) for _ in range(5)]
    for i, reader in enumerate(readers):
        batcher.submit(engine.sequence(), text(3, i), reader)
    batcher.run()
    assert max(map(len, steps)) == 2
    assert all(len(reader.tokens) == 3 for reader in readers)


@pytest.mark.parametrize("when", ["waiting", "prompt", "decoding"])
def test_cancelling_frees_at_once_and_disturbs_nobody(when):
    engine = opened(HYBRID, **MANY)
    batcher, other = Batcher(engine, step_seconds=0), Reader(8)
    batcher.submit(engine.sequence(), text(10, 1), other)
    batcher.step()
    sequence, reader = engine.sequence(), Reader(100)
    gone = weakref.ref(sequence)
    request = batcher.submit(sequence, text(50), reader)
    del sequence
    for _ in range({"waiting": 0, "prompt": 2, "decoding": 6}[when]):
        batcher.step()
    assert bool(reader.tokens) == (when == "decoding")
    batcher.cancel(request)
    batcher.cancel(request)
    gc.collect()
    assert gone() is None
    assert request.done
    assert isinstance(request.error, CancelledError)
    batcher.run()
    np.testing.assert_array_equal(other.logits[-1], fresh_logits(HYBRID, text(10, 1) + other.tokens))
    again = Reader(2)
    batcher.submit(engine.sequence(), text(50), again)
    batcher.run()
    np.testing.assert_array_equal(again.logits[0], fresh_logits(HYBRID, text(50)))


def test_a_mistake_of_one_is_its_own():
    engine = opened(PLAIN, **MANY)
    batcher, good = Batcher(engine), Reader(6)
    batcher.submit(engine.sequence(), text(10), good)

    def wrong(_):
        raise ValueError("my own fault")

    broken = batcher.submit(engine.sequence(), text(5, 1), wrong)
    outside = batcher.submit(engine.sequence(), text(5, 2), lambda _: 99999)
    full = batcher.submit(engine.sequence(), text(1022, 3), lambda _: 1)
    batcher.run()
    assert isinstance(broken.error, ValueError)
    assert isinstance(outside.error, InputError)
    assert isinstance(full.error, InputError)
    assert len(good.tokens) == 6


def test_what_cannot_be_run_is_refused_at_once():
    engine = opened(PLAIN, **MANY)
    batcher, sequence = Batcher(engine), engine.sequence()
    for bad in ([], [999], text(2000)):
        with pytest.raises(InputError):
            batcher.submit(sequence, bad, Reader(1))
    batcher.submit(sequence, [1], Reader(1))
    with pytest.raises(StateError, match="already"):
        batcher.submit(sequence, [1], Reader(1))
    assert batcher.n_active == 1
    batcher.run()
    assert batcher.step() == 0
    assert not batcher.wait(0)


def test_a_failing_drive_ends_those_who_were_in_the_step(monkeypatch):
    engine = opened(HYBRID, **MANY)
    batcher = Batcher(engine)
    request = batcher.submit(engine.sequence(), text(5), Reader(5))

    def fail(*_):
        raise moeflux.ReadError("the drive is gone")

    with monkeypatch.context() as patch:
        patch.setattr(engine.model.experts, "acquire", fail)
        patch.setattr(engine.model.experts, "stream", None)
        batcher.step()
    assert isinstance(request.error, moeflux.ReadError)
    again = Reader(2)
    batcher.submit(engine.sequence(), text(5), again)
    batcher.run()
    assert len(again.tokens) == 2


def test_sequences_and_prefixes_are_in_the_plan():
    one = opened(PLAIN).plan.memory.state
    assert opened(PLAIN, **MANY).plan.memory.state == 8 * one
    assert opened(PLAIN, prefixes="3MB").plan.memory.state == one + 3_000_000
    with pytest.raises(BudgetError, match="of 500 sequences and kept prefixes"):
        moeflux.load(DATA / "mlx" / PLAIN, ram="300MB", sequences=500, prefixes="10MB", context=1024)
    for bad in ({"sequences": 0}, {"prefixes": "many"}):
        with pytest.raises(OptionError, match=next(iter(bad))):
            moeflux.load(DATA / "mlx" / PLAIN, **bad)
