"""A state machine over worker, scheduler, sessions and prefix store. Whatever callers do, in whatever order, from any
thread: every answer is the one computed alone, every handle ends exactly once, and memory stays within the plan."""

from __future__ import annotations

import contextlib
import shutil
import tempfile
import threading
from functools import cache
from pathlib import Path

import hypothesis.strategies as st
import numpy as np
from hypothesis import HealthCheck, Phase, settings
from hypothesis.stateful import Bundle, RuleBasedStateMachine, initialize, multiple, rule

import moeflux
from moeflux.core.errors import ClosedError, OverloadError, ReadError
from moeflux.runtime import forward as runtime_forward
from moeflux.session.entry import Limits
from moeflux.session.events import Failed, Finish, Token
from moeflux.session.handle import RequestOptions
from moeflux.session.prefixes import PrefixStore
from moeflux.session.worker import Worker, WorkerOptions
from session.models import chat_model

CONTEXT, PREFIXES, SECONDS = 96, 4_000_000, 60
FAULT = 509  # requests with this token meet a drive that fails


@cache
def folder():
    return chat_model(Path(tempfile.mkdtemp()) / "model")


@cache
def whole():
    return moeflux.load(folder(), threads=1, context=CONTEXT)


@cache
def alone(ids, n, seed):
    """The answer of a sequence that has the engine for itself, with all experts in memory."""
    return tuple(token.id for token in whole().generate(ids, max_tokens=n, temperature=0.8, seed=seed))


class Faults:
    """Forwards of an engine that hold FAULT fail after they have advanced every state of the batch."""

    def __init__(self):
        self.run, self.engine = runtime_forward.forward, None

    def __call__(self, model, batch, *rest):
        out = self.run(model, batch, *rest)
        if model is self.engine.model and FAULT in batch.tokens():
            for segment in batch.segments:
                del segment.sequence.tokens[len(segment.sequence) - len(segment.tokens) :]
                segment.sequence.mark_broken("the drive is gone")
            raise ReadError("the drive is gone")
        return out


class Caller:
    def __init__(self, ids, n, seed):
        self.ids, self.n, self.seed, self.events = tuple(ids), n, seed, []
        self.handle, self.cancelled, self.closed = None, False, False

    def submit(self, worker, priority):
        options = RequestOptions(self.n, sampling={"temperature": 0.8, "seed": self.seed}, priority=priority)
        self.handle = worker.submit(list(self.ids), options, self.events.append)

    def check(self):
        """After its end."""
        with contextlib.suppress(ReadError, ClosedError):
            self.handle.result(SECONDS)
        last = [event for event in self.events if isinstance(event, (Finish, Failed))]
        assert len(last) == 1
        assert self.events[-1] is last[0]
        if isinstance(last[0], Failed):
            assert FAULT in self.ids or (self.closed and isinstance(last[0].error, ClosedError))
        tokens = tuple(event.id for event in self.events if isinstance(event, Token))
        expected = alone(self.ids, self.n, self.seed)
        assert tokens == expected[: len(tokens)]
        if isinstance(last[0], Finish) and not self.cancelled:
            assert len(tokens) == len(expected)
            assert FAULT not in self.ids


class Callers(RuleBasedStateMachine):
    texts = Bundle("texts")
    callers = Bundle("callers")

    @initialize(sequences=st.integers(2, 12), slots=st.integers(4, 40), threads=st.integers(1, 2), disk=st.booleans())
    def open(self, sequences, slots, threads, disk):
        self.faults = Faults()
        moeflux.runtime.engine.forward = self.faults
        self.engine = moeflux.load(
            folder(), context=CONTEXT, sequences=sequences, slots=slots, threads=threads, prefixes=PREFIXES
        )
        self.faults.engine = self.engine
        self.disk = Path(tempfile.mkdtemp()) if disk else None
        self.all, self.worker = [], None
        self.start()

    def start(self):
        self.store = PrefixStore(self.engine, Limits(PREFIXES, 10**8), self.disk)
        self.worker = Worker(self.engine, self.engine.text, self.store, WorkerOptions(max_queue=20))

    @rule(target=texts, seed=st.integers(0, 99), n=st.integers(1, 60), sick=st.booleans())
    def write(self, seed, n, sick):
        text = np.random.default_rng(seed).integers(0, 500, n).tolist()
        return [*text[: n // 2], FAULT, *text[n // 2 :]] if sick and seed % 4 == 0 else text

    @rule(target=callers, text=texts, n=st.integers(1, 12), seed=st.integers(0, 3), priority=st.integers(0, 2))
    def submit(self, text, n, seed, priority):
        caller = Caller(text, n, seed)
        try:
            thread = Submitting(caller, self.worker, priority)
            thread.start()
            thread.join()
            if thread.error:
                raise thread.error
        except OverloadError:
            return multiple()
        self.all.append(caller)
        return caller

    @rule(target=texts, caller=callers, more=st.lists(st.integers(0, 499), min_size=1, max_size=5), back=st.integers(0, 9))
    def go_on_or_fork(self, caller, more, back):
        """The next turn of a conversation, or another one from somewhere within it."""
        told = [event.id for event in list(caller.events) if isinstance(event, Token)]
        known = [*caller.ids, *told]
        return [*known[: max(1, len(known) - back)], *more][: CONTEXT - 14]

    @rule(caller=callers)
    def cancel(self, caller):
        caller.cancelled = True
        caller.handle.cancel()

    @rule(caller=callers)
    def wait(self, caller):
        caller.check()

    @rule()
    def look(self):
        assert self.store.ram_bytes <= PREFIXES
        assert self.worker.status.running <= self.engine.config.sequences
        assert self.worker._pool.nbytes <= self.worker._pool._bytes

    @rule(drain=st.sampled_from([0, 0, 10]))
    def shut_down_and_start(self, drain):
        self.finish(drain)
        self.start()

    def finish(self, drain):
        self.worker.close(drain)
        for caller in self.all:
            assert caller.handle.done
            caller.closed = True
            caller.check()
        self.all = []
        self.store.close()

    def teardown(self):
        if getattr(self, "worker", None) is not None:
            try:
                self.finish(SECONDS)
            finally:
                self.engine.close()
                moeflux.runtime.engine.forward = self.faults.run
                if self.disk:
                    shutil.rmtree(self.disk)


class Submitting(threading.Thread):
    """A caller's own thread."""

    def __init__(self, caller, worker, priority):
        super().__init__()
        self.caller, self.worker, self.priority, self.error = caller, worker, priority, None

    def run(self):
        try:
            self.caller.submit(self.worker, self.priority)
        except BaseException as error:
            self.error = error


TestCallers = Callers.TestCase
TestCallers.settings = settings(
    max_examples=25,
    stateful_step_count=30,
    deadline=None,
    suppress_health_check=list(HealthCheck),
    phases=[Phase.explicit, Phase.reuse, Phase.generate],  # threads make each run another: shrinking would lead nowhere
)
