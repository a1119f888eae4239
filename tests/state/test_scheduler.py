"""Many sequences at once: the same bits as alone, nobody starves, nobody is held up, and who leaves leaves nothing."""

from __future__ import annotations

import contextlib
import dataclasses
import gc
import weakref

import numpy as np
import pytest

import moeflux
from conftest import DATA
from moeflux.core.errors import BudgetError, CancelledError, InputError, OptionError, StateError
from moeflux.runtime import forward as runtime_forward
from moeflux.runtime.scheduler import Scheduler
from moeflux.runtime.turns import Turns
from moeflux.session.entry import Limits
from moeflux.session.prefixes import PrefixStore
from moeflux.session.session import Marks, Session
from state.families import FAMILIES, HYBRID, PLAIN, fresh_logits, opened, text

MANY = {"sequences": 8}
FAULT = 511  # a token that readers never choose


class Reader:
    """Takes the most likely token n times, and keeps what it saw."""

    def __init__(self, n):
        self.left, self.tokens, self.logits = n, [], []

    def __call__(self, logits):
        self.logits.append(logits.copy())
        if self.left == 0:
            return []
        self.left -= 1
        self.tokens.append(int(logits[:FAULT].argmax()))
        return [self.tokens[-1]]


@pytest.fixture
def steps(monkeypatch):
    """The sizes of the segments of every forward."""
    seen = []
    forward = moeflux.Engine.forward

    def watched(self, *segments, **options):
        seen.append([len(segment.tokens) for segment in segments])
        return forward(self, *segments, **options)

    monkeypatch.setattr(moeflux.Engine, "forward", watched)
    return seen


@pytest.mark.parametrize("name", FAMILIES)
def test_together_as_alone(name):
    """Prompts of different lengths that begin at different times, some from a shared prefix."""
    engine = opened(name, prefixes="100MB", **MANY)
    scheduler, prefixes = Scheduler(engine), PrefixStore(engine, Limits(10**8))
    prompts = [text(40), text(3, 1), [*text(40), *text(20, 2)], text(90, 3), text(1, 4)]
    readers = [Reader(n) for n in (5, 9, 4, 3, 7)]
    sessions = []
    for prompt, reader in zip(prompts, readers, strict=True):
        session = Session(engine, prefixes)
        sessions.append((session, session.submit(scheduler, prompt, reader, Marks({40: 0.0}))))
        scheduler.step()
    scheduler.run()
    for prompt, reader, (session, job) in zip(prompts, readers, sessions, strict=True):
        assert job.done
        assert job.error is None
        assert session.use.read + session.use.computed == len(prompt)
        assert session.sequence.tokens == prompt + reader.tokens
        for i, logits in enumerate(reader.logits):
            np.testing.assert_array_equal(logits, fresh_logits(name, prompt + reader.tokens[:i]))
    assert sessions[2][0].use.read == 40


class Stopwatch:
    """A clock for the scheduler: a decode step takes 1 s, a token of a prompt 10 ms."""

    def __init__(self, monkeypatch):
        self.now = 0.0
        monkeypatch.setattr("moeflux.runtime.scheduler.time.perf_counter", lambda: self.now)
        forward = moeflux.Engine.forward

        def timed(engine, *segments, **options):
            self.now += 1.0 if segments[0].kind == "decode" else 0.01 * sum(len(s.tokens) for s in segments)
            return forward(engine, *segments, **options)

        monkeypatch.setattr(moeflux.Engine, "forward", timed)


def test_prompts_and_decoding_take_turns_in_time(steps, monkeypatch):
    """1,000 tokens of a prompt take 10 s, in turns of 512; those that decode get as long after each turn."""
    Stopwatch(monkeypatch)
    engine = opened(PLAIN, **MANY)
    scheduler, short, long = Scheduler(engine), Reader(60), Reader(0)
    scheduler.submit(engine.sequence(), [5], short)
    scheduler.step()
    del steps[:]
    scheduler.submit(engine.sequence(), text(1000), long)
    while not long.logits:
        scheduler.step()
    assert steps == [[512], *[[1]] * 6, [488]]
    scheduler.run()
    assert len(short.tokens) == 60
    assert all(len(sizes) == 1 for sizes in steps)


