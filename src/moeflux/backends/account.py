"""The bytes of all states of one engine, under one limit: sequences, their checkpoints, snapshots, kept prefixes.

A block is counted where it is allocated and given back when the last who shares it lets it go, so it counts once. Those who
keep something only for convenience (checkpoints) give way to what must be had.
"""

from __future__ import annotations

from collections import deque
from threading import RLock
from typing import Protocol
from weakref import WeakSet

from moeflux.core.errors import BudgetError
from moeflux.core.units import format_bytes


class GivesWay(Protocol):
    def give_way(self) -> bool:
        """Let one kept state go; False where there is none."""


class Charge:
    """Bytes that are counted for as long as this lives."""

    __slots__ = ("_account", "nbytes")

    def __init__(self, account: StateAccount, nbytes: int) -> None:
        self._account, self.nbytes = account, nbytes

    def end(self) -> None:
        """Called by itself when nobody has it any more; twice is fine."""
        freed, self.nbytes = self.nbytes, 0
        self._account._freed.append(freed)

    __del__ = end


class StateAccount:
    """For any thread. `limit` None: everything is counted and nothing refused."""

    def __init__(self, limit: int | None = None) -> None:
        self.limit = limit
        self._used = 0
        self._lock = RLock()
        self._freed: deque[int] = deque()  # by whoever let go, perhaps amid a garbage collection: no lock could be taken
        self._givers: WeakSet[GivesWay] = WeakSet()

    @property
    def used(self) -> int:
        with self._lock:
            while self._freed:
                self._used -= self._freed.popleft()
            return self._used

    @property
    def room(self) -> int:
        """Bytes that are left; a very large number without a limit."""
        return 2**62 if self.limit is None else self.limit - self.used

    def take(self, nbytes: int) -> Charge:
        with self._lock:
            self.make_room(nbytes)
            self._used += nbytes
        return Charge(self, nbytes)

    def make_room(self, nbytes: int) -> None:
        """So that so many bytes can be taken next; BudgetError where that cannot be had."""
        while nbytes > self.room:
            if self.limit is None or nbytes > self.limit or not any(giver.give_way() for giver in list(self._givers)):
                raise BudgetError(
                    f"{format_bytes(nbytes)} more for states, but {format_bytes(self.used)} of the "
                    f"{format_bytes(self.limit or 0)} that the plan has for them are used",
                    where="memory of sequences",
                    hint="end other sequences, or load the model with more sequences= or a longer context=",
                )

    def add_giver(self, giver: GivesWay) -> None:
        """From now on it is asked to give way where memory is missing, for as long as it lives."""
        self._givers.add(giver)
