"""One generation, driven inline: a writer is pulled token by token through an engine."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Iterator, Sequence
from typing import Any

from moeflux.core.errors import CancelledError, StateError
from moeflux.runtime.batch import Segment, check_tokens
from moeflux.runtime.cancel import CancelFlag
from moeflux.runtime.engine import Engine
from moeflux.runtime.good_state import GoodState
from moeflux.runtime.prefill import OnPrefill
from moeflux.sampling.choose import F32
from moeflux.sampling.constraint import Grammar
from moeflux.session.events import Finish, Timings, Token
from moeflux.session.model_text import ModelText
from moeflux.session.session import Session
from moeflux.session.writer import Request, Writer
from moeflux.store.stats import ExpertUse
from moeflux.text.stops import read_stops


class Generation(Iterator[Token]):
    """Iterate for tokens; then `finish` says how it ended. Arguments are checked at once, work starts with the first token.

    The end token is given only if it releases buffered text.
    """

    def __init__(
        self,
        engine: Engine,
        text: ModelText,
        request: Request,
        session: Session | None = None,
        progress: OnPrefill | None = None,
    ) -> None:
        """`session`: what it already holds of the prompt is not run again; it will hold all but the last token."""
        check_tokens(request.ids, engine.spec.vocab)
        self._writer = Writer(text, request, engine.plan.context)
        self._session = Session(engine, anchor_every=None) if session is None else session
        self._good = GoodState(self._session.sequence)
        self._engine, self._request, self._progress = engine, request, progress
        self._cancelled = CancelFlag()
        self._clock = Clock()
        self._steps = self._run()
        self.finish: Finish | None = None

    def __next__(self) -> Token:
        return next(self._steps)

    def cancel(self) -> None:
        """From any thread: ends with the layer of the prompt, or after the step, that is being computed."""
        self._cancelled.set()

    def _run(self) -> Iterator[Token]:
        self._clock.start()
        before = self._session.sequence.use
        turn, events = self._writer.begin(), deque[Token]()
        while True:
            events.extend(turn.events)
            while events:
                self._clock.token()
                yield events.popleft()
            if self._cancelled.is_set:
                self._writer.cancel()
            if self._writer.reason is not None:
                break
            try:
                logits = self._advance(turn.run)
            except CancelledError:
                self._writer.cancel()
                break
            turn = self._writer.take(logits)
        self.finish = finished(self._writer, self._clock, self._session.sequence.use - before)

    def _advance(self, run: tuple[int, ...]) -> F32:
        """Logits after these tokens: the prompt at first, then what the writer chose."""
        if self._clock.prefilled:
            return self._decode(run)
        session, request = self._session, self._request
        used = session.sync(run, boundaries=request.boundaries, cancelled=self._cancelled, progress=self._progress)
        assert session.logits is not None
        self._writer.read(used.read)
        self._clock.prefill()
        self._length = len(session.sequence)
        return session.logits

    def _decode(self, run: tuple[int, ...]) -> F32:
        sequence = self._session.sequence
        if len(sequence) != self._length or not sequence.usable:
            raise StateError("the session was used by somebody else in the middle of this generation")
        self._good.keep(prompt=False)
        try:
            (logits,) = self._engine.forward(Segment(sequence, run, kind="decode"))
        except BaseException:
            if not sequence.usable:
                self._good.go_back()
            raise
        assert logits is not None
        self._length = len(sequence)
        row: F32 = logits[0]
        return row


class Clock:
    """Seconds from the start to the end of the prompt, to the first token, and so far."""

    def __init__(self) -> None:
        self._start = self.prefilled = self.first = 0.0

    def start(self) -> None:
        self._start = time.perf_counter()

    def prefill(self) -> None:
        self.prefilled = self.prefilled or self.elapsed

    def token(self) -> None:
        self.first = self.first or self.elapsed

    @property
    def elapsed(self) -> float:
        return time.perf_counter() - self._start

    @property
    def timings(self) -> Timings:
        now = self.elapsed
        return Timings(self.prefilled or now, self.first or now, now)


def finished(writer: Writer, clock: Clock, use: ExpertUse) -> Finish:
    assert writer.reason is not None
    parts = writer.rest()
    return Finish(writer.reason, writer.usage, clock.timings, use, writer.seed, writer.stop_sequence, parts)


def generate(
    engine: Engine,
    text: ModelText,
    prompt: str | Sequence[int],
    *,
    max_tokens: int | None = None,
    stop: str | Sequence[str] = (),
    grammar: Grammar | None = None,
    progress: OnPrefill | None = None,
    **sampling: Any,
) -> Generation:
    """Continue a text or token ids. `sampling`: changes to the checkpoint's own way (temperature, top_k, seed, …)."""
    ids = text.tokenizer.encode(prompt) if isinstance(prompt, str) else list(prompt)
    request = Request(ids, text.sampling(**sampling), max_tokens, read_stops(stop), grammar)
    return Generation(engine, text, request, progress=progress)
