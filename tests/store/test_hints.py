"""Hints: demands come first, hints are dropped before they harm, and what they did is counted."""

from __future__ import annotations

import numpy as np

from store.synthetic import fill, load, make_experts, resident


def test_a_hint_makes_a_hit(tmp_path):
    experts = make_experts(tmp_path)
    with experts.open(n_slots=4, reader="manual") as store:
        store.hint(1, [2, 3, 2])
        fill(store, experts)
        with store.acquire(1, [2]) as lease:
            assert lease.next(wait=False) == [2]
        stats = store.stats()
        assert (stats.hits, stats.hints_issued, stats.hints_completed, stats.hints_useful) == (1, 2, 2, 1)
        assert stats.hints_unused == 1
        assert stats.bytes_demand == 0
        assert stats.bytes_hint == 2 * experts.experts(1).layout.nbytes


def test_demands_are_read_before_hints(tmp_path):
    experts = make_experts(tmp_path)
    with experts.open(n_slots=4, reader="manual") as store:
        store.hint(1, [2])
        with store.acquire(0, [5]):
            order = fill(store, experts)
            assert list(dict.fromkeys(order)) == [(0, 5), (1, 2)]


def test_what_is_wanted_soon_is_read_before_other_hints(tmp_path):
    experts = make_experts(tmp_path)
    with experts.open(n_slots=4, reader="manual") as store:
        store.hint(2, [4])
        store.hint(1, [2], soon=True)
        with store.acquire(0, [5]):
            order = fill(store, experts)
            assert list(dict.fromkeys(order)) == [(0, 5), (1, 2), (2, 4)]


def test_a_demand_takes_the_slot_of_what_is_wanted_last(tmp_path):
    experts = make_experts(tmp_path)
    with experts.open(n_slots=2, reader="manual") as store:
        store.hint(2, [4])
        store.hint(1, [2], soon=True)
        with store.acquire(0, [5]):
            assert set(fill(store, experts)) == {(0, 5), (1, 2)}


def test_a_hint_that_is_demanded_moves_up(tmp_path):
    experts = make_experts(tmp_path)
    with experts.open(n_slots=4, reader="manual") as store:
        store.hint(1, [2])
        store.hint(2, [4])
        assert fill(store, experts, 1) == [(1, 2)]  # under way
        with store.acquire(2, [4]) as late, store.acquire(0, [0]):
            order = fill(store, experts)
            assert list(dict.fromkeys(order)) == [(2, 4), (0, 0), (1, 2)]
            assert late.next() == [4]
        stats = store.stats()
        assert (stats.late, stats.hints_useful, stats.misses) == (1, 1, 1)


def test_a_hint_never_takes_what_this_token_asked_for(tmp_path):
    experts = make_experts(tmp_path)
    with experts.open(n_slots=3, reader="manual") as store:
        for expert in (0, 1, 2):  # few at a time: the memory is not crowded
            store.next_token()
            load(store, experts, 0, [expert])
        store.next_token()
        load(store, experts, 0, [1, 2])
        store.hint(1, [3, 4])
        fill(store, experts)
        assert resident(store) == {(0, 1), (0, 2), (1, 3)}
        stats = store.stats()
        assert (stats.hints_issued, stats.hints_dropped) == (1, 1)


def test_hints_do_not_take_from_each_other(tmp_path):
    experts = make_experts(tmp_path)
    with experts.open(n_slots=2, reader="manual") as store:
        store.hint(1, [0, 1, 2, 3])
        fill(store, experts)
        assert resident(store) == {(1, 0), (1, 1)}
        store.next_token()
        store.hint(2, [5])
        fill(store, experts)
        assert (2, 5) in resident(store)
        assert store.stats().hints_wasted == 1


def test_a_demand_takes_the_slot_of_a_hint_that_waits(tmp_path):
    experts = make_experts(tmp_path)
    with experts.open(n_slots=2, reader="manual") as store:
        store.hint(1, [0, 1])
        with store.acquire(0, [3, 4]) as lease:
            assert set(fill(store, experts)) == {(0, 3), (0, 4)}
            lease.wait()
        assert store.stats().hints_cancelled == 2


def test_a_demand_waits_for_a_hint_under_way(tmp_path):
    """Its reader writes into the slot, so the slot cannot be had before that read is over; then it can, half filled."""
    experts = make_experts(tmp_path)
    with experts.open(n_slots=1, reader="manual") as store:
        store.hint(1, [0])
        job = store.native.take_job(0)
        with store.acquire(0, [3]) as lease:
            assert store.native.slots() == [(1, 0, 0, "filling")]
            job.buffer[:] = np.frombuffer(experts.contents[1, 0][job.component], np.uint8)
            job.finish(job.length)
            assert set(fill(store, experts)) == {(0, 3)}
            assert lease.next() == [3]
        assert store.stats().hints_cancelled == 1


def test_hints_for_a_layer_end_with_it(tmp_path):
    experts = make_experts(tmp_path)
    with experts.open(n_slots=6, reader="manual") as store:
        store.hint(1, [0, 1])
        store.hint(2, [0])
        with store.acquire(1, [1]) as lease:
            assert set(fill(store, experts)) == {(1, 1), (2, 0)}
            lease.wait()
        store.hint(1, [5])  # for the next token
        store.next_token()
        assert set(fill(store, experts)) == {(1, 5)}
        stats = store.stats()
        assert (stats.hints_issued, stats.hints_cancelled, stats.hints_useful) == (4, 1, 1)


def test_hints_that_wait_for_a_whole_token_are_dropped(tmp_path):
    experts = make_experts(tmp_path)
    with experts.open(n_slots=6, reader="manual") as store:
        store.hint(1, [0])
        store.next_token()
        store.next_token()
        assert fill(store, experts) == []
        assert store.stats().hints_cancelled == 1
