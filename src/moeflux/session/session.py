"""One conversation with a model: a sequence that is brought to any tokens with as little work as can be had exactly.

`sync` starts from the longest beginning whose state is known: of the sequence itself, of its checkpoints, of the prefix
store in memory or on disk. States are kept at anchors, so that a later text that shares only a part starts there and not at
zero. With a store they are kept in it, under its one budget; without, as checkpoints of the sequence.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace

import numpy as np
import numpy.typing as npt

from moeflux.core.errors import BudgetError, CancelledError
from moeflux.runtime.batch import Segment, check_tokens
from moeflux.runtime.cancel import CancelFlag
from moeflux.runtime.engine import Engine
from moeflux.runtime.job import Job, Rows, Take
from moeflux.runtime.prefill import OnPrefill
from moeflux.runtime.scheduler import Scheduler
from moeflux.runtime.snapshot import common_length
from moeflux.session.prefixes import PrefixStore

F32 = npt.NDArray[np.float32]

ANCHOR_EVERY = 1024  # tokens between anchors that nobody asked for, where a state cannot be cut
LAST_BOUNDARIES = 2  # of messages, that are anchors besides the first: what changes next is at the end


@dataclass(frozen=True)
class PrefixUse:
    """Of one text: tokens whose state was there, tokens that were run, and how many of these can be read next time."""

    read: int
    created: int
    computed: int


@dataclass(frozen=True)
class Marks:
    """Positions of a text. `breakpoints`: where its caller wants to start again, and for how many seconds at least each is
    to be kept. `boundaries`: where messages end. `keep_s`: as for a breakpoint at the end."""

    breakpoints: Mapping[int, float] = field(default_factory=dict)
    boundaries: tuple[int, ...] = ()
    keep_s: float = 0.0

    def keep_seconds(self, position: int) -> float:
        """For a state there."""
        return self.breakpoints.get(position, self.keep_s)

    @property
    def most_seconds(self) -> float:
        """For a state that serves every breakpoint."""
        return max((*self.breakpoints.values(), self.keep_s))


NO_MARKS = Marks()


class Session:
    def __init__(self, engine: Engine, prefixes: PrefixStore | None = None, anchor_every: int | None = ANCHOR_EVERY) -> None:
        self._engine, self._prefixes, self._every = engine, prefixes, anchor_every
        self.sequence = engine.sequence()
        self.logits: F32 | None = None  # [vocab], after the last token
        self._marks = NO_MARKS
        self._read = self._kept = self._end = 0  # of the latest text: where it started, what can be read next time, its end

    def sync(
        self,
        tokens: Sequence[int],
        breakpoints: Iterable[int] = (),
        boundaries: Iterable[int] = (),
        cancelled: CancelFlag | None = None,
        progress: OnPrefill | None = None,
    ) -> PrefixUse:
        """Bring the sequence to exactly these tokens; at least the last one is run, and its logits are in `logits`.

        `breakpoints`: positions where the caller wants to be able to start again. `boundaries`: where messages end; the
        first and the last ones are used. `cancelled` is heard between layers: CancelledError, and whole chunks stay.
        """
        tokens = list(tokens)
        anchors = self._begin(tokens, Marks(dict.fromkeys(breakpoints, 0.0), tuple(boundaries)))
        start = self._read
        for stop in sorted({*anchors, len(tokens)}):
            self._run(tokens, stop, cancelled, _shifted(progress, len(self.sequence) - start, len(tokens) - start))
            if stop in anchors:
                self._reach(stop)
        return self.use

    def submit(self, scheduler: Scheduler, tokens: Sequence[int], take: Take, marks: Marks = NO_MARKS) -> Job:
        """As `sync`, but run by the scheduler beside other sequences, and then on as `take` says. Called by its thread."""
        scheduler.check_free(self.sequence)
        tokens = list(tokens)
        anchors = self._begin(tokens, marks)
        return scheduler.submit(self.sequence, tokens[self._read :], take, sorted(anchors), self._reach)

    def submit_all(self, scheduler: Scheduler, tokens: Sequence[int], take: Take, rows: Rows) -> Job:
        """Every token is run, whatever is known, and none is kept on the way: `rows` is handed the logits after each."""
        scheduler.check_free(self.sequence)
        self.clear()
        self._engine.check_room(len(tokens))
        self._read = self._kept = 0
        self._end = len(tokens)
        return scheduler.submit(self.sequence, tokens, take, rows=rows)

    @property
    def use(self) -> PrefixUse:
        """Of the latest text. What was kept grows while it is run."""
        return PrefixUse(self._read, self._kept - self._read, self._end - self._read)

    def advance(self, token: int) -> F32:
        """One more token; the logits after it."""
        (logits,) = self._engine.forward(Segment(self.sequence, [token]))
        assert logits is not None
        self.logits = logits[0]
        return self.logits

    def anchor(self, keep_s: float | None = None) -> bool:
        """Keep the state as it is now: at the end of a generation, so that the next turn starts there. False: no room.

        `keep_s`: for so many seconds at least, if there is room; None: as the latest text's marks say.
        """
        try:
            if self._prefixes is not None:
                return self._prefixes.put_sequence(self.sequence, self._marks.most_seconds if keep_s is None else keep_s)
            self.sequence.checkpoint()
        except BudgetError:
            return False
        return True

    def clear(self) -> None:
        """Forget the conversation; what the prefix store has stays there."""
        self.sequence.clear()
        self.logits = None

    def _begin(self, tokens: list[int], marks: Marks) -> set[int]:
        """Puts the sequence where it can go on from. Returns where states are to be kept on the way to these tokens."""
        check_tokens(tokens, self._engine.spec.vocab)
        self._engine.check_room(len(tokens))
        self.logits = None
        self._read = self._kept = self._start(tokens)
        self._end, self._marks = len(tokens), marks
        if self._prefixes is not None:
            for position, seconds in marks.breakpoints.items():
                self._prefixes.keep(tokens[:position], seconds)
        return self._anchors(self._read, len(tokens), marks)

    def _reach(self, position: int) -> None:
        if self.anchor(None if self.sequence.cuttable else self._marks.keep_seconds(position)):
            self._kept = position

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

    def _anchors(self, start: int, end: int, marks: Marks) -> set[int]:
        """Where to keep the state. One that can be cut is kept once, at the end: it serves every shorter text too."""
        wanted = {position for position in marks.breakpoints if start < position <= end}
        if self.sequence.cuttable:
            return {end}
        places = sorted({position for position in marks.boundaries if 0 < position <= end})
        wanted |= {*places[:1], *places[-LAST_BOUNDARIES:]}
        if self._every:
            wanted |= set(range(-(-(start + 1) // self._every) * self._every, end + 1, self._every))
        return {position for position in wanted if start < position}

    def _run(self, tokens: list[int], stop: int, cancelled: CancelFlag | None, progress: OnPrefill | None) -> None:
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
