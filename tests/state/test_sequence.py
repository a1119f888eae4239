"""Going back is exact or refused: truncate, checkpoints, their limits, and what becomes of a sequence that failed."""

from __future__ import annotations

import numpy as np
import pytest

from moeflux import Segment
from moeflux.core.errors import BudgetError, CutError, OptionError, StateError
from state.families import FAMILIES, HYBRID, LATENT, PLAIN, fresh_logits, opened, text


def advance(name, sequence, tokens):
    (logits,) = opened(name).forward(Segment(sequence, tokens))
    return logits[0]


def check(name, sequence, branch=9):
    """The next tokens give what a fresh sequence gives."""
    tokens = text(3, branch, len(sequence))
    logits = advance(name, sequence, tokens)
    np.testing.assert_array_equal(logits, fresh_logits(name, sequence.tokens))


@pytest.mark.parametrize("name", FAMILIES)
def test_restoring_is_exact(name):
    sequence = opened(name).sequence()
    advance(name, sequence, text(40))
    sequence.checkpoint()
    advance(name, sequence, text(260, 1, 40))
    sequence.checkpoint()
    advance(name, sequence, text(9, 2, 300))
    assert sequence.checkpoints == (40, 300)
    sequence.restore(300)
    assert sequence.length == 300
    check(name, sequence)
    sequence.restore(40)
    assert sequence.checkpoints == (40,)
    assert sequence.tokens == text(40)
    check(name, sequence)
    sequence.clear()
    assert (sequence.length, sequence.checkpoints) == (0, ())
    check(name, sequence)


@pytest.mark.parametrize("name", [PLAIN, LATENT])
def test_what_can_be_cut_is_cut_anywhere(name):
    sequence = opened(name).sequence()
    advance(name, sequence, text(300))
    assert sequence.checkpoint().own_bytes == 300 * 4  # nothing but the tokens
    for position in (299, 257, 256, 255, 3):
        sequence.truncate(position)
        check(name, sequence)
        sequence.truncate(position)
    assert sequence.checkpoints == ()


@pytest.mark.parametrize("name", ["qwen3_next-4bit-f32", HYBRID])
def test_what_cannot_be_cut_says_where_it_can_return_to(name):
    sequence = opened(name).sequence()
    advance(name, sequence, text(10))
    sequence.checkpoint()
    advance(name, sequence, text(10, 0, 10))
    with pytest.raises(CutError, match=r"cut at 15.* nearest: 10 and 20") as caught:
        sequence.truncate(15)
    assert caught.value.restorable == (10, 20)
    with pytest.raises(CutError, match="nearest: 0 and 10"):
        sequence.restore(9)
    assert (sequence.length, sequence.checkpoints) == (20, (10,))
    check(name, sequence)
    assert sequence.restore_nearest(22) == 10  # the sequence went on, and 20 is no checkpoint
    check(name, sequence)
    assert sequence.restore_nearest(9) == 0


def test_positions_outside_are_refused():
    sequence = opened(PLAIN).sequence()
    advance(PLAIN, sequence, text(5))
    for position in (-1, 6):
        with pytest.raises(StateError, match="5 tokens"):
            sequence.truncate(position)
    assert sequence.restore_nearest(100) == 5


def test_checkpoints_share_what_can_be_cut():
    sequence = opened(HYBRID).sequence()
    advance(HYBRID, sequence, text(30))
    first = sequence.checkpoint()
    advance(HYBRID, sequence, text(300, 0, 30))
    second = sequence.checkpoint()
    recurrent = sum(state.array_bytes for state in sequence.states)
    assert recurrent > 0
    assert second.own_bytes - first.own_bytes == 300 * 4
    assert sequence.checkpoint_bytes == 2 * recurrent + (30 + 330) * 4
    assert sequence.snapshot_bytes == recurrent + 330 * (
        4 + sum(r.row_bytes for s in sequence.states for r in s.rows.values())
    )


def test_the_lowest_and_the_newest_stay_longest():
    sequence = opened(HYBRID).sequence()
    for _ in range(5):
        advance(HYBRID, sequence, [1, 2])
        sequence.checkpoint()
    sequence.limit_checkpoints(4)
    assert sequence.checkpoints == (2, 6, 8, 10)
    sequence._checkpoints.get(6)  # used, so 8 is now the one that was used longest ago
    advance(HYBRID, sequence, [3])
    sequence.checkpoint()
    assert sequence.checkpoints == (2, 6, 10, 11)
    sequence.limit_checkpoints(2)
    assert sequence.checkpoints == (2, 11)
    sequence.limit_checkpoints(1)
    assert sequence.checkpoints == (11,)
    assert sequence.forget(11)
    assert not sequence.forget(11)
    with pytest.raises(OptionError):
        sequence.limit_checkpoints(0)


def test_restoring_refreshes():
    sequence = opened(HYBRID).sequence()
    for _ in range(3):
        advance(HYBRID, sequence, [1, 2])
        sequence.checkpoint()
    sequence.restore(6)
    sequence.restore(4)
    sequence.limit_checkpoints(2)
    advance(HYBRID, sequence, [1])
    sequence.checkpoint()
    assert sequence.checkpoints == (2, 5)


def test_bytes_of_checkpoints_are_limited():
    sequence = opened(HYBRID).sequence()
    advance(HYBRID, sequence, text(4))
    one = sequence.checkpoint().own_bytes
    sequence.limit_checkpoints(16, 3 * one)
    for _ in range(5):
        advance(HYBRID, sequence, [1])
        sequence.checkpoint()
        assert sequence.checkpoint_bytes <= 3 * one
    assert sequence.checkpoints == (4, 9)  # a third would be a few bytes of tokens too much
    sequence.limit_checkpoints(16, one // 2)
    assert sequence.checkpoints == ()
    with pytest.raises(BudgetError, match="does not fit"):
        sequence.checkpoint()
    assert sequence.checkpoints == ()


@pytest.mark.parametrize("name", FAMILIES)
def test_a_failed_run_can_be_undone(name, monkeypatch):
    engine = opened(name)
    sequence = engine.sequence()
    advance(name, sequence, text(10))
    sequence.checkpoint()
    with monkeypatch.context() as patch:
        patch.setattr(engine.model.experts, "acquire", _fail)
        patch.setattr(engine.model.runner, "stream", None)
        with pytest.raises(OSError, match="gone"):
            advance(name, sequence, text(3, 1, 10))
    with pytest.raises(StateError, match="failed midway"):
        advance(name, sequence, [1])
    with pytest.raises(StateError, match="failed midway"):
        sequence.checkpoint()
    sequence.restore(10)
    check(name, sequence)


def _fail(*_):
    raise OSError("the drive is gone")
