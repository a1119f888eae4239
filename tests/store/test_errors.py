"""A read that failed: who learns of it, what becomes of its slot, and that the store goes on."""

from __future__ import annotations

import errno

import pytest

from moeflux.core.errors import ReadError, StateError
from store.synthetic import fill, load, make_experts, resident


def test_an_error_reaches_everybody_who_waits_and_nobody_else(tmp_path):
    experts = make_experts(tmp_path)
    with experts.open(n_slots=4, reader="manual") as store:
        first, second, other = store.acquire(0, [3]), store.acquire(0, [3, 4]), store.acquire(1, [0])
        jobs = [store.native.take_job(0) for _ in range(2)]
        assert {job.expert for job in jobs} == {3}
        jobs[0].finish(0, errno.EIO, 2)
        assert first.next(wait=False) == []  # one of its components is still being read: nothing is decided yet
        jobs[1].finish(0, errno.EIO)
        for lease in (first, second):
            for _ in range(2):
                with pytest.raises(ReadError, match=r"Input/output error .* tried 3 times") as error:
                    lease.next()
        assert error.value.__cause__.errno == errno.EIO
        third = store.acquire(0, [3])  # while the others still hold the failed slot
        fill(store, experts)
        assert third.next() == [3]
        assert other.next() == [0]
        for lease in (first, second, third, other):
            lease.release()
        assert resident(store) == {(0, 3), (0, 4), (1, 0)}
        stats = store.stats()
        assert (stats.errors, stats.retries, stats.slots_used) == (1, 2, 3)


def test_asked_for_anew_while_the_rest_of_it_arrives(tmp_path):
    experts = make_experts(tmp_path)
    with experts.open(n_slots=4, reader="manual") as store:
        first = store.acquire(0, [3])
        jobs = [store.native.take_job(0) for _ in range(2)]
        jobs[0].finish(0, errno.EIO)
        second = store.acquire(0, [3])
        fill(store, experts)
        assert second.next(wait=False) == [3]
        jobs[1].finish(0, errno.EIO)
        with pytest.raises(ReadError):
            first.next()
        first.release()
        second.release()
        assert resident(store) == {(0, 3)}
        assert store.stats().slots_used == 1


def test_a_hint_that_fails_harms_nobody(tmp_path):
    experts = make_experts(tmp_path)
    with experts.open(n_slots=4, reader="manual") as store:
        store.hint(0, [3])
        store.native.take_job(0).finish(0, errno.EIO)
        assert fill(store, experts) == []
        load(store, experts, 0, [3])
        stats = store.stats()
        assert (stats.hints_failed, stats.hints_useful, stats.errors, stats.misses) == (1, 0, 1, 1)


def test_a_reader_that_gives_up(tmp_path):
    experts = make_experts(tmp_path)
    with experts.open(n_slots=4, reader="manual") as store, store.acquire(0, [3]) as lease:
        job = store.native.take_job(0)
        del job
        with pytest.raises(ReadError, match="the reader gave up"):
            lease.wait()
        with store.acquire(0, [4]) as other:
            job = store.native.take_job(0)
            job.finish(job.length - 1)
            with pytest.raises(ReadError, match="only"):
                other.wait()
            with pytest.raises(StateError, match="finished before"):
                job.finish(job.length)
