"""Where a sequence goes back to when a step over it fails or is stopped between two layers.

A state that can be cut is cut where it was. Others (the delta rule's) are overwritten by every step, so a copy is kept:
before each chunk of a prompt, and every so often while tokens are decoded, because a copy costs as much as reading the
state once. The tokens behind the copy are run again, which gives the same bits.
"""

from __future__ import annotations

from contextlib import suppress

from moeflux.core.errors import BudgetError
from moeflux.runtime.sequence import Sequence
from moeflux.runtime.snapshot import Snapshot

KEEP_EVERY = 64  # decoded tokens between two copies


class GoodState:
    def __init__(self, sequence: Sequence) -> None:
        self._sequence = sequence
        self._kept: Snapshot | None = None

    def keep(self, *, prompt: bool) -> None:
        """Before a step. Copies where it must: before a prompt's tokens, or after many decoded ones."""
        if self._sequence.cuttable or len(self._sequence) == 0:
            return
        behind = len(self._sequence) - (0 if self._kept is None else len(self._kept))  # the beginning needs no copy
        if not 0 <= behind < KEEP_EVERY or (prompt and behind):
            self._kept = None  # or there would be two
            with suppress(BudgetError):  # more tokens are run again then
                self._kept = self._sequence.snapshot()

    def go_back(self) -> list[int]:
        """To the latest good state. Returns the tokens that the sequence held before the step and holds no more."""
        sequence = self._sequence
        if sequence.cuttable:
            sequence.truncate(len(sequence))
            return []
        lost = sequence.tokens[0 if self._kept is None else len(self._kept) :]
        if self._kept is None:
            sequence.clear()
        else:
            sequence.adopt(self._kept)
        return lost
