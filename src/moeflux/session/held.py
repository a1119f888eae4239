"""Bytes of the snapshots that a prefix store holds: what several share counts once, what is on its way counts too.

Whoever holds a snapshot says so before anybody else can let it go, so a piece is known by its place in memory.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from moeflux.backends.state import Block
from moeflux.runtime.snapshot import Snapshot


class Held:
    def __init__(self) -> None:
        self.nbytes = 0
        self.reserved = 0  # of these, for snapshots that are being read
        self._holders: dict[int, int] = {}  # of each piece: how many

    def hold(self, snapshot: Snapshot) -> None:
        for piece, n_bytes in _pieces(snapshot):
            before = self._holders.get(piece, 0)
            self._holders[piece] = before + 1
            self.nbytes += n_bytes if before == 0 else 0

    def release(self, snapshot: Snapshot) -> None:
        for piece, n_bytes in _pieces(snapshot):
            self._holders[piece] -= 1
            if self._holders[piece] == 0:
                del self._holders[piece]
                self.nbytes -= n_bytes

    def reserve(self, n_bytes: int) -> None:
        """May be negative, to give it back."""
        self.reserved += n_bytes
        self.nbytes += n_bytes

    def added_by(self, own_bytes: int, blocks: Iterable[Block]) -> int:
        """What a snapshot of these would add."""
        return own_bytes + sum(block.nbytes for block in blocks if id(block) not in self._holders)


def _pieces(snapshot: Snapshot) -> Iterator[tuple[int, int]]:
    yield id(snapshot), snapshot.own_bytes
    for block in snapshot.blocks():
        yield id(block), block.nbytes
