"""Requests that wait for their turn: bounded, higher priority first, then first come, first served. From any thread."""

from __future__ import annotations

from bisect import insort
from collections.abc import Iterator
from dataclasses import dataclass, field
from threading import Lock
from typing import Generic, TypeVar

from moeflux.core.errors import OverloadError

T = TypeVar("T")


@dataclass(order=True, frozen=True)
class _Entry(Generic[T]):
    rank: tuple[float, int]
    item: T = field(compare=False)


class WaitingLine(Generic[T]):
    def __init__(self, most: int) -> None:
        self._most, self._order, self._lock = most, 0, Lock()
        self._entries: list[_Entry[T]] = []

    def check_room(self) -> None:
        """OverloadError where the line is full."""
        if len(self) >= self._most:
            raise OverloadError(f"{self._most} requests wait already, and no more may", hint="try again in a while")

    def place_for(self, priority: float) -> int:
        """How many would come before one that is added now."""
        with self._lock:
            return sum(entry.rank[0] <= -priority for entry in self._entries)

    def add(self, item: T, priority: float) -> None:
        with self._lock:
            self._order += 1
            insort(self._entries, _Entry((-priority, self._order), item))

    def remove(self, item: T) -> bool:
        """False where it does not wait."""
        with self._lock:
            n = len(self._entries)
            self._entries = [entry for entry in self._entries if entry.item is not item]
            return len(self._entries) < n

    def place(self, item: T) -> int | None:
        with self._lock:
            return next((i for i, entry in enumerate(self._entries) if entry.item is item), None)

    def __len__(self) -> int:
        with self._lock:
            return len(self._entries)

    def __iter__(self) -> Iterator[T]:
        """As they stand now, first to last."""
        with self._lock:
            return iter([entry.item for entry in self._entries])
