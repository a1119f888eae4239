"""What one `forward` runs: segments of new tokens, each for a sequence of its own."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from collections.abc import Sequence as Seq
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Literal, get_args

import numpy as np
import numpy.typing as npt

from moeflux.backends.ops import Span
from moeflux.backends.state import LayerState
from moeflux.core.errors import InputError, StateError
from moeflux.plan.text_size import turn_rows
from moeflux.runtime.sequence import Sequence
from moeflux.runtime.trace import Trace

F32 = npt.NDArray[np.float32]
Wanted = Literal["last", "all", "none"]
Kind = Literal["decode", "prompt"]


@dataclass(frozen=True)
class Segment:
    """New tokens of one sequence, which logits are wanted, and where to record what happens to them.

    `kind` says how experts are kept and changes no result: "decode" where the next step will go on from here, so that its
    experts are worth keeping; "prompt" where many tokens pass by. Where it is not said, one token decodes.
    `take(first, rows)`: is handed all logits, a few rows at a time, and `forward` then returns none. A whole prompt's
    would be as large as its tokens times the vocabulary.
    """

    sequence: Sequence
    tokens: Seq[int]
    logits: Wanted = "last"
    trace: Trace | None = None
    kind: Kind | None = None
    take: Callable[[int, F32], None] | None = None

    @property
    def returned(self) -> Wanted:
        """Which logits `forward` returns."""
        return "none" if self.take else self.logits

    @property
    def n_returned(self) -> int:
        """Rows of logits that `forward` returns."""
        return {"all": len(self.tokens), "last": 1, "none": 0}[self.returned]

    @property
    def decodes(self) -> bool:
        return len(self.tokens) == 1 if self.kind is None else self.kind == "decode"


@dataclass(frozen=True)
class Batch:
    segments: tuple[Segment, ...]
    starts: tuple[int, ...] = field(init=False)

    def __post_init__(self) -> None:
        starts, at = [], 0
        for segment in self.segments:
            starts.append(at)
            at += len(segment.tokens)
        object.__setattr__(self, "starts", tuple(starts))

    def check(self, vocab: int) -> None:
        if not self.segments:
            raise InputError("the batch is empty")
        if len({id(segment.sequence) for segment in self.segments}) != len(self.segments):
            raise StateError("a sequence stands twice in one batch")
        for segment in self.segments:
            if segment.kind not in (None, *get_args(Kind)):
                hint = f"one of {', '.join(get_args(Kind))}"
                raise InputError(f"unknown kind {segment.kind!r}", where="segment", hint=hint)
            segment.sequence.check_usable()
            check_tokens(segment.tokens, vocab)

    def tokens(self) -> list[int]:
        return [int(token) for segment in self.segments for token in segment.tokens]

    def decodes(self) -> list[bool]:
        """By token."""
        return [segment.decodes for segment in self.segments for _ in segment.tokens]

    def spans(self, layer: int) -> list[Span]:
        return [
            Span(start, start + len(s.tokens), len(s.sequence), s.sequence.states[layer], s.decodes)
            for s, start in zip(self.segments, self.starts, strict=True)
        ]

    def recorder(self, to_numpy: Callable[[Any], Any]) -> Callable[[int, str, Any], None] | None:
        """What traces are told: layer, name, rows of the batch. None where nothing is traced."""
        traced = [(s.trace, start, s) for s, start in zip(self.segments, self.starts, strict=True) if s.trace is not None]
        if not traced:
            return None

        def record(layer: int, name: str, rows: Any) -> None:
            for trace, start, segment in traced:
                if trace.wants(layer):
                    values = to_numpy(rows[start : start + len(segment.tokens)])
                    trace.record(layer, name, len(segment.sequence), values)

        return record

    def handed_rows(self, vocab: int) -> Iterator[tuple[slice, Callable[[F32], None]]]:
        """Rows whose logits are taken a few at a time, and who takes them."""
        step = turn_rows(vocab)
        for segment, start in zip(self.segments, self.starts, strict=True):
            if segment.take is not None:
                for at in range(0, len(segment.tokens), step):
                    stop = start + min(at + step, len(segment.tokens))
                    yield slice(start + at, stop), partial(segment.take, at)

    def states(self) -> list[tuple[LayerState, ...]]:
        """Of every segment's sequence."""
        return [segment.sequence.states for segment in self.segments]

    def wanted_rows(self) -> list[int]:
        """Rows whose logits are wanted, segment by segment."""
        rows: list[int] = []
        for segment, start in zip(self.segments, self.starts, strict=True):
            stop = start + len(segment.tokens)
            first = {"all": start, "last": stop - 1, "none": stop}[segment.returned]
            rows += range(first, stop)
        return rows


def check_tokens(tokens: Seq[Any], vocab: int) -> None:
    if len(tokens) == 0:
        raise InputError("there are no tokens to run")
    for i, token in enumerate(tokens):
        if isinstance(token, bool) or not hasattr(token, "__index__"):
            raise InputError(f"token {i} is {token!r}, not a whole number")
        if not 0 <= token < vocab:
            raise InputError(f"token {i} is {token}, the vocabulary has {vocab} entries")