def turn_of(turns):
    return turns.next(False, True, alone=False)[1]


def test_turns_follow_what_they_take():
    turns = Turns(4096)
    assert turns.next(False, True, alone=True) == ("prompt", 4096)
    assert turn_of(turns) == 512
    turns.ran("prompt", 512, 1.0)
    assert turn_of(turns) == 1024
    turns.ran("prompt", 100, 1.0)  # the end of a prompt says nothing
    turns.ran("prompt", 1024, 10.0)
    assert turn_of(turns) == 1024
    for n in (1024, 512, 256, 256):
        turns.ran("prompt", n, 100.0)
    assert turns.next(True, True, alone=False) == ("prompt", 256)
    turns.ran("prompt", 256, 50.0)
    assert turns.next(True, True, alone=False) == ("decode", 4096)
    turns.ran("decode", 2, 30.0)
    assert turns.next(True, True, alone=False)[0] == "decode"
    turns.ran("decode", 2, 30.0)
    assert turns.next(True, True, alone=False)[0] == "prompt"


def test_turns_are_large_enough_for_what_they_read():
    """Where reading takes most of a turn, fewer tokens would take as long."""
    assert turn_of(Turns(4096, sweep_s=3.0)) == 512
    assert turn_of(Turns(4096, sweep_s=60.0)) == 4096
    turns = Turns(4096, sweep_s=10.0)
    assert turn_of(turns) == 1024
    turns.ran("prompt", 1024, 14.0)
    assert turn_of(turns) == 1024
    turns.ran("prompt", 1024, 11.0)  # hardly longer than reading alone
    assert turn_of(turns) == 2048
    turns.ran("prompt", 2048, 29.0)
    assert turn_of(turns) == 2048
    turns.ran("prompt", 2048, 31.0)
    assert turn_of(turns) == 1024


def test_a_step_is_stopped_for_a_newcomer_where_that_loses_less_than_it_saves():
    turns = Turns(4096)
    assert turns.worth_stopping(4096, 1.0)
    assert not turns.worth_stopping(4096, 10.0)  # nobody knows how long it still takes
    assert not turns.worth_stopping(512, 0.0)  # a turn
    turns.ran("prompt", 2048, 20.48)
    assert turns.worth_stopping(4096, 20.0)
    assert not turns.worth_stopping(4096, 21.0)
    turns.ran("prompt", 2048, 0.01)
    assert not turns.worth_stopping(4096, 0.0)


@pytest.mark.parametrize("name", [PLAIN, HYBRID])
def test_a_newcomer_stops_a_long_step_once(name, monkeypatch):
    """A prompt alone is in one large step when somebody comes: it ends with the layer and goes on in turns."""
    engine = opened(name, **MANY)
    monkeypatch.setattr(engine, "plan", dataclasses.replace(engine.plan, chunk_tokens=1024))
    scheduler, run, order, sequence = Scheduler(engine), runtime_forward.forward, [], engine.sequence()
    long = scheduler.submit(sequence, text(1000), lambda logits: order.append(("long", logits.copy())) or [])
    coming = [text(30, 1), text(20, 2)]

    def arriving(model, batch, cancel):
        if coming:
            tokens = coming.pop(0)
            scheduler.submit(engine.sequence(), tokens, lambda logits: order.append((len(tokens), logits.copy())) or [])
        return run(model, batch, cancel)

    monkeypatch.setattr("moeflux.runtime.engine.forward", arriving)
    assert scheduler.step() == 0
    assert (len(sequence), len(long.pending)) == (0, 1000)
    assert scheduler.step() > 30  # with the second one, who stops nobody
    scheduler.run()
    assert [who for who, _ in order] == [30, 20, "long"]
    for (_, logits), tokens in zip(order, (text(30, 1), text(20, 2), text(1000)), strict=True):
        np.testing.assert_array_equal(logits, fresh_logits(name, tokens))


