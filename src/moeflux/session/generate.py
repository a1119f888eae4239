"""Tokens from a prompt, one at a time: run, constrain, sample, turn into text, until something ends it."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

from moeflux.core.errors import CancelledError, InputError
from moeflux.runtime.batch import check_tokens
from moeflux.runtime.engine import Engine
from moeflux.runtime.prefill import OnPrefill
from moeflux.sampling.choose import F32
from moeflux.sampling.constraint import Grammar
from moeflux.sampling.params import SamplingParams
from moeflux.sampling.sampler import Choice, Sampler
from moeflux.session.events import Finish, Reason, Timings, Token, Usage
from moeflux.session.model_text import ModelText
from moeflux.session.session import Session
from moeflux.store.stats import StoreStats
from moeflux.text.regions import Part, Splitter
from moeflux.text.stream import TextStream


@dataclass(frozen=True)
class Request:
    """What to generate. `max_tokens` None: until the context is full."""

    ids: Sequence[int]
    sampling: SamplingParams
    max_tokens: int | None = None
    stops: tuple[str, ...] = ()
    grammar: Grammar | None = None  # holds from the end of reasoning on
    splitter: Splitter | None = None  # None: everything is text
    boundaries: tuple[int, ...] = ()  # positions of the prompt where a later one may go another way


class Generation(Iterator[Token]):
    """Iterate for tokens; then `finish` says how it ended. Arguments are checked at once, work starts with the first token.

    Text that was held back when the model ended comes with the ending token; without such text, that one does not come.
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
        _check(engine, request)
        self._session = Session(engine, anchor_every=None) if session is None else session
        self._engine, self._request, self._progress = engine, request, progress
        self._ends = text.ends
        self._usage = Usage(len(request.ids), 0, 0, 0, 0)
        self._sampler = Sampler(request.sampling, text.n_ids, request.ids)
        self._stream = TextStream(text.tokenizer, request.stops, request.splitter) if text.has_tokenizer else None
        self._constraint = text.vocabulary.constrain(request.grammar) if request.grammar else None
        if request.stops and self._stream is None:
            text.tokenizer  # noqa: B018 (says that there is none)
        self._cancelled = False
        self._start = self._prefilled = self._first = 0.0
        self._steps = self._run()
        self.finish: Finish | None = None

    def __next__(self) -> Token:
        return next(self._steps)

    def cancel(self) -> None:
        """From any thread: ends after the step that is being computed, or between two chunks of the prompt."""
        self._cancelled = True

    def _run(self) -> Iterator[Token]:
        self._start, before = time.perf_counter(), self._engine.stats()
        pending = list(self._request.ids)
        reason: Reason | None = None
        if self._active:
            self._hide_markers()
        while reason is None:
            forced = self._forced(len(pending))
            choices = [Choice(token) for token in forced]
            if not forced:
                try:
                    choices, pending = [self._sample(self._advance(pending))], []
                except CancelledError:
                    reason = "cancelled"
                    break
                if choices[0].token in self._ends:
                    reason = "end"
                    if parts := self._finish_stream():
                        yield Token(choices[0].token, parts)
                    break
            for choice in choices:
                pending.append(choice.token)
                made, reason = self._made(choice, bool(forced))
                yield made
                if reason:
                    break
        self.finish = self._finished(reason, before)

    def _advance(self, pending: list[int]) -> F32:
        session = self._session
        if self._prefilled:
            return self._engine.prefill(session.sequence, pending, None, self._is_cancelled)
        used = session.sync(
            pending, boundaries=self._request.boundaries, cancelled=self._is_cancelled, progress=self._progress
        )
        assert session.logits is not None
        self._usage = replace(self._usage, cached=min(used.read, self._usage.prompt))
        self._prefilled = self._elapsed()
        return session.logits

    def _is_cancelled(self) -> bool:
        return self._cancelled

    def _sample(self, logits: F32) -> Choice:
        return self._sampler.sample(logits, self._constraint.allowed() if self._constraint and self._active else None)

    @property
    def _active(self) -> bool:
        """Whether the constraint holds now."""
        return self._constraint is not None and not (self._stream and self._stream.reasoning)

    def _hide_markers(self) -> None:
        """In constrained output nothing is a marker."""
        if self._request.splitter:
            self._request.splitter.turn_off()

    def _forced(self, n_pending: int) -> list[int]:
        """Tokens that need no step; as many as there is room for."""
        if self._constraint is None or not self._active:
            return []
        held = len(self._session.sequence) if self._prefilled else 0
        room = self._engine.plan.context - held - n_pending
        tokens = self._constraint.forced()[: max(0, room)]
        self._sampler.note(tokens)
        return tokens

    def _made(self, choice: Choice, forced: bool) -> tuple[Token, Reason | None]:
        """Everything that follows from a token, and why it was the last, if it was."""
        was_active, reasoning = self._active, bool(self._stream and self._stream.reasoning)
        parts = self._stream.add(choice.token) if self._stream else ()
        if self._constraint and was_active:
            self._constraint.advance([choice.token])
        elif self._active:
            self._hide_markers()
        u = self._usage
        self._usage = replace(u, completion=u.completion + 1, reasoning=u.reasoning + reasoning, forced=u.forced + forced)
        self._first = self._first or self._elapsed()
        reason = self._reason()
        if reason:
            parts += self._finish_stream()
        return Token(choice.token, parts, choice.logprob, choice.top, forced), reason

    def _finished(self, reason: Reason, before: StoreStats) -> Finish:
        now = self._elapsed()
        timings = Timings(self._prefilled or now, self._first or now, now)
        seed = None if self._request.sampling.greedy else self._sampler.seed
        store = self._engine.stats().since(before)
        return Finish(reason, self._usage, timings, store, seed, self._stopped_by, self._finish_stream())

    def _elapsed(self) -> float:
        return time.perf_counter() - self._start

    def _reason(self) -> Reason | None:
        if self._stopped_by is not None:
            return "stop_sequence"
        if self._constraint and self._active and self._constraint.finished:
            return "complete"
        n = self._usage.prompt + self._usage.completion
        if self._usage.completion == self._request.max_tokens or n > self._engine.plan.context:
            return "length"
        return "cancelled" if self._cancelled else None

    @property
    def _stopped_by(self) -> str | None:
        return self._stream.stopped_by if self._stream else None

    def _finish_stream(self) -> tuple[Part, ...]:
        return self._stream.finish() if self._stream else ()


def generate(
    engine: Engine,
    text: ModelText,
    prompt: str | Sequence[int],
    *,
    max_tokens: int | None = None,
    stop: Sequence[str] = (),
    grammar: Grammar | None = None,
    progress: OnPrefill | None = None,
    **sampling: Any,
) -> Generation:
    """Continue a text or token ids. `sampling`: changes to the checkpoint's own way (temperature, top_k, seed, …)."""
    ids = text.tokenizer.encode(prompt) if isinstance(prompt, str) else list(prompt)
    request = Request(ids, text.sampling(**sampling), max_tokens, tuple(stop), grammar)
    return Generation(engine, text, request, progress=progress)


def _check(engine: Engine, request: Request) -> None:
    n = request.max_tokens
    if n is not None and (isinstance(n, bool) or not isinstance(n, int) or n < 1):
        raise InputError(f"max_tokens is {n!r}, not a positive whole number")
    check_tokens(request.ids, engine.spec.vocab)
    if len(request.ids) > engine.plan.context:
        raise InputError(
            f"a prompt of {len(request.ids)} tokens, but the memory of this engine is planned for {engine.plan.context}",
            where="option 'context'",
            hint=f"load the model with context={len(request.ids)} or more",
        )
