"""Requests that wait for their turn, from any thread.

The line is bounded. Higher priority comes first. Within a priority clients take turns: each request of a client stands one
round behind its last one, and who has not asked for a while joins the round that is served now. One client's requests keep
their order.
"""

from __future__ import annotations

from bisect import insort
from collections.abc import Iterator
from dataclasses import dataclass, field
from threading import Lock
from typing import Generic, TypeVar

from moeflux.core.errors import OverloadError

T = TypeVar("T")
Rank = tuple[float, int, float]  # priority, round, order of coming


@dataclass(order=True, frozen=True)
class _Entry(Generic[T]):
    rank: Rank
    item: T = field(compare=False)


class WaitingLine(Generic[T]):
    def __init__(self, most: int) -> None:
        self._most, self._order, self._lock = most, 0, Lock()
        self._entries: list[_Entry[T]] = []
        self._round = 0  # that is served now
        self._latest: dict[str, int] = {}  # round of each client's last request

    def check_room(self) -> None:
        """OverloadError where the line is full."""
        if len(self) >= self._most:
            raise OverloadError(f"{self._most} requests wait already, and no more may", hint="try again in a while")

    def place_for(self, priority: float, client: str = "") -> int:
        """How many would come before one that is added now."""
        with self._lock:
            rank = (-priority, self._next_round(client), float("inf"))
            return sum(entry.rank < rank for entry in self._entries)

    def add(self, item: T, priority: float, client: str = "") -> None:
        with self._lock:
            self._order += 1
            turn = self._latest[client] = self._next_round(client)
            insort(self._entries, _Entry((-priority, turn, self._order), item))

    def remove(self, item: T) -> bool:
        """False where it does not wait."""
        with self._lock:
            at = self._find(item)
            if at is None:
                return False
            entry = self._entries.pop(at)
            if at == 0:  # it was its turn
                self._round = max(self._round, entry.rank[1])
                self._latest = {client: turn for client, turn in self._latest.items() if turn >= self._round}
            return True

    def place(self, item: T) -> int | None:
        with self._lock:
            return self._find(item)

    def __len__(self) -> int:
        with self._lock:
            return len(self._entries)

    def __iter__(self) -> Iterator[T]:
        """As they stand now, first to last."""
        with self._lock:
            return iter([entry.item for entry in self._entries])

    def _find(self, item: T) -> int | None:
        return next((i for i, entry in enumerate(self._entries) if entry.item is item), None)

    def _next_round(self, client: str) -> int:
        return max(self._round, self._latest.get(client, 0) + 1)