def test_a_short_prompt_does_not_wait_for_a_long_one(steps, monkeypatch):
    engine = opened(PLAIN, **MANY)
    monkeypatch.setattr(engine, "plan", dataclasses.replace(engine.plan, chunk_tokens=40))
    scheduler, order = Scheduler(engine), []
    scheduler.submit(engine.sequence(), text(600), lambda _: order.append("long") or [])
    scheduler.submit(engine.sequence(), text(30, 1), lambda _: order.append("short") or [])
    scheduler.run()
    assert order == ["short", "long"]
    assert max(sum(sizes) for sizes in steps) <= 40


def test_no_more_than_the_plan_has_memory_for(steps):
    engine = opened(PLAIN, sequences=2)
    scheduler = Scheduler(engine)
    readers = [Reader(3) for _ in range(5)]
    for i, reader in enumerate(readers):
        scheduler.submit(engine.sequence(), text(3, i), reader)
    scheduler.run()
    assert max(map(len, steps)) == 2
    assert all(len(reader.tokens) == 3 for reader in readers)


@pytest.mark.parametrize("when", ["waiting", "prompt", "decoding"])
def test_cancelling_frees_at_once_and_disturbs_nobody(when):
    engine = opened(HYBRID, **MANY)
    scheduler, other = Scheduler(engine), Reader(8)
    scheduler.submit(engine.sequence(), text(10, 1), other)
    scheduler.step()
    sequence, reader = engine.sequence(), Reader(100)
    gone = weakref.ref(sequence)
    request = scheduler.submit(sequence, text(900), reader)
    del sequence
    if when == "prompt":
        scheduler.step()
    while when == "decoding" and not reader.tokens:
        scheduler.step()
    assert bool(reader.tokens) == (when == "decoding")
    scheduler.cancel(request)
    scheduler.cancel(request)
    gc.collect()
    assert gone() is None
    assert request.done
    assert isinstance(request.error, CancelledError)
    scheduler.run()
    np.testing.assert_array_equal(other.logits[-1], fresh_logits(HYBRID, text(10, 1) + other.tokens))
    again = Reader(2)
    scheduler.submit(engine.sequence(), text(50), again)
    scheduler.run()
    np.testing.assert_array_equal(again.logits[0], fresh_logits(HYBRID, text(50)))


def test_a_mistake_of_one_is_its_own():
    engine = opened(PLAIN, **MANY)
    scheduler, good = Scheduler(engine), Reader(6)
    scheduler.submit(engine.sequence(), text(10), good)

    def wrong(_):
        raise ValueError("my own fault")

    broken = scheduler.submit(engine.sequence(), text(5, 1), wrong)
    outside = scheduler.submit(engine.sequence(), text(5, 2), lambda _: [99999])
    full = scheduler.submit(engine.sequence(), text(1022, 3), lambda _: [1])
    scheduler.run()
    assert isinstance(broken.error, ValueError)
    assert isinstance(outside.error, InputError)
    assert isinstance(full.error, InputError)
    assert len(good.tokens) == 6


def test_what_cannot_be_run_is_refused_at_once():
    engine = opened(PLAIN, **MANY)
    scheduler, sequence = Scheduler(engine), engine.sequence()
    for bad in ([], [999], text(2000)):
        with pytest.raises(InputError):
            scheduler.submit(sequence, bad, Reader(1))
    scheduler.submit(sequence, [1], Reader(1))
    with pytest.raises(StateError, match="busy"):
        scheduler.submit(sequence, [1], Reader(1))
    assert scheduler.n_active == 1
    scheduler.run()
    assert scheduler.step() == 0
    assert not scheduler.wait(0)


class Faults:
    """A drive that fails for forwards that hold a certain token; `attempts` counts forwards."""

    def __init__(self, monkeypatch, token):
        self.attempts, run = 0, runtime_forward.forward

        def failing(model, batch, *options):
            self.attempts += 1
            out = run(model, batch, *options)
            if token in batch.tokens():
                for segment in batch.segments:  # as a failure in the last layer leaves them
                    del segment.sequence.tokens[len(segment.sequence) - len(segment.tokens) :]
                    segment.sequence.mark_broken("the drive is gone")
                raise moeflux.ReadError(f"the drive is gone, forward {self.attempts}")
            return out

        monkeypatch.setattr("moeflux.runtime.engine.forward", failing)


