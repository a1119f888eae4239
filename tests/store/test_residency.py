"""Which expert goes: order, floors, hints and sweeps, by the store's own bookkeeping."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from moeflux.core.errors import InputError, OptionError
from moeflux.store.policy import Residency, layer_floor


def test_lru_order():
    memory = Residency(1, 10, 3, 0)
    assert memory.access(0, [0, 1, 2]) == [0, 1, 2]
    assert memory.access(0, [0]) == []
    assert memory.access(0, [3]) == [3]  # 1 is the oldest
    assert [e for e in range(10) if memory.holds(0, e)] == [0, 2, 3]
    assert memory.access(0, [2, 4]) == [4]  # what is asked for at once does not make room for its company
    assert [e for e in range(10) if memory.holds(0, e)] == [2, 3, 4]
    assert memory.evictions == 2


def test_more_at_once_than_slots():
    memory = Residency(1, 10, 3, 0)
    assert memory.access(0, [0, 1, 2, 3, 4]) == [0, 1, 2, 3, 4]
    assert memory.count(0) == 3


@pytest.mark.parametrize(("n_slots", "expected"), [(8, 2), (100, 2), (7, 1), (4, 1), (3, 0)])
def test_floor_of_a_layer(n_slots, expected):
    assert layer_floor(n_slots, n_layers=4, k=2) == expected


@given(seed=st.integers(0, 2**31), policy=st.sampled_from(["lru", "lfru"]), n_slots=st.integers(4, 24))
def test_a_layer_at_its_floor_loses_nothing_to_others(seed, policy, n_slots):
    n_layers, k = 4, 2
    floor = layer_floor(n_slots, n_layers, k)
    memory, rng = Residency(n_layers, 12, n_slots, floor, policy), np.random.default_rng(seed)
    for _ in range(60):
        before = [memory.count(layer) for layer in range(n_layers)]
        layer = int(rng.integers(n_layers))
        if rng.random() < 0.3:
            memory.hint(layer, rng.integers(0, 12, 3))
        else:
            memory.access(layer, rng.integers(0, 12, floor), sweep=bool(rng.random() < 0.2))
        for other in range(n_layers):
            if other != layer:
                assert memory.count(other) >= min(before[other], floor)
        assert sum(memory.count(each) for each in range(n_layers)) <= n_slots


def cyclic(memory, n_layers, n_tokens, k, rng, n_experts=32, overlap=0.5):
    """Layer after layer, token after token, some experts again each time. Returns the hit rate of the second half."""
    last = [rng.choice(n_experts, k, replace=False) for _ in range(n_layers)]
    asked = missed = 0
    for token in range(n_tokens):
        memory.next_token()
        for layer in range(n_layers):
            fresh = rng.choice(n_experts, k, replace=False)
            ids = np.unique(np.where(rng.random(k) < overlap, last[layer], fresh))
            misses = memory.access(layer, ids)
            if token >= n_tokens // 2:
                asked += len(ids)
                missed += len(misses)
            last[layer] = np.resize(ids, k)
    return 1 - missed / asked


@pytest.mark.parametrize("policy", ["lru", "lfru"])
def test_there_is_no_cliff_below_a_working_set(policy):
    """By age alone, nothing is found as soon as a token's experts do not all fit, because layers come round in order."""
    n_layers, k = 12, 4
    n_slots = n_layers * k - 6
    floor = layer_floor(n_slots, n_layers, k)
    memory = Residency(n_layers, 32, n_slots, floor, policy)
    assert cyclic(memory, n_layers, 60, k, np.random.default_rng(0)) > 0.25
    assert memory.crowded


STEP_WISE = [(0.25, 16), (0.5, 16), (0.75, 16), (0.5, 9), (0.25, 2)]


@pytest.mark.parametrize("policy", ["lru", "lfru"])
@pytest.mark.parametrize(("share", "n_rows"), STEP_WISE)
def test_many_rows_do_not_thrash(policy, share, n_rows):
    """Rows that go on decoding: a memory that changes with them finds at least what one finds that is frozen."""
    n_layers, n_experts, n_steps = 6, 32, 200
    n_slots = int(share * n_layers * n_experts)
    rng = np.random.default_rng(5)
    popular = rng.permuted(np.tile(1 / np.arange(1, n_experts + 1) ** 0.5, (n_layers, 1)), axis=1)
    hits = {}
    for frozen in (False, True):
        memory, draw = Residency(n_layers, n_experts, n_slots, 4, policy), np.random.default_rng(6)
        asked = missed = 0
        for step in range(n_steps):
            memory.next_token()
            for layer in range(n_layers):
                p = popular[layer] / popular[layer].sum()
                ids = np.unique([draw.choice(n_experts, 4, replace=False, p=p) for _ in range(n_rows)])
                misses = memory.access(layer, ids, sweep=frozen and step >= 10)
                asked += len(ids) * (step >= 50)
                missed += len(misses) * (step >= 50)
        hits[frozen] = 1 - missed / asked
    assert hits[False] >= hits[True] - 0.02


def crowd(memory, n_layers, ids, n_steps):
    """Every layer is asked for these, step after step."""
    for _ in range(n_steps):
        memory.next_token()
        for layer in range(n_layers):
            memory.access(layer, ids)


