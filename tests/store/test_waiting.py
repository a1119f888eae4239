"""More experts than slots: leases wait for each other, sweeps release as they go, and what can never end is an error."""

from __future__ import annotations

import threading
import time
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest

from moeflux.core.errors import BudgetError, ClosedError
from store.synthetic import fill, held, load, make_experts, resident


def until(holds) -> None:
    deadline = time.monotonic() + 30
    while not holds():
        assert time.monotonic() < deadline
        time.sleep(0.001)


def test_a_full_pool_is_an_error_with_numbers(tmp_path):
    experts = make_experts(tmp_path)
    with experts.open(n_slots=3) as store:
        with store.acquire(1, [0, 1, 2, 3, 4]) as lease:
            with pytest.raises(BudgetError, match=r"all 3 slots are leased \(3 by this lease of 5 experts\), and 2 more"):
                lease.wait()
            lease.release([0, 1, 2])
            assert sorted(lease.next() + lease.next()) == [3, 4]  # and goes on once there is room
        load_native(store, experts, 0, 5)


def load_native(store, experts, layer, expert):
    with store.acquire(layer, [expert]) as lease:
        lease.wait()
        assert held(lease, expert) == experts.contents[layer, expert]


def test_a_thread_that_holds_all_slots_cannot_wait_for_one(tmp_path):
    experts = make_experts(tmp_path)
    with experts.open(n_slots=2) as store, store.acquire(0, [0, 1]) as first, store.acquire(1, [0]) as second:
        first.wait()
        with pytest.raises(BudgetError, match="slot pool is full"):
            second.wait()
        first.release()
        second.wait()


def test_a_lease_waits_for_another_thread(tmp_path):
    experts = make_experts(tmp_path)
    with experts.open(n_slots=2) as store, ThreadPoolExecutor(1) as other:
        first = store.acquire(0, [0, 1])
        first.wait()
        waiting = other.submit(load_native, store, experts, 1, 0)
        until(lambda: store.stats().acquires == 2)
        time.sleep(0.05)
        assert not waiting.done()
        first.release()
        waiting.result(30)
        assert store.stats().stall_ns > 10_000_000


def test_two_threads_that_wait_for_each_other(tmp_path):
    """Each holds half of the slots and wants more: the second to find out gets an error, the first goes on."""
    experts = make_experts(tmp_path)
    both = threading.Barrier(2)

    def work(layer):
        with store.acquire(layer, [0, 1]) as lease:
            lease.wait()
            both.wait()
            with store.acquire(layer, [2]) as more:
                more.wait()
                return held(more, 2) == experts.contents[layer, 2]

    with experts.open(n_slots=4) as store, ThreadPoolExecutor(2) as threads:
        results = [threads.submit(work, layer) for layer in (0, 1)]
        errors = [result.exception(30) for result in results]
        assert sorted(type(error).__name__ for error in errors) == ["BudgetError", "NoneType"]
        assert all(result.result() for result, error in zip(results, errors, strict=True) if error is None)


def test_close_ends_every_wait(tmp_path):
    experts = make_experts(tmp_path)
    store = experts.open(n_slots=2, reader="manual")
    with ThreadPoolExecutor(2) as threads:
        leases = [store.acquire(0, [0, 1]), store.acquire(1, [0])]
        waits = [threads.submit(lease.next) for lease in leases]
        job = store.native.take_job(0)
        time.sleep(0.05)
        store.close()
        assert {type(wait.exception(30)) for wait in waits} == {ClosedError}
    job.buffer[:] = 1  # a read that comes back late finds its memory
    job.finish(job.length)
    for lease in leases:
        lease.release()


@pytest.mark.parametrize("direct", [False, True])
@pytest.mark.parametrize("reader", ["native", "python"])
def test_close_with_reads_in_flight(tmp_path, reader, direct):
    experts = make_experts(tmp_path, hidden=512, width=512, n_experts=8)
    for seed in range(10):
        store = experts.open(n_slots=16, reader=reader, direct=direct, n_readers=3)
        lease = store.acquire(0, range(8), sweep=True)
        store.hint(1, range(8))
        time.sleep(seed * 0.0003)
        store.close()
        with pytest.raises(ClosedError):
            lease.wait()
        lease.release()


