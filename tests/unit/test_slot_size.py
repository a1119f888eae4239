"""The store's rules for slots, as a plan counts them."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from moeflux.backends.native.arena import BLOCK_BYTES, HUGE_PAGE, Arena, arena_bytes
from moeflux.backends.native.ops import NativeOps
from moeflux.formats.quant import Matrix, Plain
from moeflux.plan.slot_size import pool_bytes, reader_bytes, slots_within
from moeflux.store.store import slot_bytes_of

CODES, SCALES = 768 * 2048 // 2, 768 * 32 * 2  # a 4-bit projection of Qwen3-30B-A3B: 786,432 and 49,152 bytes


@pytest.mark.parametrize(
    ("parts", "direct", "size"),
    [
        ((CODES, SCALES, SCALES) * 3, False, 3 * (CODES + 2 * SCALES)),
        ((CODES, SCALES, SCALES) * 3, True, 3 * (CODES + 4096 + 2 * SCALES)),  # only codes are read in place
        ((131072 + 1,), True, 131072 + 4096 + 4096),
        ((131072 - 1,), True, 131072),
        ((100, 100), False, 256),
        ((100, 100), True, 4096),
    ],
)
def test_slot_bytes(parts, direct, size):
    assert slot_bytes_of(parts, direct) == size


@given(st.integers(0, 2**34), st.integers(1, 2**25))
def test_the_pool_never_exceeds_its_room(room, slot):
    n = slots_within(room, slot)
    assert pool_bytes(n, slot) <= room + (0 if n else slot)
    assert n >= room // slot - room // slot // 8 - 2 * HUGE_PAGE // slot - 1  # and wastes little of it


def test_direct_readers_have_a_buffer():
    assert reader_bytes(True) >= reader_bytes(False) + 2**20


def test_arena_counts_what_is_touched():
    """Blocks as they are allocated, whole huge pages as they are touched."""
    taken = []

    def allocate(n):
        taken.append(n)
        return NativeOps(1).allocate(n)

    arena = Arena(allocate)
    quarter = BLOCK_BYTES // 4
    pieces = [100, 2 * quarter, quarter, quarter, quarter, quarter]  # the last is too long for the rest of its block
    parts = [arena.carve(n) for n in pieces]
    assert taken == [BLOCK_BYTES, 2 * quarter, BLOCK_BYTES]
    assert [len(part) for part in parts] == pieces
    assert all(arena.holds(part) for part in parts)
    assert not arena.holds(parts[0].copy())
    assert arena_bytes(pieces) == 2 * quarter + (3 * quarter + HUGE_PAGE) + quarter


def test_weights_that_were_read_into_place_are_not_copied():
    ops = NativeOps(1)
    raw = ops.place(4 * 8)
    raw[:] = 0
    matrix = Matrix(Plain("F32"), (2, 4), {"weight": raw.view(np.float32).reshape(2, 4)}, "here")
    assert ops.resident(matrix).parts["weight"] is matrix.parts["weight"]
    copied = Matrix(Plain("F32"), (2, 4), {"weight": np.zeros((2, 4), np.float32)}, "here")
    assert ops.resident(copied).parts["weight"] is not copied.parts["weight"]
