"""The store under any order of calls: leased bytes never change, slots never run over, waits end, the counters add up."""

from __future__ import annotations

import errno
import re
import tempfile
from pathlib import Path
from threading import Event, Thread

import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from moeflux.core.errors import BudgetError, ClosedError, FormatError, ReadError
from store.synthetic import CODECS, Experts, held, make_experts

N_LAYERS, N_EXPERTS = 2, 5
IDS = st.lists(st.integers(0, N_EXPERTS - 1), min_size=1, max_size=N_EXPERTS)
LAYER = st.integers(0, N_LAYERS - 1)
PICK = st.integers(0, 100)
POLICY = st.sampled_from(["lru", "lfru"])


class Held:
    """A lease and what the model knows of it."""

    def __init__(
        self, lease, layer: int, ids: list[int], demanded: list[int], protects: set[tuple[int, int]] | None
    ) -> None:
        self.lease = lease
        self.layer = layer
        self.left = set(ids)  # not handed out
        self.demanded = set(demanded)  # and not only swept
        self.open: set[int] = set()  # handed out, not released
        self.failed = False
        self.protects = protects  # where this token keeps what it has asked for


class StoreMachine(RuleBasedStateMachine):
    experts: Experts

    @initialize(
        n_slots=st.integers(1, 7),
        policy=st.sampled_from(["lru", "lfru"]),
        direct=st.booleans(),
        k=st.integers(1, 3),
        keep_scales=st.booleans(),
    )
    def start(self, n_slots, policy, direct, k, keep_scales):
        self.folder = tempfile.TemporaryDirectory()
        self.experts = make_experts(
            Path(self.folder.name), n_layers=N_LAYERS, n_experts=N_EXPERTS, hidden=16, width=8, codec=CODECS["fp8"]
        )
        self.components = list(self.experts.experts(0).layout.components())
        self.n_slots = n_slots
        options = {"policy": policy, "direct": direct, "k": k, "keep_scales": keep_scales, "sweep_slots": 2}
        self.store = self.experts.open(n_slots=n_slots, reader="manual", **options)
        self.keep_scales = keep_scales
        self.kept: set[tuple[int, int, int]] = set()  # by layer, expert and component
        self.leases: list[Held] = []
        self.jobs = []  # taken and not finished
        self.failed: set[tuple[int, int]] = set()
        self.this_token: set[tuple[int, int]] = set()
        self.crowded = False  # then even what this token asked for may make room
        self.closed = False

    def slots(self, *states: str) -> list[tuple[int, int]]:
        return [(layer, expert) for layer, expert, _, state in self.store.native.slots() if state in states]

    @invariant()
    def forget_evicted(self):
        """What a demand has taken away is not protected when a sweep brings it back."""
        self.this_token &= set(self.slots("ready", "leased"))

    # Calls.

    @precondition(lambda self: not self.closed and len(self.leases) < 4)
    @rule(layer=LAYER, ids=IDS, swept=st.lists(st.integers(0, N_EXPERTS - 1), max_size=N_EXPERTS))
    def acquire(self, layer, ids, swept):
        lease = self.store.acquire(layer, ids, swept=swept)
        self.leases.append(Held(lease, layer, [*ids, *swept], ids, None if self.crowded else self.this_token))

    @precondition(lambda self: not self.closed and len(self.leases) < 4)
    @rule(layer=LAYER, ids=IDS)
    def sweep(self, layer, ids):
        self.leases.append(Held(self.store.acquire(layer, ids, sweep=True), layer, ids, [], None))

    @precondition(lambda self: not self.closed)
    @rule(layer=LAYER, ids=IDS, sweep=st.booleans(), soon=st.booleans())
    def hint(self, layer, ids, sweep, soon):
        leased = set(self.slots("leased"))
        self.store.hint(layer, ids, sweep=sweep, soon=soon)
        assert self.this_token <= set(self.slots("ready", "leased"))
        assert leased <= set(self.slots("leased"))

    @rule()
    def next_token(self):
        self.crowded = self.store.next_token()
        self.this_token = set()

    @precondition(lambda self: len(self.jobs) < 6)
    @rule()
    def take(self):
        job = self.store.native.take_job(0)
        assert not (job and self.closed)
        if job:
            assert (job.layer, job.expert) in self.slots("filling")
            assert (job.layer, job.expert, job.component) not in self.kept
            self.jobs.append(job)

    @precondition(lambda self: self.jobs)
    @rule(pick=PICK)
    def finish_well(self, pick):
        self.serve(self.jobs.pop(pick % len(self.jobs)))

    @precondition(lambda self: self.jobs)
    @rule(pick=PICK, how=st.sampled_from(["eio", "short", "dropped", "broken"]))
    def finish_badly(self, pick, how):
        job = self.jobs.pop(pick % len(self.jobs))
        self.failed.add((job.layer, job.expert))
        job.buffer[:] = 0xFF  # garbage must never be seen; as numbers, all of it is NaN
        if how == "eio":
            job.finish(0, errno.EIO)
        elif how == "short":
            job.finish(job.length - 1)
        elif how == "broken":
            job.finish(job.length)
        del job

    def serve(self, job):
        self.forget_evicted()
        job.buffer[:] = np.frombuffer(self.experts.contents[job.layer, job.expert][job.component], np.uint8)
        job.finish(job.length)
        if self.keep_scales and not self.components[job.component].is_weight and not self.closed:
            self.kept.add((job.layer, job.expert, job.component))

    @precondition(lambda self: self.leases)
    @rule(pick=PICK)
    def look(self, pick):
        self.next(self.leases[pick % len(self.leases)], wait=False)

    @precondition(lambda self: self.leases)
    @rule(pick=PICK)
    def wait(self, pick):
        """With a reader at work, every wait ends: with experts, at the end, or with an error.

        The reader is this thread as long as it can be, so that runs can be repeated.
        """
        lease = self.leases[pick % len(self.leases)]
        while self.jobs:
            self.serve(self.jobs.pop())
        more = True
        while more:
            while job := self.store.native.take_job(0):
                self.serve(job)
            if not self.next(lease, wait=False):
                more = bool(lease.left) and not lease.failed and self.next_with_a_reader(lease)

    def next_with_a_reader(self, lease: Held) -> bool:
        stop = Event()
        reader = Thread(target=self.read_until, args=(stop,))
        reader.start()
        try:
            return self.next(lease, wait=True)
        finally:
            stop.set()
            reader.join()

    def read_until(self, stop):
        while not stop.is_set():
            if job := self.store.native.take_job(0.01):
                self.serve(job)

    def next(self, lease: Held, wait: bool) -> bool:
        """Whether there may be more."""
        try:
            ready = lease.lease.next(wait=wait)
        except ClosedError:
            assert self.closed
            return False
        except (ReadError, FormatError) as error:
            layer, expert = map(int, re.search(r"layer (\d+), expert (\d+)", str(error)).groups())
            assert (layer, expert) in self.failed
            assert layer == lease.layer
            assert expert in lease.left
            lease.failed = True
            return False
        except BudgetError:
            assert wait
            assert set(self.slots("empty", "ready", "filling", "failing")) == set()
            return False
        assert not lease.failed
        assert set(ready) <= lease.left
        assert ready == sorted(ready)
        lease.left -= set(ready)
        lease.open |= set(ready)
        if lease.protects is not None:
            lease.protects |= {(lease.layer, expert) for expert in ready if expert in lease.demanded}
        assert ready or not wait or not lease.left
        return bool(ready)

    @precondition(lambda self: any(lease.open for lease in self.leases))
    @rule(pick=PICK, n=st.integers(1, 3))
    def release_some(self, pick, n):
        candidates = [lease for lease in self.leases if lease.open]
        lease = candidates[pick % len(candidates)]
        some = sorted(lease.open)[:n]
        lease.lease.release(some)
        lease.open -= set(some)

    @precondition(lambda self: self.leases)
    @rule(pick=PICK)
    def release(self, pick):
        self.leases.pop(pick % len(self.leases)).lease.release()

    @rule()
    def close(self):
        self.store.close()
        self.closed = True

    # What always holds.

    @invariant()
    def leased_bytes_are_the_files(self):
        for lease in self.leases:
            for expert in lease.open:
                assert held(lease.lease, expert) == self.experts.contents[lease.layer, expert]

    @invariant()
    def slots_hold_what_leases_hold(self):
        if self.closed:
            return
        slots = self.store.native.slots()
        assert len(slots) == self.n_slots
        inside = self.slots("filling", "ready", "leased")
        assert len(inside) == len(set(inside))
        pins = {(layer, expert): n for layer, expert, n, state in slots if state == "leased"}
        for lease in self.leases:
            for expert in lease.open:
                assert pins.get((lease.layer, expert), 0) >= sum(
                    other.layer == lease.layer and expert in other.open for other in self.leases
                )
        if not self.leases:
            assert all(n == 0 and state != "failed" for _, _, n, state in slots)

    @invariant()
    def counters_add_up(self):
        s = self.store.stats()
        assert s.asked == s.hits + s.late + s.joined + s.misses
        assert s.hints_unused >= 0
        assert s.hints_useful + s.hints_wasted + s.hints_failed <= s.hints_issued
        assert s.hints_completed + s.hints_cancelled <= s.hints_issued
        assert s.slots == self.n_slots >= s.slots_used
        if not self.closed:
            size = sum(c.nbytes for c in self.components if c.is_weight or not self.keep_scales)
            kept = sum(self.components[component].nbytes for _, _, component in self.kept)
            assert s.slots_used == sum(state != "empty" for *_, state in self.store.native.slots())
            assert s.bytes_resident == size * len(self.slots("ready", "leased")) + kept

    def teardown(self):
        if not hasattr(self, "store"):
            return
        self.store.close()
        for lease in self.leases:
            with pytest.raises(ClosedError):
                lease.lease.next()
            lease.lease.release()
        self.jobs.clear()
        self.folder.cleanup()


StoreMachine.TestCase.settings = settings(max_examples=60, stateful_step_count=60, deadline=None)
TestStore = StoreMachine.TestCase
