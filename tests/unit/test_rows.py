"""Rows in shared blocks: whatever is shared, cut and appended, every table keeps its own rows."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from moeflux.backends.numpy.storage import HostStorage
from moeflux.backends.state import BLOCK, Rows

STEPS = st.lists(
    st.tuples(st.sampled_from(["append", "cut", "share"]), st.integers(0, 5), st.integers(0, 2 * BLOCK + 9)), max_size=30
)


@given(STEPS)
def test_tables_do_not_touch_each_other(steps):
    """Against plain lists: each row is a number of its own, so a row that was overwritten shows."""
    tables, expected, counter = [Rows(HostStorage("f32", poison=True), 1)], [[]], 0
    for kind, which, n in steps:
        i = which % len(tables)
        if kind == "append":
            new = list(range(counter, counter + n))
            counter += n
            tables[i].append(np.array(new, dtype=np.float32)[:, None])
            expected[i] = expected[i] + new
        elif kind == "cut":
            tables[i].cut(min(n, len(tables[i])))
            expected[i] = expected[i][: min(n, len(expected[i]))]
        else:
            tables.append(tables[i].share(min(n, len(tables[i]))))
            expected.append(expected[i][: min(n, len(expected[i]))])
    for table, rows in zip(tables, expected, strict=True):
        assert table.filled[:, 0].tolist() == rows
        assert len(table) == len(rows)
        assert len(table.table) == len(table.blocks) == -(-len(rows) // BLOCK)


def test_sharing_copies_nothing_until_rows_differ():
    rows = Rows(HostStorage("f32"), 2)
    rows.append(np.ones((BLOCK + 3, 2), np.float32))
    other = rows.share()
    assert [id(block) for block in other.blocks] == [id(block) for block in rows.blocks]
    rows.append(np.full((4, 2), 2, np.float32))  # behind what both have: in place
    assert other.blocks[1] is rows.blocks[1]
    other.append(np.full((4, 2), 3, np.float32))  # those rows are taken: a copy of one block
    assert other.blocks[0] is rows.blocks[0]
    assert other.blocks[1] is not rows.blocks[1]
    assert rows.filled[-1, 0] == 2
    assert other.filled[-1, 0] == 3


def test_growing_copies_nothing():
    rows = Rows(HostStorage("bf16"), 2)
    rows.append(np.ones((10, 2), np.float32))
    (first,) = rows.blocks
    rows.append(np.ones((3 * BLOCK, 2), np.float32))
    assert rows.blocks[0] is first
    assert rows.nbytes == 4 * BLOCK * 2 * 2


@pytest.mark.parametrize("special", [0.0, -0.0, np.inf, -np.inf, np.nan, 1.5, -(2.0**120)])
def test_bf16_keeps_special_values(special):
    np.testing.assert_array_equal(_kept([special]), np.array([special], np.float32))


def test_bf16_rounds_to_nearest_even():
    assert _kept([1 + 2**-8, 1 + 3 * 2**-8, 1 + 2**-8 + 2**-20, -1 - 2**-8]).tolist() == [1, 1 + 2**-6, 1 + 2**-7, -1]


def _kept(values):
    rows = Rows(HostStorage("bf16"))
    rows.append(np.array(values, np.float32))
    return rows.filled
