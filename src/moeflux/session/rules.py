"""What a model may write next: thoughts up to a budget, then what a grammar says, and calls by a grammar of their own.

Tokens that the rules leave no choice about are forced: they need no logits.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from moeflux.sampling.choose import Allowed
from moeflux.sampling.constraint import Constraint, Grammar

UNFINISHED = 8  # tokens that an unfinished character may still take beyond a budget


class Stream(Protocol):
    @property
    def reasoning(self) -> bool: ...

    @property
    def whole(self) -> bool: ...


class Constrains(Protocol):
    def constrain(self, grammar: Grammar) -> Constraint: ...


@dataclass(frozen=True)
class ThoughtRules:
    """`end`: what ends a thought that is cut, its marker and the gap behind it. `gap`: what stands behind a marker."""

    end: tuple[int, ...] = ()
    gap: tuple[int, ...] = ()
    opener: int | None = None  # a token with which an answer that must fit a grammar may begin, to think first
    budget: int | None = None  # tokens


@dataclass(frozen=True)
class CallRules:
    """A grammar that holds from the token that begins calls to their end."""

    opener: int
    grammar: Grammar


@dataclass(frozen=True)
class RuleSet:
    """`grammar` holds from the end of reasoning on; `with_calls`: what it describes are calls, so markers mean something."""

    grammar: Grammar | None = None
    with_calls: bool = False
    calls: CallRules | None = None
    one_call: bool = False  # it is over with the first
    thoughts: ThoughtRules = ThoughtRules()


class Rules:
    """How far one answer is along its rules. Told of each token, it says what may and what must come next."""

    def __init__(self, rules: RuleSet, vocabulary: Constrains | None, stream: Stream | None) -> None:
        """`vocabulary` is needed where there are grammars."""
        self._rules, self._vocabulary, self._stream = rules, vocabulary, stream
        self._main = self._constraint(rules.grammar)
        self._calls = None if rules.calls is None else self._constraint(rules.calls.grammar)  # refused now, not later
        self._call: Constraint | None = None  # the one that is being written
        self._must: list[int] = []  # around thoughts
        self._n_thought = 0
        self._first = self._fresh = True  # nothing came yet; nothing that the grammar describes

    @property
    def hides_markers(self) -> bool:
        """In constrained output nothing is a marker, unless it is made of calls."""
        return self._held and not self._rules.with_calls and not self._openers(self._reasoning)

    @property
    def finished(self) -> bool:
        return self._main is not None and self._held and self._main.finished

    def allowed(self) -> Allowed | None:
        """None: anything."""
        constraint = self._now(self._reasoning)
        if constraint is None:
            return None
        allowed = constraint.allowed()
        allowed[list(self._openers(self._reasoning))] = True
        return allowed

    def forced(self) -> list[int]:
        """What must come now. `took` is told of each."""
        if not self._must and self._spent:
            self._must = list(self._rules.thoughts.end)
        if self._must:
            return list(self._must)
        constraint = self._now(self._reasoning)
        return [] if constraint is None or self._openers(self._reasoning) else constraint.forced()

    def took(self, token: int, was_reasoning: bool) -> None:
        """A token came, and the stream has read it."""
        constraint, openers = self._now(was_reasoning), self._openers(was_reasoning)
        self._first = False
        self._n_thought += was_reasoning
        if self._must:
            del self._must[0]
        elif (
            self._rules.calls is not None and token == self._rules.calls.opener and (constraint is None or token in openers)
        ):
            self._main = None  # an answer that calls need not fit
            self._call, self._calls = self._calls, self._constraint(self._rules.calls.grammar)
        elif constraint is not None and token not in openers:
            self._fresh = False
            constraint.advance([token])
            if self._call is not None and self._call.finished:
                self._call = None
        elif was_reasoning and not self._reasoning and self._main is not None:
            self._must = list(self._rules.thoughts.gap)

    @property
    def _reasoning(self) -> bool:
        return self._stream is not None and self._stream.reasoning

    @property
    def _held(self) -> bool:
        """Whether a grammar for the whole answer holds now."""
        return self._main is not None and not self._reasoning and not self._must

    @property
    def _spent(self) -> bool:
        """Whether a thought has to end now: not within a character, but for a few tokens only."""
        budget = self._rules.thoughts.budget
        if budget is None or not self._reasoning or self._n_thought < budget:
            return False
        return self._stream is None or self._stream.whole or self._n_thought >= budget + UNFINISHED

    def _openers(self, reasoning: bool) -> tuple[int, ...]:
        """Tokens that may come in place of what the grammar describes: a thought before it, a call instead of it."""
        if self._main is None or not self._fresh or reasoning or self._must:
            return ()
        thought = self._rules.thoughts.opener if self._first else None
        call = None if self._rules.calls is None else self._rules.calls.opener
        return tuple(id for id in (thought, call) if id is not None)

    def _now(self, reasoning: bool) -> Constraint | None:
        """What holds for the next token."""
        return None if reasoning or self._must else self._call or self._main

    def _constraint(self, grammar: Grammar | None) -> Constraint | None:
        if grammar is None:
            return None
        assert self._vocabulary is not None
        return self._vocabulary.constrain(grammar)
