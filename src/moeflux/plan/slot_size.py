"""How much memory slots and readers take once they are used: what native/store/arena.h and reader.h ask for."""

from __future__ import annotations

from collections.abc import Sequence

from moeflux.core.pages import HUGE_PAGE, PAGE, round_up, touched

LINE = 64
BLOCK_BYTES = 256 * 2**20  # of slots that are allocated together
BOUNCE_BYTES = 2**20  # of a reader, for what is not read in place
STACK_BYTES = 64 * 2**10  # what a reader touches of its stack


def pool_bytes(n_slots: int, slot: int) -> int:
    """Of so many slots once they are filled, in blocks on huge pages."""
    per_block = max(1, BLOCK_BYTES // slot)
    blocks, rest = divmod(n_slots, per_block)
    return blocks * touched(per_block * slot) + touched(rest * slot)


def slots_within(room: int, slot: int) -> int:
    """The most slots whose pool is not larger than this."""
    per_block = max(1, BLOCK_BYTES // slot)
    blocks, rest = divmod(max(0, room), touched(per_block * slot))
    page = HUGE_PAGE if rest >= HUGE_PAGE else PAGE
    return blocks * per_block + rest // page * page // slot


def kept_bytes(n_experts: int, parts: Sequence[int]) -> int:
    """Of components of these sizes that are kept of every expert of a layer."""
    return touched(n_experts * sum(round_up(part, LINE) for part in parts))


def reader_bytes(direct: bool) -> int:
    """Of one reader."""
    return STACK_BYTES + (BOUNCE_BYTES if direct else 0)
