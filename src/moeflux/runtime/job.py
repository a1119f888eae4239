"""What the scheduler runs: jobs of sequences, their shares of a step, and the step that is running."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from collections.abc import Sequence as Seq
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from moeflux.runtime.batch import Kind, Segment
from moeflux.runtime.good_state import GoodState
from moeflux.runtime.sequence import Sequence

F32 = npt.NDArray[np.float32]
Take = Callable[[F32], Seq[int]]  # from logits [vocab]: the tokens to run next; none: it is over
Reached = Callable[[int], object]
Rows = Callable[[int, F32], None]  # a position, and the logits [rows, vocab] after the tokens from there on


@dataclass(eq=False)
class Job:
    """Tokens for a sequence, then those that `take` asks for, until it asks for none. Made by `Scheduler.submit`.

    `stops`: positions where no chunk goes across and `reached` is called, ascending. `rows` is handed the logits after
    every token of the prompt but the last one's; a step that is run again hands them again.
    """

    sequence: Sequence | None
    pending: list[int]
    take: Take
    good: GoodState | None
    stops: deque[int] = field(default_factory=deque)
    reached: Reached | None = None
    rows: Rows | None = None
    kind: Kind = "prompt"  # until its first logits
    logits: F32 | None = None  # that `take` has not seen yet
    arrived: int | None = None  # a stop that `reached` has not been told of yet
    cancelled: bool = False
    stopped_once: bool = False  # its chunk made way for somebody; the next one is finished first
    error: BaseException | None = None
    done: bool = False

    def count_next(self, most: int) -> int:
        """Tokens to run next, up to a stop."""
        assert self.sequence is not None
        if self.stops:
            most = min(most, self.stops[0] - len(self.sequence))
        return min(most, len(self.pending))


@dataclass(frozen=True)
class Share:
    """One job's part of a step: its next tokens, and whether logits are wanted after them."""

    job: Job
    sequence: Sequence
    good: GoodState
    n_tokens: int

    def segment(self, start: int = 0, stop: int | None = None) -> Segment:
        tokens = self.job.pending[start : self.n_tokens if stop is None else stop]
        is_last = start + len(tokens) == len(self.job.pending)
        if self.job.rows is not None and not is_last:
            rows, at = self.job.rows, len(self.sequence)
            return Segment(self.sequence, tokens, "all", kind=self.job.kind, take=lambda first, some: rows(at + first, some))
        return Segment(self.sequence, tokens, "last" if is_last else "none", kind=self.job.kind)


@dataclass(frozen=True)
class Step:
    """The forward that is running."""

    shares: list[Share]
    start: float

    @property
    def kind(self) -> Kind:
        return self.shares[0].job.kind

    @property
    def n_tokens(self) -> int:
        return sum(share.n_tokens for share in self.shares)


Ran = tuple[Share, F32 | None]  # a share that was run, and the logits that it wanted
