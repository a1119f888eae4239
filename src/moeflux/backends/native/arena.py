"""Memory for resident weights: carved from large blocks, because only large blocks get huge pages.

What a weight costs is known beforehand (`arena_bytes`), so that a plan can count it before anything is allocated.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

import numpy as np
import numpy.typing as npt

Bytes = npt.NDArray[np.uint8]

BLOCK_BYTES = 64 * 2**20
LARGE_BYTES = BLOCK_BYTES // 4  # from here on, a block of its own
HUGE_PAGE = 2 * 2**20
ALIGNMENT = 64


class Arena:
    """Gives out pieces that live as long as something looks into them; never takes one back."""

    def __init__(self, allocate: Callable[[int], Bytes]) -> None:
        self._allocate = allocate
        self._rest: Bytes = np.empty(0, dtype=np.uint8)
        self._blocks: list[tuple[int, int]] = []  # addresses

    def carve(self, n_bytes: int) -> Bytes:
        if n_bytes > LARGE_BYTES:
            return self._block(n_bytes)
        if n_bytes > len(self._rest):
            self._rest = self._block(BLOCK_BYTES)
        piece, self._rest = self._rest[:n_bytes], self._rest[_aligned(n_bytes) :]
        return piece

    def holds(self, array: npt.NDArray[np.generic]) -> bool:
        """Whether an array lies in memory that was given out here."""
        first = array.ctypes.data
        return any(start <= first and first + array.nbytes <= stop for start, stop in self._blocks)

    def _block(self, n_bytes: int) -> Bytes:
        block = self._allocate(n_bytes)
        self._blocks.append((block.ctypes.data, block.ctypes.data + n_bytes))
        return block


def arena_bytes(pieces: Iterable[int]) -> int:
    """Bytes that become resident when pieces of these sizes are carved in this order and written."""
    total, used = 0, 0
    left = 0  # of the block that is being carved
    for n in pieces:
        if n > LARGE_BYTES:
            total += _huge(n)
            continue
        if n > left:
            total += _huge(used)
            left, used = BLOCK_BYTES, 0
        left -= _aligned(n)
        used += _aligned(n)
    return total + _huge(used)


def _aligned(n: int) -> int:
    return -(-n // ALIGNMENT) * ALIGNMENT


def _huge(n: int) -> int:
    return -(-n // HUGE_PAGE) * HUGE_PAGE