@pytest.mark.parametrize("name", FAMILIES)
def test_a_failing_step_ends_only_whose_tokens_fail(name, monkeypatch):
    """All were advanced when the failure came: they go back, run again one by one, and give the same bits."""
    engine = opened(name, **MANY)
    scheduler, readers = Scheduler(engine), [Reader(70) for _ in range(4)]
    jobs = [scheduler.submit(engine.sequence(), text(20 + i, i), reader) for i, reader in enumerate(readers)]
    for _ in range(30):
        scheduler.step()
    with monkeypatch.context() as patch:
        Faults(patch, token=FAULT)
        sick = scheduler.submit(engine.sequence(), [FAULT], Reader(1))
        bad = Bad()
        turned = scheduler.submit(engine.sequence(), text(9, 7), bad)
        scheduler.run()
    assert isinstance(sick.error, moeflux.ReadError)
    assert isinstance(turned.error, moeflux.ReadError)
    assert sick.error is not turned.error
    assert bad.logits
    for i, (job, reader) in enumerate(zip(jobs, readers, strict=True)):
        assert job.error is None
        assert len(reader.tokens) == 70
        np.testing.assert_array_equal(reader.logits[-1], fresh_logits(name, text(20 + i, i) + reader.tokens))


class Bad(Reader):
    """Decodes some tokens, then asks for the one that fails."""

    def __init__(self):
        super().__init__(40)

    def __call__(self, logits):
        return [FAULT] if self.left == 35 else super().__call__(logits)


def test_the_sequence_of_a_failed_job_stays_good(monkeypatch):
    engine = opened(HYBRID, **MANY)
    scheduler, sequence, other = Scheduler(engine), engine.sequence(), Reader(5)
    with monkeypatch.context() as patch:
        Faults(patch, token=FAULT)
        job = scheduler.submit(sequence, text(5), lambda _: [FAULT])
        scheduler.submit(engine.sequence(), text(5, 1), other)
        scheduler.run()
    assert isinstance(job.error, moeflux.ReadError)
    assert sequence.usable
    assert sequence.tokens == text(5)[: len(sequence)]
    again = Reader(0)
    scheduler.submit(sequence, text(9)[len(sequence) :], again)
    scheduler.run()
    np.testing.assert_array_equal(again.logits[0], fresh_logits(HYBRID, text(9)))


def test_a_busy_session_is_refused_before_it_is_cut():
    engine = opened(PLAIN, **MANY)
    scheduler, session, reader = Scheduler(engine), Session(engine), Reader(6)
    session.submit(scheduler, text(20), reader)
    scheduler.step()
    held = list(session.sequence.tokens)
    with pytest.raises(StateError, match="busy"):
        session.submit(scheduler, text(10, 1), Reader(1))
    assert session.sequence.tokens == held == text(20)
    scheduler.run()
    np.testing.assert_array_equal(reader.logits[-1], fresh_logits(PLAIN, text(20) + reader.tokens))


def in_a_step(engine, monkeypatch, act):
    """Calls `act` in the middle of the next forward, when states have been advanced."""
    run = runtime_forward.forward

    def acting(*arguments):
        monkeypatch.undo()
        out = run(*arguments)
        act()
        return out

    monkeypatch.setattr("moeflux.runtime.engine.forward", acting)


def test_a_cancelled_sequence_is_busy_until_the_step_has_ended(monkeypatch):
    engine = opened(PLAIN, **MANY)
    scheduler, sequence = Scheduler(engine), engine.sequence()
    job = scheduler.submit(sequence, text(20), Reader(6))
    refused = []

    def replace():
        scheduler.cancel(job)
        with pytest.raises(StateError, match="busy") as error:
            scheduler.submit(sequence, text(5, 1), Reader(1))
        refused.append(error)

    in_a_step(engine, monkeypatch, replace)
    scheduler.step()
    assert refused
    assert isinstance(job.error, CancelledError)
    sequence.clear()
    again = Reader(2)
    scheduler.submit(sequence, text(5, 1), again)
    scheduler.run()
    np.testing.assert_array_equal(again.logits[0], fresh_logits(PLAIN, text(5, 1)))


