"""The one thread that owns an engine: many callers in, one step after the other, every caller told once how it ended.

`submit` renders, encodes and compiles in the caller's thread, so mistakes of a caller are raised there and never hold up a
step. States on disk are read by a thread of their own. All else (scheduler, sessions, prefix store) belongs to the worker's
thread.
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from threading import Condition, Thread, Timer
from types import TracebackType
from typing import Self

from moeflux.core.errors import ClosedError, InternalError, MoefluxError, OptionError
from moeflux.core.log import log
from moeflux.runtime.engine import Engine
from moeflux.runtime.scheduler import Scheduler
from moeflux.runtime.snapshot import Snapshot
from moeflux.session.events import Queued
from moeflux.session.handle import Handle, Listen, RequestOptions
from moeflux.session.loading import Load, StateLoader
from moeflux.session.model_text import ModelText
from moeflux.session.pool import SessionPool
from moeflux.session.prefixes import PrefixStore
from moeflux.session.transcripts import Transcripts
from moeflux.session.waiting import WaitingLine
from moeflux.session.work import AnyPrompt, Work, encode_prompt, prepare_work
from moeflux.store.stats import ExpertUse

MAX_QUEUE = 64
NO_OPTIONS = RequestOptions()


@dataclass(frozen=True)
class WorkerOptions:
    """`parallel`: requests that run at once, by default as many as the engine was planned for. More share the same bytes."""

    parallel: int | None = None
    max_queue: int = MAX_QUEUE

    def __post_init__(self) -> None:
        for name, value in (("parallel", self.parallel), ("max_queue", self.max_queue)):
            if value is not None and (isinstance(value, bool) or not isinstance(value, int) or value < 1):
                raise OptionError(f"{value!r} is not a number of requests", where=f"option {name!r}", hint="1 or more")


@dataclass(frozen=True)
class WorkerStatus:
    running: int
    waiting: int
    resting: int  # conversations whose state is kept for their next turn
    use: ExpertUse  # of all requests that ended


class Worker:
    """Close it, or use it in a `with` statement. It closes neither the engine nor the prefix store."""

    def __init__(
        self,
        engine: Engine,
        text: ModelText,
        prefixes: PrefixStore | None = None,
        options: WorkerOptions | None = None,
    ) -> None:
        """Nobody else may use the prefix store as long as this is open."""
        options = options or WorkerOptions()
        self._engine, self._text = engine, text
        self._most = options.parallel or engine.config.sequences
        self._scheduler = Scheduler(engine, most=self._most)
        self._pool = SessionPool(engine, prefixes, self._most)
        self._loader = StateLoader(prefixes, self._wake)
        self._waiting: WaitingLine[Work] = WaitingLine(options.max_queue)
        self._loading: dict[Work, Load] = {}
        self._unwanted: list[Load] = []  # by now, and still being read
        self._running: list[Work] = []
        self._transcripts = Transcripts()
        if prefixes is not None and text.has_chat:
            for tokens in prefixes.texts:  # what was said before a restart keeps its tokens
                self._transcripts.remember(text.chat.rendered(tokens), tokens, cut=True)
        self._changed = Condition()
        self._closing: float | None = None  # until when those that run may finish
        self._use = ExpertUse()
        self._thread = Thread(target=self._serve, name="moeflux-worker", daemon=True)
        self._thread.start()

    # From any thread.

    def submit(self, prompt: AnyPrompt, options: RequestOptions = NO_OPTIONS, listen: Listen | None = None) -> Handle:
        """A text, token ids or a conversation. Raises the caller's mistakes, and OverloadError where too many wait."""
        work = prepare_work(self._text, self._engine.plan.context, prompt, options, self._transcripts)
        work.handle = handle = Handle(lambda: self._cancel(work), lambda: self._waiting.place(work), listen)
        if options.deadline_s is not None:
            work.timer = Timer(max(0.0, options.deadline_s), self._stop_late, [work])
            work.timer.daemon = True
        with self._changed:
            if self._closing is not None:
                raise ClosedError("the worker is closed")
            self._waiting.check_room()
            handle.tell(Queued(self._waiting.place_for(options.priority, options.client), work.prompt))
            self._waiting.add(work, options.priority, options.client)
            self._changed.notify_all()
        if work.timer is not None:
            work.timer.start()
        if self._scheduler.n_active < self._most:
            self._scheduler.make_way()
        return handle

    def encode(self, prompt: AnyPrompt) -> list[int]:
        """The tokens that `submit` would run."""
        return encode_prompt(self._text, prompt, self._transcripts)

    @property
    def status(self) -> WorkerStatus:
        n_running = len(self._running) + len(self._loading)
        return WorkerStatus(n_running, len(self._waiting), self._pool.n_resting, self._use)

    def close(self, drain_s: float = 0.0) -> None:
        """Takes no more requests; those that run may finish within so many seconds, all others end with a ClosedError."""
        with self._changed:
            if self._closing is None:
                self._closing = time.monotonic() + drain_s
            self._changed.notify_all()
        self._thread.join(max(0.0, drain_s))
        for work in list(self._running):
            if (job := work.job) is not None:
                self._scheduler.cancel(job)
        self._thread.join()
        self._loader.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()

    def _cancel(self, work: Work) -> None:
        work.cancelled = True
        self._stop_late(work)

    def _stop_late(self, work: Work) -> None:
        """It was cancelled, or its time is over: `_drop_late` ends it, and the scheduler stops it if it runs."""
        if (job := work.job) is not None:
            self._scheduler.cancel(job)
        self._wake()

    def _wake(self) -> None:
        with self._changed:
            self._changed.notify_all()

    # The worker's thread.

    def _serve(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(self._has_work)
                if self._closing is not None and (not self._running or time.monotonic() >= self._closing):
                    break
            try:
                self._turn()
            except Exception as error:
                log.exception("the worker failed, and ends all its requests")
                self._end_all(InternalError(f"{type(error).__name__}: {error}"))
        self._end_all(ClosedError("the worker was closed"))

    def _has_work(self) -> bool:
        loads = (*self._loading.values(), *self._unwanted)
        if self._running or self._closing is not None or any(load.done for load in loads):
            return True
        may_start = len(self._waiting) > 0 and len(self._loading) < self._most
        return may_start or any(work.cancelled or work.late for work in (*self._waiting, *self._loading))

    def _turn(self) -> None:
        self._drop_late()
        self._finish_unwanted()
        for work, load in list(self._loading.items()):
            if load.done:
                self._start_loaded(work, load)
        if self._closing is None:
            self._admit()
        else:
            self._end_waiting(ClosedError("the worker was closed"))
        self._scheduler.expected = len(self._loading)
        self._scheduler.step()
        for work in list(self._running):
            assert work.job is not None
            if work.job.done:
                self._finish(work)
            else:
                self._tell_progress(work)

    def _drop_late(self) -> None:
        """Those that were cancelled, or whose time is over."""
        for work in (*self._waiting, *self._loading, *self._running):
            if not work.cancelled and not work.late:
                continue
            if work.job is not None:
                self._scheduler.cancel(work.job)
            else:
                self._leave(work)
                work.end(None)

    def _leave(self, work: Work) -> None:
        """It waits no more. What is being read for it goes to the prefix store when it has come."""
        self._waiting.remove(work)
        if load := self._loading.pop(work, None):
            self._unwanted.append(load)

    def _finish_unwanted(self, *, all_of_them: bool = False) -> None:
        for load in [load for load in self._unwanted if load.done or all_of_them]:
            self._unwanted.remove(load)
            self._loader.finish(load)

    def _admit(self) -> None:
        """In the order of the line. One that finds no room is waited for, so that nobody starves."""
        for work in self._waiting:
            if len(self._running) + len(self._loading) >= self._most:
                return
            if work.writer.reason is not None:  # a constraint left nothing to say
                self._leave(work)
                self._end_forced(work)
            elif work.scores is None and (load := self._loader.begin(work.run, self._pool.known(work.run))):
                self._waiting.remove(work)
                self._loading[work] = load
            elif not self._start(work, None):
                return

    def _end_forced(self, work: Work) -> None:
        """All of its answer was forced, so nothing is run for it."""
        error: MoefluxError | None = None
        try:
            work.tell_forced()
        except Exception as raised:
            error = _typed(raised)
        work.end(error)

    def _start_loaded(self, work: Work, load: Load) -> None:
        if self._pool.has_room(work.context):
            del self._loading[work]
            snapshot = self._loader.finish(load)
            again = None if snapshot else self._loader.begin(work.run, self._pool.known(work.run))
            if again is not None:  # that one could not be read, but there is another
                self._loading[work] = again
            else:
                self._start(work, snapshot)

    def _start(self, work: Work, snapshot: Snapshot | None) -> bool:
        """False where there is no room now. `snapshot`: of its beginning, read for it."""
        session = self._pool.take(work.run if work.scores is None else work.run[:1], work.context)
        if session is None:
            return False
        self._waiting.remove(work)
        work.session, work.before = session, session.sequence.use
        self._running.append(work)
        try:
            if snapshot is not None:
                session.sequence.adopt(snapshot)
            if work.scores is None:
                job = session.submit(self._scheduler, work.run, work.take, work.marks)
            else:
                job = session.submit_all(self._scheduler, work.run, work.take, work.scores.take)
            work.started(session, job)
        except Exception as error:
            if work.job is not None:
                self._scheduler.cancel(work.job)
            self._finish(work, _typed(error))
        if work.cancelled and work.job is not None:  # while it was started
            self._scheduler.cancel(work.job)
        return True

    def _tell_progress(self, work: Work) -> None:
        try:
            work.tell_progress()
        except Exception as error:
            assert work.job is not None
            self._scheduler.cancel(work.job)
            self._finish(work, _typed(error))

    def _finish(self, work: Work, error: MoefluxError | None = None) -> None:
        """It ran, and is over."""
        self._running.remove(work)
        assert work.session is not None
        self._use += work.use
        try:
            self._pool.give_back(work.session, keep=work.scores is None)
        except Exception:
            log.exception("the state of a conversation could not be kept")
        job = work.job
        if error is None and job is not None and job.error is not None and not job.cancelled:
            error = _typed(job.error)
            log.warning("a request failed", exc_info=error)
        if work.marked is not None and error is None and work.ids:
            answer = self._text.chat.rendered(work.ids)
            self._transcripts.remember(work.marked + answer, [*work.run[: work.writer.usage.prompt], *work.ids])
            self._transcripts.remember_calls(work.calls)
        if error is None and self._closing is not None and not work.cancelled and work.writer.reason is None:
            error = ClosedError("the worker was closed")
        if error is not None:
            _forget_frames(error)
        work.end(error)
        work.let_go()

    def _end_waiting(self, error: MoefluxError) -> None:
        for work in (*self._waiting, *self._loading):
            self._leave(work)
            work.end(error)

    def _end_all(self, error: MoefluxError) -> None:
        self._end_waiting(error)
        for work in list(self._running):
            if work.job is not None:
                self._scheduler.cancel(work.job)
            self._finish(work, error)
        self._finish_unwanted(all_of_them=True)
        self._pool.clear()


def _typed(error: BaseException) -> MoefluxError:
    """Callers get errors of ours only; what else happened is a mistake of this program, and logged as one."""
    if isinstance(error, MoefluxError):
        return error
    log.error("a request failed in a way that it should not", exc_info=error)
    return InternalError(f"{type(error).__name__}: {error}")


def _forget_frames(error: BaseException | None) -> None:
    """An error lives as long as its caller likes, and the frames that it went through hold the states of sequences."""
    if error is not None:
        error.__traceback__ = None
        _forget_frames(error.__cause__)
        if error.__context__ is not error.__cause__:
            _forget_frames(error.__context__)