@pytest.mark.parametrize("reader", ["native", "python"])
def test_a_sweep_larger_than_memory(tmp_path, reader):
    experts = make_experts(tmp_path, n_experts=24)
    with experts.open(n_slots=5, reader=reader) as store:
        for layer in (0, 1):
            with store.acquire(layer, range(24), sweep=True) as lease:
                seen = []
                while ready := lease.next():
                    for expert in ready:
                        assert held(lease, expert) == experts.contents[layer, expert]
                    seen += ready
                    lease.release(ready)
                assert sorted(seen) == list(range(24))
        assert store.stats().misses == 48


def test_a_sweep_leaves_the_rest_of_memory_alone(tmp_path):
    experts = make_experts(tmp_path, n_experts=24)
    with experts.open(n_slots=8, reader="manual", k=1, sweep_slots=2) as store:
        load(store, experts, 0, [0, 1, 2])
        load(store, experts, 1, [0, 1, 2])
        with store.acquire(2, range(24), sweep=True) as lease:
            for _ in range(24):
                fill(store, experts)
                ready = lease.next(wait=False)
                assert len(ready) <= 2
                lease.release(ready)
                if not lease.native.left:
                    break
        kept = resident(store)
        assert {(0, 0), (0, 1), (0, 2), (1, 0), (1, 1), (1, 2)} <= kept
        before = store.stats()
        with store.acquire(2, range(24), sweep=True) as lease:  # what the first one left is found by the second
            lease.next()
        assert store.stats().since(before).hits == 2


def test_hints_for_a_sweep_take_only_what_sweeps_left(tmp_path):
    experts = make_experts(tmp_path, n_experts=24)
    with experts.open(n_slots=8, reader="manual", k=1, sweep_slots=2) as store:
        load(store, experts, 0, range(6))
        with store.acquire(1, range(24), sweep=True) as lease:
            while lease.native.left:
                store.hint(2, [7], sweep=True)  # its slots are all in use
                assert store.stats().hints_issued == 0
                fill(store, experts)
                lease.release(lease.next(wait=False))
        store.next_token()
        store.hint(2, range(24), sweep=True)
        fill(store, experts)
        kept = resident(store)
        assert {(0, expert) for expert in range(6)} | {(2, 0), (2, 1)} == kept
        with store.acquire(2, range(24), sweep=True) as lease:
            assert lease.next(wait=False) == [0, 1]
            fill(store, experts)
            assert resident(store) == kept  # they count as its own: the sweep takes no slots besides
        assert store.stats().hints_useful == 2


def test_a_sweep_that_keeps_everything_is_an_error(tmp_path):
    experts = make_experts(tmp_path, n_experts=24)
    with experts.open(n_slots=5, sweep_slots=2) as store:
        with store.acquire(0, range(24), sweep=True) as lease, pytest.raises(BudgetError, match="19 more"):
            lease.wait()
        load_native(store, experts, 1, 1)


def test_many_threads(tmp_path):
    """Random leases of several threads over few slots: every lease shows the file's bytes until its end."""
    experts = make_experts(tmp_path, n_experts=12)
    stop = time.monotonic() + 2

    def work(seed):
        rng = np.random.default_rng(seed)
        n = 0
        while time.monotonic() < stop:
            layer, ids = int(rng.integers(3)), rng.integers(0, 12, 2)
            if rng.random() < 0.3:
                store.hint(int(rng.integers(3)), rng.integers(0, 12, 3))
            with store.acquire(layer, ids) as lease:
                lease.wait()
                before = {e: held(lease, e) for e in set(ids.tolist())}
                time.sleep(rng.random() * 0.001)
                for expert, data in before.items():
                    assert data == held(lease, expert) == experts.contents[layer, expert]
            store.next_token()
            n += 1
        return n

    with experts.open(n_slots=9, n_readers=3) as store, ThreadPoolExecutor(4) as threads:
        assert min(threads.map(work, range(4))) > 10
        stats = store.stats()
        assert stats.asked == stats.hits + stats.late + stats.joined + stats.misses
        assert stats.evictions > 0
