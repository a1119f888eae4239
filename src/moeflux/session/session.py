"""One conversation with a model: a sequence that is brought to any tokens with as little work as can be had exactly.

`sync` starts from the longest beginning whose state is known: of the sequence itself, of its checkpoints, of the prefix
store in memory or on disk. States are kept at anchors, so that a later text that shares only a part starts there and not at
zero. With a store they are kept in it, under its one budget; without, as checkpoints of the sequence.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt

from moeflux.core.errors import BudgetError, CancelledError
from moeflux.runtime.batch import Segment, check_tokens
from moeflux.runtime.batching import Batcher, Next, Request
from moeflux.runtime.engine import Engine
from moeflux.runtime.prefill import Cancel, OnPrefill
from moeflux.runtime.snapshot import common_length
from moeflux.session.prefixes import PrefixStore

F32 = npt.NDArray[np.float32]

ANCHOR_EVERY = 1024  # tokens between anchors that nobody asked for, where a state cannot be cut
LAST_BOUNDARIES = 2  # of messages, that are anchors besides the first: what changes next is at the end


@dataclass(frozen=True)
class Usage:
    """Of one text: tokens whose state was there, tokens that were run, and how many of these can be read next time."""

    read: int
    created: int
    computed: int


class Session:
    def __init__(self, engine: Engine, prefixes: PrefixStore | None = None, anchor_every: int | None = ANCHOR_EVERY) -> None:
        self._engine, self._prefixes, self._every = engine, prefixes, anchor_every
        self.sequence = engine.sequence()
        self.logits: F32 | None = None  # [vocab], after the last token

    def sync(
        self,
        tokens: Sequence[int],
        breakpoints: Iterable[int] = (),
        boundaries: Iterable[int] = (),
        cancelled: Cancel | None = None,
        progress: OnPrefill | None = None,
    ) -> Usage:
        """Bring the sequence to exactly these tokens; at least the last one is run, and its logits are in `logits`.

        `breakpoints`: positions where the caller wants to be able to start again. `boundaries`: where messages end; the
        first and the last ones are used. `cancelled` is asked between chunks: CancelledError, and what was run stays.
        """
        tokens = list(tokens)
        start, anchors = self._begin(tokens, breakpoints, boundaries)
        kept = start
        for stop in sorted({*anchors, len(tokens)}):
            self._run(tokens, stop, cancelled, _shifted(progress, len(self.sequence) - start, len(tokens) - start))
            if stop in anchors and self.anchor():
                kept = stop
        return Usage(start, kept - start, len(tokens) - start)

    def request(
        self,
        batcher: Batcher,
        tokens: Sequence[int],
        choose: Next,
        breakpoints: Iterable[int] = (),
        boundaries: Iterable[int] = (),
    ) -> tuple[Request, Usage]:
        """As `sync`, but run by the batcher beside other sequences, and then on as `choose` says. Called by its thread."""
        tokens = list(tokens)
        start, anchors = self._begin(tokens, breakpoints, boundaries)
        request = batcher.submit(self.sequence, tokens[start:], choose, sorted(anchors), lambda _: self.anchor())
        return request, Usage(start, max(anchors, default=start) - start, len(tokens) - start)

    def advance(self, token: int) -> F32:
        """One more token; the logits after it."""
        (logits,) = self._engine.forward(Segment(self.sequence, [token]))
        assert logits is not None
        self.logits = logits[0]
        return self.logits

    def anchor(self) -> bool:
        """Keep the state as it is now: at the end of a generation, so that the next turn starts there. False: no room."""
        try:
            if self._prefixes is not None:
                return self._prefixes.put(self.sequence.snapshot())
            self.sequence.checkpoint()
        except BudgetError:
            return False
        return True

    def clear(self) -> None:
        """Forget the conversation; what the prefix store has stays there."""
        self.sequence.clear()
        self.logits = None

    def _begin(self, tokens: list[int], breakpoints: Iterable[int], boundaries: Iterable[int]) -> tuple[int, set[int]]:
        """Where the sequence stands now, and where states are to be kept on the way to these tokens."""
        check_tokens(tokens, self._engine.spec.vocab)
        self._engine.check_room(len(tokens))
        self.logits = None
        start = self._start(tokens)
        return start, self._anchors(start, len(tokens), breakpoints, boundaries)

    def _start(self, tokens: list[int]) -> int:
        """Put the sequence where it can go on from; says how many tokens that are."""
        most = len(tokens) - 1
        own = self.sequence.nearest(min(most, common_length(self.sequence.tokens, tokens)))
        for length, entry in self._prefixes.candidates(tokens, most) if self._prefixes else ():
            if length <= own:
                break
            snapshot = self._prefixes.take(entry, length) if self._prefixes else None
            if snapshot is not None:
                self.sequence.adopt(snapshot)
                return length
        self.sequence.restore(own)
        return own

    def _anchors(self, start: int, end: int, breakpoints: Iterable[int], boundaries: Iterable[int]) -> set[int]:
        """Where to keep the state. One that can be cut is kept once, at the end: it serves every shorter text too."""
        wanted = {position for position in breakpoints if start < position <= end}
        if self.sequence.cuttable:
            return {end}
        places = sorted({position for position in boundaries if 0 < position <= end})
        wanted |= {*places[:1], *places[-LAST_BOUNDARIES:]}
        if self._every:
            wanted |= set(range(-(-(start + 1) // self._every) * self._every, end + 1, self._every))
        return {position for position in wanted if start < position}

    def _run(self, tokens: list[int], stop: int, cancelled: Cancel | None, progress: OnPrefill | None) -> None:
        todo = tokens[len(self.sequence) : stop]
        try:
            logits = self._engine.prefill(self.sequence, todo, progress, cancelled)
        except CancelledError:
            raise CancelledError(f"cancelled after {len(self.sequence)} of {len(tokens)} tokens") from None
        self.logits = logits if stop == len(tokens) else None


def _shifted(progress: OnPrefill | None, done: int, total: int) -> OnPrefill | None:
    """For a part of the tokens that are to be run."""
    if progress is None:
        return None
    return lambda now: progress(replace(now, done=done + now.done, total=total))
