"""Many callers on one engine: every answer is the one computed alone, every handle ends once, nobody disturbs another."""

from __future__ import annotations

import gc
import logging
import threading
import time
from functools import cache, partial

import pytest

import moeflux
from moeflux import Grammar
from moeflux.core.errors import (
    ClosedError,
    DeadlineError,
    InputError,
    InternalError,
    MoefluxError,
    OptionError,
    OverloadError,
    ReadError,
)
from moeflux.runtime import forward as runtime_forward
from moeflux.session.entry import Fetch, Limits
from moeflux.session.events import Failed, Finish, Queued, Started, Token
from moeflux.session.handle import RequestOptions
from moeflux.session.prefixes import PrefixStore
from moeflux.session.prompt import Conversation
from moeflux.session.session import Session
from moeflux.session.worker import Worker, WorkerOptions
from session.models import chat_model, readable

PROMPTS = ["The quick brown fox", "He said: ", "Größe", "jumps over the lazy dog " * 9]


@pytest.fixture(scope="module")
def engine(tmp_path_factory):
    folder = chat_model(tmp_path_factory.mktemp("models") / "model")
    with moeflux.load(folder, context=512, sequences=3, prefixes="64MB") as engine:
        yield engine


@pytest.fixture
def worker(engine):
    with Worker(engine, engine.text) as worker:
        yield worker


def options(n, **more):
    return RequestOptions(max_tokens=n, **more)


def ids_of(handle):
    return [token.id for token in handle.tokens()]


class Held:
    """Stops the engine's thread in its next step until it is let go."""

    def __init__(self, monkeypatch):
        self.entered, self.go = threading.Event(), threading.Event()
        run = runtime_forward.forward

        def held(*arguments):
            self.entered.set()
            assert self.go.wait(30)
            return run(*arguments)

        monkeypatch.setattr("moeflux.runtime.engine.forward", held)


@cache
def alone(engine, prompt, n):
    return [token.id for token in engine.generate(prompt, max_tokens=n)]


