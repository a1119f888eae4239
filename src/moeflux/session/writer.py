"""One generation as a state machine: logits in, tokens to run next and events out.

A writer holds no engine, no sequence and no thread. `generate` drives one inline, the worker drives many through the
scheduler, and a step that has to be run again never shows: a writer only moves when it is given logits.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from moeflux.core.errors import ContextError, InputError, StateError
from moeflux.sampling.choose import F32
from moeflux.sampling.constraint import Grammar
from moeflux.sampling.params import SamplingParams
from moeflux.sampling.sampler import Choice, Sampler
from moeflux.session.events import Reason, Token, Usage
from moeflux.session.model_text import ModelText
from moeflux.session.rules import Rules, RuleSet
from moeflux.text.regions import Part, Splitter
from moeflux.text.stream import TextStream
from moeflux.text.tools import CallEnd


@dataclass(frozen=True)
class Request:
    """What to generate. `max_tokens` None: until the context is full; 0: the prompt is run, and nothing is said."""

    ids: Sequence[int]
    sampling: SamplingParams
    max_tokens: int | None = None
    stops: tuple[str, ...] = ()
    grammar: Grammar | None = None  # holds from the end of reasoning on
    splitter: Splitter | None = None  # None: everything is text
    boundaries: tuple[int, ...] = ()  # positions of the prompt where a later one may go another way
    rules: RuleSet | None = None  # in place of a grammar alone: thoughts and calls have theirs


@dataclass(frozen=True)
class Turn:
    """What follows from logits: tokens to run for the next ones (none: it is over), and what became known."""

    run: tuple[int, ...]
    events: tuple[Token, ...]


@dataclass
class _Tally:
    """What one turn has gathered."""

    run: list[int] = field(default_factory=list)
    events: list[Token] = field(default_factory=list)

    def turn(self, over: bool) -> Turn:
        return Turn(() if over else tuple(self.run), tuple(self.events))


class Writer:
    """`reason` says why it ended, once it has. Held-back text that the end releases comes with the last token.

    `context`: tokens that the sequence may have; the last token of an answer need not be run, so it does not count.
    """

    def __init__(self, text: ModelText, request: Request, context: int) -> None:
        _check(request, context)
        self._request, self._context, self._ends = request, context, text.ends
        self._stream = TextStream(text.tokenizer, request.stops, request.splitter) if text.has_tokenizer else None
        if request.stops and self._stream is None:
            text.tokenizer  # noqa: B018 (says that there is none)
        self._sampler = Sampler(request.sampling, text.n_ids, request.ids)
        rules = RuleSet(request.grammar) if request.rules is None else request.rules
        grammars = rules.grammar is not None or rules.calls is not None
        self._one_call = rules.one_call
        self._rules = Rules(rules, text.vocabulary if grammars else None, self._stream)
        self._begun = False
        self.usage = Usage(len(request.ids), 0, 0, 0, 0)
        self.reason: Reason | None = None

    @property
    def seed(self) -> int | None:
        """That reproduces it; None where nothing is drawn."""
        return None if self._request.sampling.greedy else self._sampler.seed

    @property
    def stop_sequence(self) -> str | None:
        return self._stream.stopped_by if self._stream else None

    @property
    def n_tokens(self) -> int:
        """Of prompt and answer so far."""
        return self.usage.prompt + self.usage.completion

    def begin(self) -> Turn:
        """Before any logits: the prompt, and what the constraint forces behind it."""
        if self._begun:
            raise StateError("the generation has begun already")
        self._begun = True
        tally = _Tally(list(self._request.ids))
        self._hide_markers()
        self._force(tally)
        return tally.turn(self.reason is not None)

    def take(self, logits: F32) -> Turn:
        """Logits [vocab] after the last token that was to be run."""
        if self.reason is not None:
            raise StateError(f"the generation has ended already ({self.reason})")
        tally = _Tally()
        if self._request.max_tokens == 0:  # the prompt was to be run, nothing else
            self.reason = "length"
            return tally.turn(True)
        choice = self._sampler.sample(logits, self._rules.allowed())
        if choice.token in self._ends:
            if parts := self.rest():
                tally.events.append(Token(choice.token, parts))
            self.reason = "end" if self.stop_sequence is None else "stop_sequence"
        else:
            self._add(tally, choice, forced=False)
            self._force(tally)
        return tally.turn(self.reason is not None)

    def cancel(self) -> None:
        """It is over now, unless it was before."""
        self.reason = self.reason or "cancelled"

    def read(self, n_cached: int) -> None:
        """So many tokens of the prompt were not run, because their state was known."""
        self.usage = replace(self.usage, cached=min(n_cached, self.usage.prompt))

    def kept(self, n_tokens: int) -> None:
        """So many tokens of the prompt were run, and their state is kept."""
        self.usage = replace(self.usage, kept=max(0, min(n_tokens, self.usage.prompt - self.usage.cached)))

    def rest(self) -> tuple[Part, ...]:
        """What was held back. Once, at the end."""
        return self._stream.finish() if self._stream else ()

    def _hide_markers(self) -> None:
        if self._request.splitter and self._rules.hides_markers:
            self._request.splitter.turn_off()

    def _force(self, tally: _Tally) -> None:
        """Tokens that need no step, as many as there is room for."""
        while self.reason is None and self._request.max_tokens != 0 and (tokens := self._rules.forced()):
            tokens = tokens[: max(0, self._context - self.n_tokens)]
            self._sampler.note(tokens)
            for token in tokens:
                self._add(tally, Choice(token), forced=True)
                if self.reason is not None:
                    return
            if not tokens:
                return

    def _add(self, tally: _Tally, choice: Choice, forced: bool) -> None:
        """Everything that follows from a token."""
        reasoning = bool(self._stream and self._stream.reasoning)
        parts = self._stream.add(choice.token) if self._stream else ()
        self._rules.took(choice.token, reasoning)
        self._hide_markers()
        u = self.usage
        self.usage = replace(u, completion=u.completion + 1, reasoning=u.reasoning + reasoning, forced=u.forced + forced)
        self.reason = self._why_over(parts)
        if self.reason:
            parts += self.rest()
        tally.run.append(choice.token)
        tally.events.append(Token(choice.token, parts, choice.logprob, choice.top, forced, reasoning))

    def _why_over(self, parts: tuple[Part, ...]) -> Reason | None:
        if self.stop_sequence is not None:
            return "stop_sequence"
        if self._rules.finished or (self._one_call and any(isinstance(part, CallEnd) for part in parts)):
            return "complete"
        if self.usage.completion == self._request.max_tokens:
            return "length"
        return "context" if self.n_tokens > self._context else None


def _check(request: Request, context: int) -> None:
    n = request.max_tokens
    if n is not None and (isinstance(n, bool) or not isinstance(n, int) or n < 0):
        raise InputError(f"max_tokens is {n!r}, not a whole number from 0 on", where="option 'max_tokens'")
    if len(request.ids) > context:
        raise ContextError(len(request.ids), context)
