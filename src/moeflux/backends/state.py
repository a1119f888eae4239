"""What one layer of one sequence carries from token to token. Blocks read and write it; the sequence owns it.

Each tensor has one owner and no mirror. Arrays come from the backend and are opaque here, but for slicing and assignment.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

Array = Any
Allocate = Callable[[tuple[int, ...]], Array]  # a float32 array of zeros

BLOCK = 256  # positions by which position-indexed states grow


class Rows:
    """A growing table with one row per position."""

    def __init__(self, allocate: Allocate, *row_shape: int) -> None:
        self._allocate = allocate
        self._row_shape = row_shape
        self._data = allocate((0, *row_shape))
        self._length = 0

    def append(self, rows: Array) -> None:
        self.extend(len(rows))[self._length - len(rows) : self._length] = rows

    def extend(self, n: int) -> Array:
        """Make room for n more rows, which count as filled; returns the whole table for them to be written into."""
        end = self._length + n
        if end > len(self._data):
            grown = self._allocate((-(-end // BLOCK) * BLOCK, *self._row_shape))
            grown[: self._length] = self._data[: self._length]
            self._data = grown
        self._length = end
        return self._data

    @property
    def filled(self) -> Array:
        return self._data[: self._length]

    @property
    def nbytes(self) -> int:
        return int(self._data.nbytes)


class KvState:
    """Keys and values of grouped-query attention, after norm and rotation."""

    def __init__(self, allocate: Allocate, n_kv_heads: int, head_dim: int) -> None:
        self.keys = Rows(allocate, n_kv_heads, head_dim)
        self.values = Rows(allocate, n_kv_heads, head_dim)

    @property
    def nbytes(self) -> int:
        return self.keys.nbytes + self.values.nbytes


class LatentState:
    """Latent attention: the normed latent and, behind it, the rotated key that all heads share."""

    def __init__(self, allocate: Allocate, latent_dim: int) -> None:
        self.latents = Rows(allocate, latent_dim)

    @property
    def nbytes(self) -> int:
        return self.latents.nbytes


class DeltaState:
    """Gated delta net: the last inputs of the convolution and the recurrent matrix of each value head."""

    def __init__(self, allocate: Allocate, conv_rows: int, channels: int, heads: tuple[int, int, int]) -> None:
        self.conv = allocate((conv_rows, channels))  # [width - 1, C], oldest first, before the convolution
        self.delta = allocate(heads)  # [value heads, key dim, value dim]

    @property
    def nbytes(self) -> int:
        return int(self.conv.nbytes + self.delta.nbytes)


LayerState = KvState | LatentState | DeltaState