def test_answers_are_those_computed_alone(engine, worker):
    """More callers than sequences, from threads of their own."""
    answers = {}

    def call(i):
        answers[i] = ids_of(worker.submit(PROMPTS[i % 4], options(4 + i)))

    threads = [threading.Thread(target=call, args=(i,)) for i in range(10)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for i in range(10):
        assert answers[i] == alone(engine, PROMPTS[i % 4], 4 + i)


def test_events_come_in_order_and_end_once(engine, worker):
    seen = []
    handle = worker.submit(PROMPTS[0], options(3), seen.append)
    finish = handle.result(30)
    assert [type(event) for event in seen if not isinstance(event, Token)][:2] == [Queued, Started]
    assert sum(isinstance(event, (Finish, Failed)) for event in seen) == 1
    assert seen[-1] is finish
    assert [event.id for event in seen if isinstance(event, Token)] == alone(engine, PROMPTS[0], 3)
    assert (finish.reason, finish.usage.completion) == ("length", 3)
    assert finish.usage.prompt == len(engine.text.tokenizer.encode(PROMPTS[0]))
    assert finish.timings.prefill <= finish.timings.first <= finish.timings.total
    handle.cancel()
    assert seen[-1] is finish
    with pytest.raises(OptionError, match="callback"):
        next(handle.events())


def test_a_conversation_goes_on_where_it_rests(engine, worker):
    messages = [{"role": "user", "content": "hello"}]
    first = worker.submit(Conversation(messages), options(8, sampling={"logit_bias": readable(engine.text)}))
    text = "".join(token.text for token in first.tokens())
    held = first.result().usage.prompt + 7
    messages += [{"role": "assistant", "content": text}, {"role": "user", "content": "and then?"}]
    second = worker.submit(Conversation(messages), options(5))
    ids = ids_of(second)
    assert second.result().usage.cached == held
    chat = engine.chat()
    list(chat.ask("hello", max_tokens=8, logit_bias=readable(engine.text)))
    assert ids == [token.id for token in chat.ask("and then?", max_tokens=5)]


def test_conversations_fork(engine, worker):
    """Both go on from one beginning, and the one that rests loses nothing."""
    start = list(range(5, 65))
    worker.submit(start, options(1)).result(30)
    left, right = [*start, 7, 8], [*start[:50], 9, 10, 11]
    handles = [worker.submit(ids, options(6)) for ids in (left, right)]
    for handle, ids in zip(handles, (left, right), strict=True):
        assert ids_of(handle) == [token.id for token in engine.generate(ids, max_tokens=6)]
    assert handles[0].result().usage.cached == 60


def test_idle_conversations_go_to_the_prefix_store_and_come_back(engine, tmp_path):
    """Through memory, and from disk after a new start; the same bits each time."""
    prompt = list(range(3, 83))
    for known, parallel in ((0, 3), (80, 1)):
        store = PrefixStore(engine, Limits(64 * 10**6), tmp_path)
        with Worker(engine, engine.text, store, WorkerOptions(parallel=parallel)) as worker:
            first = [*prompt, 8] if known else prompt
            handle = worker.submit(first, options(4))
            assert ids_of(handle) == [token.id for token in engine.generate(first, max_tokens=4)]
            assert handle.result().usage.cached == known
            others = [worker.submit([*range(40 + i, 60), 5], options(2)) for i in range(4)]
            for other in others:
                other.result(30)
            again = worker.submit([*prompt, 9, 9], options(4))
            assert ids_of(again) == [token.id for token in engine.generate([*prompt, 9, 9], max_tokens=4)]
            assert again.result().usage.cached >= 80
        store.flush()
        store.close()


def test_what_the_caller_did_wrong_is_raised_at_once(engine, worker):
    for prompt, wanted, error in (
        ([], options(1), InputError),
        ([99999], options(1), InputError),
        (list(range(5)) * 200, options(1), InputError),
        ("x", options(-1), InputError),
        ("x", options(1, sampling={"top_p": 3}), OptionError),
        ("x", options(1, grammar=Grammar.regex("(")), InputError),
        (Conversation([{"role": "king", "content": 5}]), options(1), InputError),
    ):
        with pytest.raises(error) as raised:
            worker.submit(prompt, wanted)
        assert raised.value.fault == "client"
    with pytest.raises(OptionError, match="deadline"):
        options(1, deadline_s="soon")
    assert worker.status.waiting == worker.status.running == 0


def test_grammars_with_forced_tokens(engine, worker):
    grammar = Grammar.schema({"type": "object", "properties": {"a_name": {"enum": ["x"]}}, "required": ["a_name"],
                              "additionalProperties": False})  # fmt: skip
    handle = worker.submit(PROMPTS[0], options(99, grammar=grammar))
    text = "".join(token.text for token in handle.tokens())
    assert text == "".join(token.text for token in engine.generate(PROMPTS[0], max_tokens=99, grammar=grammar))
    assert handle.result().reason == "complete"


def test_an_answer_that_is_forced_whole_needs_no_step(engine, worker):
    def broken(event):
        if isinstance(event, Token):
            raise ValueError("my own fault")

    before, wanted = engine.stats().asked, options(99, grammar=Grammar.regex("one way only"))
    other = worker.submit(PROMPTS[1], options(3))
    handle, failed = worker.submit(PROMPTS[0], wanted), worker.submit(PROMPTS[0], wanted, broken)
    assert "".join(token.text for token in handle.tokens()) == "one way only"
    assert (handle.result().reason, handle.result().store.asked) == ("complete", 0)
    with pytest.raises(InternalError, match="my own fault"):
        failed.result(30)
    assert ids_of(other) == alone(engine, PROMPTS[1], 3)
    assert engine.stats().asked > before


def test_a_full_line_and_places_in_it(engine, monkeypatch):
    held = Held(monkeypatch)
    with Worker(engine, engine.text, options=WorkerOptions(parallel=1, max_queue=2)) as worker:
        order = []

        def watch(name):
            return lambda event: order.append(name) if isinstance(event, Finish) else None

        running = worker.submit([5], options(1))
        assert held.entered.wait(30)
        low = worker.submit([6], options(1), watch("low"))
        high = worker.submit([7], options(1, priority=5), watch("high"))
        assert (running.place, high.place, low.place) == (None, 0, 1)
        with pytest.raises(OverloadError, match="2 requests") as error:
            worker.submit([8], options(1))
        assert error.value.fault == "overload"
        held.go.set()
        low.result(30)
        high.result(30)
        assert order == ["high", "low"]


@pytest.mark.parametrize("when", ["waiting", "running"])
def test_cancelled(engine, monkeypatch, when):
    held = Held(monkeypatch)
    with Worker(engine, engine.text, options=WorkerOptions(parallel=1)) as worker:
        first = worker.submit(PROMPTS[0], options(50))
        assert held.entered.wait(30)
        second = worker.submit(PROMPTS[1], options(2))
        handle = second if when == "waiting" else first
        handle.cancel()
        handle.cancel()
        held.go.set()
        finish = handle.result(30)
        assert (finish.reason, finish.usage.completion) == ("cancelled", 0)
        if when == "running":
            assert ids_of(second) == alone(engine, PROMPTS[1], 2)


def test_cancelled_while_it_is_being_started(engine, worker, monkeypatch):
    submit, steps = Session.submit, []
    handles = []

    def submitting(session, *arguments):
        job = submit(session, *arguments)
        handles[0].cancel()  # by another thread, before the worker knows its job
        return job

    def forward(*arguments):
        steps.append(arguments)
        return runtime_forward.forward(*arguments)

    monkeypatch.setattr(Session, "submit", submitting)
    monkeypatch.setattr("moeflux.runtime.engine.forward", forward)
    with worker._changed:  # it starts nothing meanwhile
        handles.append(worker.submit(PROMPTS[3], options(20)))
    assert handles[0].result(30).reason == "cancelled"
    assert steps == []


@pytest.mark.parametrize("n", [3, 400])
def test_more_at_once_share_the_bytes_of_the_plan(tmp_path, n):
    """Two sequences are planned: in their place as many run as fit, and each is counted with what it may grow to."""
    most, running = [], set()

    def listen(name, event):
        if isinstance(event, Started):
            running.add(name)
        most.append(len(running))
        if isinstance(event, Finish):
            running.discard(name)

    with moeflux.load(chat_model(tmp_path / "model"), context=4096, sequences=2) as engine:
        fit = 2 * engine.state_bytes(4096) // engine.state_bytes(3 + n)
        with Worker(engine, engine.text, options=WorkerOptions(parallel=12)) as worker:
            with worker._changed:  # it sees all of them at once
                handles = [worker.submit([5 + i] * 3, options(n), partial(listen, i)) for i in range(12)]
            for handle in handles:
                handle.cancel() if n > 3 and most and max(most) >= fit else None
                handle.result(60)
    assert 2 < fit < 12
    assert max(most) == fit


def test_deadlines(engine, monkeypatch):
    held = Held(monkeypatch)
    with Worker(engine, engine.text, options=WorkerOptions(parallel=1)) as worker:
        first = worker.submit(PROMPTS[0], options(400, deadline_s=0.05))
        assert held.entered.wait(30)
        second = worker.submit(PROMPTS[1], options(2, deadline_s=0.01))
        threading.Event().wait(0.1)
        held.go.set()
        for handle in (first, second):
            with pytest.raises(DeadlineError) as error:
                handle.result(30)
            assert error.value.fault == "overload"
        assert ids_of(worker.submit(PROMPTS[1], options(2, deadline_s=60))) == alone(engine, PROMPTS[1], 2)


def test_a_state_is_read_from_disk_beside_the_steps(engine, tmp_path, monkeypatch):
    """While one request waits for its state, another runs; one that is cancelled meanwhile ends at once."""
    prompt = list(range(3, 83))
    with_store = partial(PrefixStore, engine, Limits(64 * 10**6), tmp_path)
    store = with_store()
    with Worker(engine, engine.text, store) as worker:
        worker.submit(prompt, options(1)).result(30)
    store.flush()
    store.close()
    reading, go, read = threading.Event(), threading.Event(), Fetch.read

    def slowly(fetch):
        reading.set()
        assert go.wait(30)
        return read(fetch)

    monkeypatch.setattr(Fetch, "read", slowly)
    store = with_store()
    with Worker(engine, engine.text, store) as worker:
        waiting, cancelled = (worker.submit([*prompt, last], options(3)) for last in (8, 9))
        assert reading.wait(30)
        assert ids_of(worker.submit(PROMPTS[1], options(3))) == alone(engine, PROMPTS[1], 3)
        cancelled.cancel()
        assert cancelled.result(30).reason == "cancelled"
        assert not waiting.done
        go.set()
        assert ids_of(waiting) == [token.id for token in engine.generate([*prompt, 8], max_tokens=3)]
        assert waiting.result().usage.cached == 80
    store.close()


@pytest.mark.parametrize("kind", [Queued, Started, Token, Finish])
def test_a_listener_that_fails_ends_its_own_request(engine, worker, kind, caplog):
    def broken(event):
        if isinstance(event, kind):
            raise ValueError("my own fault")

    if kind is Queued:
        with pytest.raises(ValueError, match="my own"):
            worker.submit(PROMPTS[0], options(2), broken)
    else:
        handle = worker.submit(PROMPTS[0], options(2), broken)
        if kind is Finish:
            assert handle.result(30).reason == "length"
        else:
            with pytest.raises(InternalError, match="my own fault"):
                handle.result(30)
    assert ids_of(worker.submit(PROMPTS[1], options(2))) == alone(engine, PROMPTS[1], 2)
    assert (worker.status.running, worker.status.waiting) == (0, 0)


@pytest.mark.parametrize("drain", [0, 30])
def test_closing(engine, monkeypatch, drain):
    held = Held(monkeypatch)
    worker = Worker(engine, engine.text, options=WorkerOptions(parallel=1))
    running = worker.submit(PROMPTS[0], options(3))
    assert held.entered.wait(30)
    waiting = worker.submit(PROMPTS[1], options(2))
    closer = threading.Thread(target=worker.close, args=(drain,))
    closer.start()
    while worker._closing is None:
        pass
    with pytest.raises(ClosedError):
        worker.submit(PROMPTS[1], options(2))
    if not drain:
        while not running_job(worker).cancelled:
            pass
    held.go.set()
    closer.join()
    with pytest.raises(ClosedError):
        waiting.result(0)
    if drain:
        assert running.result(0).reason == "length"
    else:
        with pytest.raises(ClosedError):
            running.result(0)
    worker.close()


def running_job(worker):
    return worker._running[0].job


def test_figures_of_requests_add_up(engine, worker):
    before = engine.stats().use
    handles = [worker.submit(prompt, options(5)) for prompt in PROMPTS]
    total = sum((handle.result(30).store for handle in handles), start=before)
    assert worker.status.use.asked == total.asked - before.asked
    assert (total.asked, total.hits) == (engine.stats().asked, engine.stats().hits)


@pytest.mark.parametrize("fails", [False, True])
def test_a_request_that_is_over_holds_no_state_whoever_has_its_handle(engine, monkeypatch, fails):
    """And nobody has to look for cycles: states are large, and a collection can be a long time away."""
    monkeypatch.setattr("moeflux.session.worker.log", QUIET)  # what is captured keeps frames
    gc.collect()
    gc.disable()
    try:
        before = engine.states.used
        with Worker(engine, engine.text) as worker:
            if fails:
                monkeypatch.setattr("moeflux.runtime.engine.forward", raising)
            handles = [worker.submit(prompt, options(4), listen=heard) for prompt in PROMPTS for heard in (None, [].append)]
            for handle in handles:
                try:
                    handle.result(30)
                except MoefluxError:
                    assert fails
        assert engine.states.used == before
    finally:
        gc.enable()


QUIET = logging.getLogger("moeflux.nobody")
QUIET.disabled = True


def raising(*arguments):
    raise ReadError("the drive is gone")


def test_closing_ends_those_that_wait_at_once_and_lets_those_that_run_finish(engine, monkeypatch):
    worker = Worker(engine, engine.text, options=WorkerOptions(parallel=1))
    held, ends = Held(monkeypatch), []

    def listen(event):
        if isinstance(event, (Finish, Failed)):
            ends.append(event)

    running = worker.submit(PROMPTS[0], options(3), listen)
    worker.submit(PROMPTS[1], options(3), listen)
    assert held.entered.wait(30)
    closing = threading.Thread(target=worker.close, args=(60.0,))
    closing.start()
    while worker._closing is None:
        time.sleep(0.001)
    held.go.set()
    closing.join(60)
    assert isinstance(ends[0].error, ClosedError)
    assert ends[1] is running.result(30)
    assert ends[1].reason == "length"