@pytest.mark.parametrize("policy", ["lru", "lfru"])
def test_a_crowded_memory_learns_what_is_popular(policy):
    """More is asked for than fits, but for what comes again in every step a place is found, and it stays."""
    n_layers, memory, rng = 3, Residency(3, 64, 48, 4, policy), np.random.default_rng(0)
    crowd(memory, n_layers, range(32, 64), 4)
    for _ in range(30):
        crowd(memory, n_layers, [3, 4, *rng.choice(np.arange(8, 64), 28, replace=False)], 1)
        assert memory.crowded
    assert all(memory.holds(layer, expert) for layer in range(n_layers) for expert in (3, 4))
    assert [len(set(memory.access(layer, [3, 4]))) for layer in range(n_layers)] == [0, 0, 0]


def test_layers_of_a_crowded_memory_come_to_keep_the_same_number():
    memory = Residency(4, 64, 40, 2, "lfru")
    memory.access(0, range(40))  # one has all
    crowd(memory, 4, range(30), 8)
    assert all(5 <= memory.count(layer) <= 15 for layer in range(4))


def test_hints_for_a_crowded_memory_take_only_what_passes():
    memory = Residency(2, 32, 12, 2)
    crowd(memory, 2, range(10), 3)
    memory.next_token()
    kept = {(layer, e) for layer in range(2) for e in range(32) if memory.holds(layer, e)}
    found = memory.hint(1, range(20, 32))
    left = {(layer, e) for layer in range(2) for e in range(20) if memory.holds(layer, e)}
    assert 0 < len(found) < 10
    assert len(kept - left) == len(found)
    misses = memory.access(1, range(10))  # foreseen wrongly: what was hinted passes, and goes first
    memory.next_token()
    memory.access(0, range(10))
    memory.access(1, range(10))
    assert len(misses) < 10
    assert not any(memory.holds(1, expert) for expert in found)


def test_demands_beside_a_sweep():
    memory = Residency(1, 40, 8, 0)
    memory.access(0, range(6))
    assert memory.access(0, [0, 6], swept=range(20, 40)) == [6, *range(20, 40)]
    assert memory.holds(0, 6)
    assert memory.access(0, [0], swept=[0, 6]) == []  # asked for by both: a demand
    with pytest.raises(InputError, match="n_swept"):
        memory._native.access(0, np.arange(3), 4)


def test_a_sweep_keeps_the_rest():
    memory = Residency(2, 50, 10, 0)
    memory.access(0, range(8))
    assert memory.access(1, range(50), sweep=True) == list(range(50))
    assert all(memory.holds(0, expert) for expert in range(8))
    assert memory.count(1) == 2
    again = memory.access(1, range(50), sweep=True)
    assert len(again) == 48  # what the sweep left behind is found again,
    memory.access(0, [8, 9])  # and goes first afterwards
    assert memory.count(1) == 0
    assert memory.count(0) == 10


def test_hits_of_a_sweep_change_no_order():
    memory = Residency(1, 10, 3, 0)
    for expert in (0, 1, 2):
        memory.access(0, [expert])
    assert memory.access(0, [0], sweep=True) == []
    memory.access(0, [5])
    assert not memory.holds(0, 0)


def test_hints():
    memory = Residency(2, 10, 4, 0)
    memory.access(0, [0, 1])
    memory.next_token()
    memory.access(0, [2])
    assert memory.hint(1, [0, 1, 2, 3, 4]) == [0, 1, 2]  # a free slot and two of the token before, never this token's
    assert memory.holds(0, 2)
    assert memory.hint(1, [0, 5]) == []  # one is there, and hints take nothing from each other
    assert memory.access(1, [1, 2]) == []
    assert memory.hints_useful == 2
    memory.next_token()
    memory.access(0, [5, 6, 7])
    assert memory.hints_wasted == 1


def test_frequency_beats_recency_on_a_skewed_trace():
    """A few experts are wanted again and again, many once: age alone forgets the few."""
    rng = np.random.default_rng(3)
    weights = 1 / np.arange(1, 257) ** 1.1
    drawn = rng.choice(256, 40_000, p=weights / weights.sum())
    rates = {}
    for policy in ("lru", "lfru"):
        memory = Residency(1, 256, 64, 0, policy)
        misses = [len(memory.access(0, [expert])) for expert in drawn]
        rates[policy] = 1 - np.mean(misses[20_000:])
    assert rates["lfru"] > rates["lru"] + 0.02


def test_old_requests_count_ever_less():
    memory = Residency(1, 64, 16, 0, "lfru")
    for _ in range(200):
        memory.access(0, [0, 1, 2, 3])
    rng = np.random.default_rng(0)
    for _ in range(4000):  # other times, other experts
        memory.access(0, 4 + rng.integers(0, 40, 2))
    assert not any(memory.holds(0, expert) for expert in range(4))


def test_wrong_arguments():
    with pytest.raises(OptionError, match="lru, lfru"):
        Residency(1, 1, 1, 0, "fifo")
    with pytest.raises(InputError, match="n_slots"):
        Residency(1, 1, 0, 0)
    for layer, expert in ((1, 0), (-1, 0), (0, 4), (0, -1)):
        with pytest.raises(InputError, match=r"layer|expert"):
            Residency(1, 4, 1, 0).access(layer, [expert])
        with pytest.raises(InputError, match=r"layer|expert"):
            Residency(1, 4, 1, 0).hint(layer, [expert])