def test_a_sequence_whose_job_ended_is_busy_until_the_step_has_ended():
    """Those who are told later in the same step cannot have it yet."""
    engine = opened(PLAIN, **MANY)
    scheduler, sequence, refused = Scheduler(engine), engine.sequence(), []
    first = scheduler.submit(sequence, text(5), Reader(0))

    def take(_):
        assert first.done
        with pytest.raises(StateError, match="busy") as error:
            scheduler.submit(sequence, [1], Reader(0))
        refused.append(error)
        return []

    scheduler.submit(engine.sequence(), text(6, 1), take)
    scheduler.run()
    assert refused
    scheduler.check_free(sequence)


@pytest.mark.parametrize("error", [KeyboardInterrupt, ValueError])
def test_an_exception_in_a_callback_feeds_nothing_twice(error):
    """Ctrl-C while one is told: it ends with that, and the others get their logits with the next step."""
    engine = opened(PLAIN, **MANY)
    scheduler, first, last = Scheduler(engine), Reader(4), Reader(4)

    def interrupted(_):
        raise error

    scheduler.submit(engine.sequence(), text(5), first)
    middle = scheduler.submit(engine.sequence(), text(6, 1), interrupted)
    scheduler.submit(engine.sequence(), text(7, 2), last)
    with contextlib.suppress(KeyboardInterrupt):
        scheduler.step()
    scheduler.run()
    assert isinstance(middle.error, error)
    for prompt, reader in ((text(5), first), (text(7, 2), last)):
        assert len(reader.logits) == 5
        for i, logits in enumerate(reader.logits):
            np.testing.assert_array_equal(logits, fresh_logits(PLAIN, prompt + reader.tokens[:i]))


def test_several_tokens_can_follow_at_once():
    """As a constraint forces them: they are decoded, not taken for a prompt."""
    engine = opened(HYBRID, **MANY)
    scheduler, seen = Scheduler(engine), []
    answers = [[5, 6, 7], [8], []]
    scheduler.submit(engine.sequence(), text(4), lambda logits: (seen.append(logits.copy()), answers[len(seen) - 1])[1])
    scheduler.run()
    for n, logits in zip((0, 3, 4), seen, strict=True):
        np.testing.assert_array_equal(logits, fresh_logits(HYBRID, text(4) + [5, 6, 7, 8][:n]))


def test_what_sequences_took_of_the_store_adds_up():
    engine = moeflux.load(DATA / "mlx" / HYBRID, threads=1, context=256, sequences=4, slots=20)
    with engine:
        before, sequences = engine.stats().use, [engine.sequence() for _ in range(3)]
        scheduler = Scheduler(engine)
        for i, sequence in enumerate(sequences):
            scheduler.submit(sequence, text(5 + 9 * i, i), Reader(7))
        scheduler.run()
        total = sum((sequence.use for sequence in sequences), start=before)
        assert total.asked > 0 < total.bytes_read
        assert all(sequence.use.asked > 0 for sequence in sequences)
        assert total.asked == engine.stats().asked
        assert total.hits == engine.stats().hits
        assert engine.stats().bytes_read - total.bytes_read >= 0  # hints that arrived after the last forward are nobody's
        engine.forward(moeflux.Segment(sequences[0], [1]))
        assert sum((s.use for s in sequences), start=before).bytes_read <= engine.stats().bytes_read


def test_sequences_and_prefixes_are_in_the_plan():
    one = opened(PLAIN).plan.memory.state
    assert opened(PLAIN, **MANY).plan.memory.state == 8 * one
    assert opened(PLAIN, prefixes="3MB").plan.memory.state == one + 3_000_000
    with pytest.raises(BudgetError, match="of 500 sequences and kept prefixes"):
        moeflux.load(DATA / "mlx" / PLAIN, ram="300MB", sequences=500, prefixes="10MB", context=1024)
    for bad in ({"sequences": 0}, {"prefixes": "many"}):
        with pytest.raises(OptionError, match=next(iter(bad))):
            moeflux.load(DATA / "mlx" / PLAIN, **bad)
