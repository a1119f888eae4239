"""Experts in a device's slots, with a device that delays and reorders: what it reads is what was asked for, always."""

from __future__ import annotations

from contextlib import contextmanager
from functools import partial

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from moeflux.core.errors import OptionError
from moeflux.store.device import DeviceTier
from store.fake_device import FakeDevice

N_LAYERS, N_EXPERTS, SIZE = 3, 12, 5


def content(layer, expert):
    return np.full(SIZE, 1 + layer * N_EXPERTS + expert, np.uint8)


class Host:
    """The tier below: experts arrive in groups, and their memory is used again when the next are asked for."""

    def __init__(self, group=3):
        self.group, self.leases = group, 0

    @contextmanager
    def acquire(self, layer, experts, sweep):
        self.leases += 1
        try:
            yield self._Lease(layer, experts, self.group)
        finally:
            self.leases -= 1

    class _Lease:
        def __init__(self, layer, experts, group):
            self.layer, self.experts, self.group = layer, experts, group

        def arrivals(self, cancel=None):
            for start in range(0, len(self.experts), self.group):
                some = self.experts[start : start + self.group]
                bank = {expert: content(self.layer, expert) for expert in some}
                try:
                    yield bank, some
                finally:
                    for memory in bank.values():
                        memory[:] = 0xFF


class Reader:
    """Asks the device to look at every expert that it was given, and compares what it saw when it got there."""

    def __init__(self, tier, device):
        self.tier, self.device, self.seen = tier, device, []

    def run(self, layer, ids, sweep=False, stop_after=None):
        for n, some in enumerate(self.tier.rounds(layer, ids, sweep=sweep)):
            for expert in some:
                self.device.ask(partial(self._look, (layer, expert), self.tier.slot(layer, expert)))
            if stop_after == n:
                break

    def _look(self, key, slot):
        self.seen.append((key, self.device.slots[slot].copy()))

    def check(self, expected):
        self.device.drain()
        assert sorted(key for key, _ in self.seen) == sorted(expected)
        for (layer, expert), found in self.seen:
            np.testing.assert_array_equal(found, content(layer, expert))
        self.seen.clear()


STEPS = st.lists(
    st.tuples(st.integers(0, N_LAYERS - 1), st.sets(st.integers(0, N_EXPERTS - 1), min_size=1), st.booleans()), max_size=12
)


@settings(max_examples=200)
@given(steps=STEPS, n_slots=st.integers(1, 20), seed=st.integers(0, 10**6), group=st.integers(1, 5))
def test_the_device_sees_what_was_asked_for(steps, n_slots, seed, group):
    device, host = FakeDevice(n_slots, SIZE, seed), Host(group)
    tier = DeviceTier(device, host.acquire)
    reader = Reader(tier, device)
    for layer, ids, sweep in steps:
        reader.run(layer, ids, sweep)
    reader.check([(layer, expert) for layer, ids, _ in steps for expert in ids])
    assert host.leases == 0


def test_what_is_there_is_not_copied_again():
    device = FakeDevice(4, SIZE)
    tier = DeviceTier(device, Host().acquire)
    reader = Reader(tier, device)
    for _ in range(3):
        reader.run(0, [1, 2, 3])
    assert (tier.hits, tier.misses) == (6, 3)
    reader.run(0, [1])
    reader.run(0, [4])
    device.drain()
    reader.run(0, [5])  # 2 was used longest ago
    assert [tier.holds(0, expert) for expert in (1, 2, 3, 4, 5)] == [True, False, True, True, True]
    reader.check([(0, e) for e in [1, 2, 3] * 3 + [1, 4, 5]])


def test_a_prompt_leaves_what_decoding_uses():
    device = FakeDevice(4, SIZE)
    tier = DeviceTier(device, Host().acquire)
    reader = Reader(tier, device)
    reader.run(0, [1, 2, 3])
    reader.run(0, range(4, 12), sweep=True)
    assert all(tier.holds(0, expert) for expert in (2, 3))
    reader.check([(0, e) for e in range(1, 12)])


def test_a_slot_is_not_filled_before_the_device_has_passed():
    device = FakeDevice(1, SIZE)
    tier = DeviceTier(device, Host().acquire)
    done = []
    for _ in tier.rounds(0, [1]):
        device.ask(lambda: done.append(device.slots[0].copy()))
    rounds = tier.rounds(0, [2])
    next(rounds)  # there is one slot only: the copy into it waits for the work above
    np.testing.assert_array_equal(done, [content(0, 1)])


def test_a_failed_copy_leaves_the_others():
    device, host = FakeDevice(4, SIZE), Host()
    tier = DeviceTier(device, host.acquire)
    reader = Reader(tier, device)
    reader.run(0, [1, 2])
    device.fail = True
    with pytest.raises(OSError, match="the device is gone"):
        reader.run(0, [1, 3])
    device.fail = False
    assert not tier.holds(0, 3)
    reader.run(0, [1, 2, 3, 4, 5])
    reader.check([(0, e) for e in (1, 2, 1, 1, 2, 3, 4, 5)])


def test_who_stops_half_way_holds_nothing():
    device, host = FakeDevice(2, SIZE), Host(1)
    tier = DeviceTier(device, host.acquire)
    reader = Reader(tier, device)
    reader.run(0, [1, 2, 3, 4], stop_after=1)
    reader.run(1, [7, 8, 9])
    reader.check([(0, 1), (0, 2), (1, 7), (1, 8), (1, 9)])
    assert host.leases == 0


def test_no_slots_is_no_tier():
    with pytest.raises(OptionError, match="without slots"):
        DeviceTier(FakeDevice(0, SIZE), Host().acquire)
