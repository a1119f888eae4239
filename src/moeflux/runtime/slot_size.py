"""How large slots and readers are, from the sizes of an expert's components: the store's rules, before there is a store.

Read past the page cache, a large component lies in its slot just as it lies in the file: in whole pages, and one more
because its first byte may stand anywhere in a page. A small one goes through the reader's own buffer to its place. Through
the page cache, every byte goes straight to its place.
"""

from __future__ import annotations

from collections.abc import Sequence

PAGE = 4096
LINE = 64
HUGE_PAGE = 2 * 2**20
IN_PLACE_BYTES = 128 * 2**10  # from here on, a component is read in place
BLOCK_BYTES = 256 * 2**20  # of slots that are allocated together
BOUNCE_BYTES = 2**20  # of a reader, for what is not read in place
STACK_BYTES = 64 * 2**10  # what a reader touches of its stack


def slot_bytes(parts: Sequence[int], direct: bool) -> int:
    """Of the slot for an expert with components of these sizes."""
    size = 0
    for n in parts:
        in_place = direct and n >= IN_PLACE_BYTES
        size += round_up(n, PAGE) + PAGE if in_place else round_up(n, LINE)
    return round_up(size, PAGE if direct else LINE)


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


def reader_bytes(direct: bool) -> int:
    """Of one reader."""
    return STACK_BYTES + (BOUNCE_BYTES if direct else 0)


def touched(n: int) -> int:
    """Of a block of so many bytes that is written to: large ones lie on huge pages."""
    return round_up(n, HUGE_PAGE if n >= HUGE_PAGE else PAGE)


def round_up(n: int, unit: int) -> int:
    return -(-n // unit) * unit
