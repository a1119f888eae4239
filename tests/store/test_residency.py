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


def test_floors_remove_the_cliff():
    """Just below one token's working set a plain LRU hits nothing; with floors a layer keeps some of its own."""
    n_layers, k = 12, 4
    n_slots = n_layers * k - 6
    plain = cyclic(Residency(n_layers, 32, n_slots, 0), n_layers, 60, k, np.random.default_rng(0))
    kept = cyclic(
        Residency(n_layers, 32, n_slots, layer_floor(n_slots, n_layers, k)), n_layers, 60, k, np.random.default_rng(0)
    )
    assert plain < 0.15
    assert kept > 0.25


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
