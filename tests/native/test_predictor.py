"""Foresight without arithmetic and without files: where to look, what to hint, and how far that reaches."""

from __future__ import annotations

import numpy as np
import pytest

import moeflux._native as _native
from moeflux.core.errors import InputError

MOST = 4


def ids(*rows):
    return np.array(rows, dtype=np.int64)


def predictor(previous=True, lookahead=True, *, sweep=False, missing=True, crowded=False):
    p = _native.Predictor(8, previous, lookahead, MOST)
    p.start(sweep, missing, crowded)
    return p


def test_a_tokens_first_layers_are_looked_at_before_its_first_mixer():
    p = predictor()
    assert p.before(0) == [
        ("router", 0, MOST, True),
        ("previous", 0, 0, True),
        ("router", 1, 2, False),  # further away only what is hardly ever wrong
        ("router", 2, 2, False),
    ]
    p.chose(0, ids([1, 2]), ids(0))
    assert p.before(1) == [("router", 1, MOST, True)]
    assert p.meanwhile(1) == [("router", 2, MOST, True), ("previous", 2, 0, True), ("router", 4, 2, False)]


def test_nothing_is_foreseen_where_all_is_there():
    p = predictor(missing=False)
    assert p.before(0) == p.meanwhile(0) == []
    p.guess(1, ids(3))
    assert p.ahead(1) == []


@pytest.mark.parametrize(
    ("options", "looks"),
    [
        ({"previous": False}, {"router"}),
        ({"lookahead": False}, {"previous"}),
        ({"previous": False, "lookahead": False}, set()),
        ({"crowded": True}, {"router"}),  # what is not there of the previous token was too cold to be kept
    ],
)
def test_what_was_asked_for(options, looks):
    p = predictor(**options)
    assert {where for where, *_ in p.before(0) + p.meanwhile(0)} == looks


def test_where_memory_is_crowded_only_the_next_layer_is_looked_at():
    assert {layer for _, layer, *_ in predictor(crowded=True).meanwhile(0)} == {1}


def test_what_rows_that_decode_chose_is_hinted_for_the_next_token():
    p = predictor()
    p.chose(3, ids([1, 2, 3], [4, 5, 6], [7, 8, 9]), ids(0, 2))
    assert p.previous(3, 3) == [1, 2, 3, 7, 8, 9]
    assert p.previous(4, 3) == []


def test_a_prompt_looks_one_layer_ahead_and_keeps_what_decoding_knew():
    p = predictor()
    p.chose(3, ids([1, 2]), ids(0))
    p.start(True, True, False)
    assert p.before(0) == []
    assert p.meanwhile(2) == [("prompt", 3, 0, False)]
    p.guess(3, ids(5, 6))
    assert p.ahead(3) == [5, 6]
    p.chose(3, ids([5, 7]), ids())
    assert p.ahead(3) == []
    assert p.previous(3, 2) == [1, 2]
    assert (p.guessed, p.asked, p.foreseen) == (0, 0, 0)


def test_guesses_are_counted():
    p = predictor()
    p.guess(2, ids(1, 2, 3))
    p.chose(2, ids([2, 9]), ids(0))
    p.chose(2, ids([2, 9]), ids(0))  # nobody guessed
    assert (p.guessed, p.asked, p.foreseen) == (3, 2, 1)


def test_reach_follows_what_came_of_hints():
    p = predictor()
    for _ in range(200):  # all wrong
        p.finish(10, 0, 0.9, 0.5)
        if p.width == 0:
            break
    assert p.width == 0
    assert p.before(0) == []
    widths = set()
    for _ in range(200):  # now and then a probe
        p.finish(0, 0, 0.9, 0.5)
        widths.add(p.width)
    assert widths > {0}
    p = predictor()
    for _ in range(200):  # all right, and readers have time
        p.finish(10, 10, 0.9, 0.5)
    assert (p.width, p.depth) == (MOST, 4)
    p.start(True, True, False)
    for _ in range(200):
        p.finish(10, 0, 0.9, 0.5)  # a prompt's part is none
    assert p.width == MOST


def test_layers_that_are_not_there():
    p = predictor()
    for call in (lambda: p.guess(8, ids(1)), lambda: p.previous(-1, 1), lambda: p.chose(9, ids([1]), ids(0))):
        with pytest.raises(InputError):
            call()
    with pytest.raises(InputError):
        p.chose(0, ids([1]), ids(1))
    assert p.ahead(99) == []
