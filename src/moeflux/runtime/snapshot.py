"""The state of a sequence after some tokens, kept apart from it. Never changed, so it may be shared by anybody.

Rows are shared with the sequence, only what cannot be cut is copied: on a model without recurrent layers a snapshot costs
next to nothing, on others the same at any length.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from moeflux.backends.state import BLOCK, Block, LayerState, Rows

TOKEN_BYTES = 4
Tokens = npt.NDArray[np.int32]


@dataclass(frozen=True, eq=False)
class Snapshot:
    tokens: Tokens
    states: tuple[LayerState, ...]

    @classmethod
    def of(cls, tokens: Iterable[int], states: tuple[LayerState, ...]) -> Snapshot:
        return cls(np.array(list(tokens), dtype=np.int32), tuple(state.fork() for state in states))

    def __len__(self) -> int:
        return len(self.tokens)

    @property
    def cuttable(self) -> bool:
        return all(state.cuttable for state in self.states)

    def fork(self) -> tuple[LayerState, ...]:
        """States for a sequence to go on with."""
        return tuple(state.fork() for state in self.states)

    def cut(self, length: int) -> Snapshot:
        """Of the first tokens only, where states can be cut."""
        if length == len(self):
            return self
        assert self.cuttable
        states = self.fork()
        for rows in _rows(states):
            rows.cut(length)
        return Snapshot(self.tokens[:length], states)

    @property
    def own_bytes(self) -> int:
        """What is never shared."""
        return own_bytes(len(self), self.states)

    def blocks(self) -> Iterator[Block]:
        return blocks_of(self.states)


def blocks_of(states: Iterable[LayerState]) -> Iterator[Block]:
    for rows in _rows(states):
        yield from rows.blocks


def own_bytes(n_tokens: int, states: Iterable[LayerState]) -> int:
    """What a snapshot of these never shares."""
    return sum(state.array_bytes for state in states) + n_tokens * TOKEN_BYTES


def unshared_bytes(snapshots: Iterable[Snapshot], held: Iterable[Block]) -> int:
    """What the snapshots cost besides blocks that are held anyway; a block that several have counts once."""
    known = {id(block) for block in held}
    total = 0
    for snapshot in snapshots:
        total += snapshot.own_bytes
        for block in snapshot.blocks():
            if id(block) not in known:
                known.add(id(block))
                total += block.nbytes
    return total


def payload_bytes(n_tokens: int, states: Iterable[LayerState]) -> int:
    """Of a snapshot in a file: tokens, rows and arrays."""
    total = n_tokens * TOKEN_BYTES
    for state in states:
        total += state.array_bytes + sum(len(rows) * rows.row_bytes for rows in state.rows.values())
    return total


@dataclass(frozen=True)
class SnapshotSizes:
    """What a snapshot of a model takes in memory, where it shares nothing."""

    array_bytes: int
    block_bytes: int  # of BLOCK positions in all layers

    @classmethod
    def of(cls, states: tuple[LayerState, ...]) -> SnapshotSizes:
        """`states`: any of the model."""
        return cls(sum(state.array_bytes for state in states), sum(rows.row_bytes * BLOCK for rows in _rows(states)))

    def held_bytes(self, n_tokens: int) -> int:
        return n_tokens * TOKEN_BYTES + self.array_bytes + self.block_bytes * -(-n_tokens // BLOCK)


def _rows(states: Iterable[LayerState]) -> Iterator[Rows]:
    for state in states:
        yield from state.rows.values()


def common_length(a: Sequence[int] | Tokens, b: Sequence[int] | Tokens) -> int:
    """How many tokens two texts begin with in common."""
    n = min(len(a), len(b))
    differ = np.flatnonzero(np.asarray(a[:n], dtype=np.int64) != np.asarray(b[:n], dtype=np.int64))
    return int(differ[0]) if len(differ) else n
