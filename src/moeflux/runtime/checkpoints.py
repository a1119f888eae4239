"""The snapshots that a sequence keeps of its own past, by position, under a limit of their number and of their bytes.

All are of one timeline: what stands above the place where a sequence was cut is gone. The lowest (usually what all
requests begin with) and the newest stay longest; of the others the one that was used longest ago goes first. All give way,
the one used longest ago first, where the engine has no memory left for what sequences must have.
"""

from __future__ import annotations

from collections.abc import Iterable

from moeflux.backends.state import Block
from moeflux.core.errors import BudgetError, OptionError
from moeflux.core.units import format_bytes
from moeflux.runtime.snapshot import Snapshot, unshared_bytes

DEFAULT_COUNT = 16


class Checkpoints:
    def __init__(self, max_count: int = DEFAULT_COUNT, max_bytes: int | None = None) -> None:
        self._kept: dict[int, Snapshot] = {}  # the one that was used longest ago first
        self._max_count, self._max_bytes = max_count, max_bytes

    @property
    def positions(self) -> tuple[int, ...]:
        return tuple(sorted(self._kept))

    def limit(self, max_count: int, max_bytes: int | None, held: Iterable[Block]) -> None:
        """Takes effect at once."""
        if max_count < 1 or (max_bytes is not None and max_bytes < 0):
            raise OptionError(f"at most {max_count} checkpoints of {max_bytes} bytes: nothing could be kept")
        self._max_count, self._max_bytes = max_count, max_bytes
        self._evict(list(held), spare_newest=False)

    def make_room(self, position: int, nbytes: int, held: Iterable[Block]) -> None:
        """For a snapshot with so many bytes of its own, before it is made: so that there is never one more than allowed."""
        held = list(held)
        if self._max_bytes is not None and nbytes > self._max_bytes:
            raise self._too_large(nbytes)
        self._drop(position)
        while self._kept and (
            len(self._kept) >= self._max_count
            or (self._max_bytes is not None and self.nbytes(held) + nbytes > self._max_bytes)
        ):
            self._drop(self._victim(position))

    def give_way(self) -> bool:
        """Let the one that was used longest ago go; False where there is none."""
        oldest = next(iter(list(self._kept)), None)
        return oldest is not None and self._drop(oldest)

    def put(self, snapshot: Snapshot, held: Iterable[Block]) -> None:
        """`held`: blocks of the sequence itself, which checkpoints share at no cost."""
        held = list(held)
        cost = unshared_bytes([snapshot], held)
        if self._max_bytes is not None and cost > self._max_bytes:
            raise self._too_large(cost)
        self._kept.pop(len(snapshot), None)
        self._kept[len(snapshot)] = snapshot
        self._evict(held, spare_newest=True)

    def get(self, position: int) -> Snapshot | None:
        """And it counts as used now."""
        snapshot = self._kept.pop(position, None)
        if snapshot is not None:
            self._kept[position] = snapshot
        return snapshot

    def forget(self, position: int) -> bool:
        return self._drop(position)

    def drop_above(self, position: int) -> None:
        for kept in [p for p in list(self._kept) if p > position]:
            self._drop(kept)

    def nbytes(self, held: Iterable[Block]) -> int:
        return unshared_bytes(list(self._kept.values()), held)

    def _evict(self, held: list[Block], *, spare_newest: bool) -> None:
        least = 1 if spare_newest else 0
        while len(self._kept) > least and self._too_much(held):
            self._drop(self._victim())

    def _drop(self, position: int) -> bool:
        return self._kept.pop(position, None) is not None

    def _too_large(self, cost: int) -> BudgetError:
        return BudgetError(
            f"a checkpoint of {format_bytes(cost)} does not fit the {format_bytes(self._max_bytes or 0)} for checkpoints",
            hint="allow more bytes for checkpoints",
        )

    def _too_much(self, held: list[Block]) -> bool:
        return len(self._kept) > self._max_count or (self._max_bytes is not None and self.nbytes(held) > self._max_bytes)

    def _victim(self, coming: int | None = None) -> int:
        """`coming`: the position of one that is about to be put."""
        lowest, newest = min(self._kept), max(self._kept) if coming is None else coming
        return next((position for position in self._kept if position not in (lowest, newest)), lowest)
