"""The model behind the server: opened in a thread of its own, asked through its worker, closed without losing a state."""

from __future__ import annotations

import asyncio
import hashlib
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, replace
from threading import Lock
from typing import Literal, TypeVar

from moeflux.core.errors import CancelledError, ClosedError, InternalError, MoefluxError
from moeflux.core.log import log
from moeflux.runtime.engine import Engine
from moeflux.serve.answering import Answering
from moeflux.serve.asks import Ask
from moeflux.serve.errors import refuse
from moeflux.serve.metrics import Metrics
from moeflux.serve.settings import Settings
from moeflux.serve.track import RequestTrack
from moeflux.session.model_text import ModelText
from moeflux.session.prefixes import PrefixStore
from moeflux.session.work import AnyPrompt
from moeflux.session.worker import Worker, WorkerOptions

State = Literal["loading", "ready", "draining", "closed", "failed"]
Progress = Callable[[int, int], None]  # bytes read, of so many
OpenModel = Callable[[Progress], tuple[Engine, ModelText]]

A = TypeVar("A")
R = TypeVar("R")

PREPARING_THREADS = 2  # that render, encode and compile
WAIT_GUESS_S = 5.0  # of a request, before any has ended
MOST_RETRY_S = 120  # clients do not come back where they are told to wait longer


@dataclass(frozen=True)
class Model:
    """What there is once loading is over."""

    engine: Engine
    text: ModelText
    worker: Worker
    prefixes: PrefixStore | None


class Service:
    """`load` and `close` block, and run in threads. All else is for the loop."""

    def __init__(self, settings: Settings, open_model: OpenModel) -> None:
        self.settings, self._open_model = settings, open_model
        self.state: State = "loading"
        self.error: MoefluxError | None = None
        self.started = time.time()
        self._model: Model | None = None
        self._model_closed = False
        self._threads = ThreadPoolExecutor(PREPARING_THREADS, "moeflux-prepare")
        self._closing = Lock()
        self._request_s = WAIT_GUESS_S  # that a request took, lately
        self._active: set[Answering] = set()
        self._fingerprint = ""
        self.progress = 0.0  # of loading
        self.metrics = Metrics(self)

    def load(self) -> None:
        try:
            engine, text = self._open_model(self._note_progress)
            folder = self.settings.prefix_folder
            keeps = engine.config.prefix_bytes > 0
            prefixes = PrefixStore(engine, folder=folder) if keeps else None
            with suppress(MoefluxError):  # what a model lacks is said to whoever asks for it
                _ = text.chat
            with suppress(MoefluxError):
                _ = text.vocabulary
            options = WorkerOptions(self.settings.parallel, self.settings.max_queue)
            self._fingerprint = _fingerprint(engine)
            self._model = Model(engine, text, Worker(engine, text, prefixes, options), prefixes)
        except Exception as error:
            if not isinstance(error, MoefluxError):
                log.exception("loading failed in a way that it should not")
                error = InternalError(f"{type(error).__name__}: {error}")
            if self.state == "loading":
                self.state, self.error = "failed", error
            raise error from None
        if self.state == "loading":
            self.state = "ready"

    @property
    def model(self) -> Model:
        if self._model is None or self.state != "ready":
            raise NotReadyError(f"the server is {self.state}")
        return self._model

    @property
    def fingerprint(self) -> str:
        """Of what an answer depends on besides its request."""
        return self._fingerprint

    @property
    def loaded(self) -> Model | None:
        """For figures: also while it drains."""
        return None if self._model_closed else self._model

    async def begin(self, asks: Sequence[Ask], request_id: str, client: str = "") -> Answering:
        """What was asked, with the first of it submitted. Raises typed errors; see `serve/errors`.

        Whoever begins it ends it: `end(answering)`, once nobody waits for it any more.
        """
        model = self.model
        asks = [self._bounded(ask, client) for ask in asks]
        track = RequestTrack(request_id, client, len(asks), self.metrics)
        answering = Answering(asks, track, model.worker.submit, self._threads, window=self.settings.parallel)
        await answering.begin()
        self._active.add(answering)
        return answering

    def end(self, answering: Answering) -> None:
        answering.cancel()
        if answering in self._active:
            self._active.remove(answering)
            self._note_seconds(time.perf_counter() - answering.track.answers[0].begun)

    @property
    def active(self) -> list[RequestTrack]:
        return [answering.track for answering in self._active]

    def check_model(self, name: str) -> None:
        """Any name will do, unless the server was told to be strict."""
        if self.settings.strict_model and name != self.settings.alias:
            raise refuse(f"there is no model {name!r} here", "model", kind="unknown", code="model_not_found")

    async def count_tokens(self, prompt: AnyPrompt) -> int:
        return len(await self.encode(prompt))

    async def encode(self, prompt: AnyPrompt) -> list[int]:
        """The tokens of a prompt, as a request would run them."""
        return await self.prepare(self.model.worker.encode, prompt)

    async def prepare(self, act: Callable[[A], R], given: A) -> R:
        """Work that needs no engine, in a thread, so that the loop goes on."""
        return await asyncio.get_running_loop().run_in_executor(self._threads, act, given)

    def _note_seconds(self, seconds: float) -> None:
        """A request has ended after so long."""
        self._request_s += 0.2 * (seconds - self._request_s)

    @property
    def retry_after_s(self) -> int:
        """When a client that finds the line full should come back: when about half of it is done."""
        waiting = self._model.worker.status.waiting if self._model else 1
        seconds = self._request_s * max(1, waiting) / (2 * self.settings.parallel)
        return int(min(MOST_RETRY_S, max(1, seconds)))

    def drain(self) -> None:
        """No request is taken any more. Those that run may finish within the time of the settings."""
        if self.state in ("loading", "ready"):
            self.state = "draining"

    def hurry(self) -> None:
        """Those that run end now."""
        for answering in tuple(self._active):
            answering.cancel()

    def close(self) -> None:
        """Waits for requests that run, then flushes states to disk. A second call waits for the first."""
        with self._closing:
            self.drain()
            if self._model is not None and not self._model_closed:
                self._model_closed = True
                self._close_model(self._model)
            self._threads.shutdown(wait=False)
            self.state = "failed" if self.state == "failed" else "closed"

    def _close_model(self, model: Model) -> None:
        model.worker.close(self.settings.drain)
        if model.prefixes is not None:
            try:
                model.prefixes.flush()
            except MoefluxError:
                log.exception("states could not be flushed")
            model.prefixes.close()
        model.engine.close()

    def _note_progress(self, done: int, total: int) -> None:
        self.progress = done / total if total else 1.0
        if self.state != "loading":
            raise CancelledError("the server was stopped while it loaded")

    def _bounded(self, ask: Ask, client: str) -> Ask:
        """Within what the server allows an answer: more is cut, never refused, because agents always ask for much."""
        options, most = ask.options, self.settings.max_tokens
        if most is not None and (options.max_tokens is None or options.max_tokens > most):
            options = replace(options, max_tokens=most)
        if options.deadline_s is None:
            options = replace(options, deadline_s=self.settings.deadline)
        return replace(ask, options=replace(options, client=client))


def _fingerprint(engine: Engine) -> str:
    try:
        known = repr(engine.identity)
    except MoefluxError:  # of a backend whose states have no files
        known = f"{engine.config.model.name}|{engine.config.resolved_backend}"
    return "fp_" + hashlib.sha256(known.encode()).hexdigest()[:12]


class NotReadyError(ClosedError):
    """The model is still being loaded, or the server is going down."""

    fault = "overload"
