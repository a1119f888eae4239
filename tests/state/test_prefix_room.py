"""The memory of a prefix store: within the plan and exactly counted, at every moment, whatever is on its way."""

from __future__ import annotations

import shutil
import tempfile
import threading
from functools import cache
from pathlib import Path

import numpy as np
import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

import moeflux
from conftest import DATA
from moeflux.core.errors import BudgetError, OptionError, ReadError, SnapshotError, StateError
from moeflux.runtime.snapshot import SnapshotSizes, unshared_bytes
from moeflux.session import disk
from moeflux.session.entry import Limits
from moeflux.session.held import Held
from moeflux.session.prefixes import PrefixStore
from moeflux.session.session import Session
from state.families import FAMILIES, HYBRID, PLAIN, fresh_logits, opened, text

SIZES = st.sampled_from([3, 20, 255, 256, 257, 300, 520])


def engine(name=HYBRID):
    return opened(name, prefixes="20MB")


def held_by(snapshot):
    return unshared_bytes([snapshot], ())


@cache
def computed(name, tokens):
    sequence = engine(name).sequence()
    engine(name).prefill(sequence, tokens)
    return sequence.snapshot()


def sequence_of(name, tokens):
    """One of its own, computed once."""
    sequence = engine(name).sequence()
    sequence.adopt(computed(name, tuple(tokens)))
    return sequence


def test_more_than_the_plan_has_is_refused():
    with pytest.raises(BudgetError, match=r"50 MB.*20 MB") as caught:
        PrefixStore(engine(), Limits(50 * 10**6))
    assert "prefixes=50000000" in caught.value.hint
    with moeflux.load(DATA / "mlx" / PLAIN, context=64) as without:
        with pytest.raises(BudgetError, match="0 B"):
            PrefixStore(without, Limits(1))
        nothing = PrefixStore(without)
        assert Session(without, nothing).sync(text(5)).created == 0


def test_limits_that_make_no_sense_are_refused():
    for limits in ({"ram_bytes": -1}, {"disk_bytes": -1}, {"ttl_seconds": float("nan")}):
        with pytest.raises(OptionError, match="not a limit"):
            Limits(**limits)


@pytest.mark.parametrize("name", FAMILIES)
@pytest.mark.parametrize("n", [1, 255, 256, 257])
def test_the_bytes_of_a_state_are_known_before_it_is_read(name, n):
    snapshot = sequence_of(name, text(n)).snapshot()
    assert SnapshotSizes.of(engine(name).new_states()).held_bytes(n) == held_by(snapshot)


def test_room_is_made_before_a_state_is_copied(monkeypatch):
    sequence = sequence_of(HYBRID, text(20))
    one = held_by(sequence.snapshot())
    prefixes = PrefixStore(engine(), Limits(one))
    prefixes.put_sequence(sequence_of(HYBRID, text(20, 1)))
    copy = type(sequence).snapshot

    def watched(self):
        assert prefixes.ram_bytes == 0
        return copy(self)

    monkeypatch.setattr(type(sequence), "snapshot", watched)
    assert prefixes.put_sequence(sequence)
    assert prefixes.ram_bytes == one
    monkeypatch.setattr(type(sequence), "snapshot", lambda _: pytest.fail("it is there already"))
    assert prefixes.put_sequence(sequence)


def test_a_sequence_that_cannot_be_used_is_not_kept(monkeypatch):
    sequence = sequence_of(HYBRID, text(20))
    prefixes = PrefixStore(engine())
    monkeypatch.setattr(sequence, "_broken_by", "a drive")
    with pytest.raises(StateError):
        prefixes.put_sequence(sequence)
    assert (prefixes.lengths, prefixes.ram_bytes) == ((), 0)


class Gate:
    """Writes wait until they are let through, one by one."""

    def __init__(self, patch):
        self.pass_one, self.save = threading.Semaphore(0), disk.save_snapshot
        patch.setattr("moeflux.session.disk.save_snapshot", self)

    def __call__(self, *args):
        assert self.pass_one.acquire(timeout=60)
        return self.save(*args)

    def open(self):
        self.pass_one.release(1000)


def test_what_waits_for_the_disk_counts(tmp_path, monkeypatch):
    gate = Gate(monkeypatch)
    sequences = [sequence_of(HYBRID, text(20, branch)) for branch in range(4)]
    one = held_by(sequences[0].snapshot())
    prefixes = PrefixStore(engine(), Limits(2 * one), tmp_path)
    assert [prefixes.put_sequence(sequence) for sequence in sequences] == [True, True, False, False]
    assert prefixes.ram_bytes == 2 * one
    prefixes.drop(text(20, 0))  # but it is still being written
    assert prefixes.ram_bytes == 2 * one
    assert not prefixes.put_sequence(sequences[2])
    gate.open()
    prefixes.flush()
    assert (prefixes.ram_bytes, prefixes.lengths) == (one, (20,))
    assert prefixes.put_sequence(sequences[2])
    prefixes.close()
    assert len(list(tmp_path.rglob("*.state"))) == 2


def on_disk(folder, *branches):
    """Entries of a store that has them on disk only."""
    prefixes = PrefixStore(engine(), Limits(), folder)
    for branch in branches:
        prefixes.put_sequence(sequence_of(HYBRID, text(20, branch)))
        prefixes.flush()
    prefixes.close()


def entry_of(prefixes, branch):
    ((length, entry),) = prefixes.candidates(text(20, branch), 20)
    assert length == 20
    return entry


def test_a_state_is_read_beside_other_work(tmp_path):
    on_disk(tmp_path, 1, 2)
    one = SnapshotSizes.of(engine().new_states()).held_bytes(20)
    prefixes = PrefixStore(engine(), Limits(one), tmp_path)
    fetch = prefixes.fetch(entry_of(prefixes, 1))
    assert (prefixes.ram_bytes, fetch.n_bytes, fetch.entry.fetches) == (one, one, 1)
    assert prefixes.fetch(entry_of(prefixes, 2)) is None  # no room meanwhile
    assert not prefixes.put_sequence(sequence_of(HYBRID, text(20, 3)))
    found = []
    reader = threading.Thread(target=lambda: found.append(fetch.read()))
    reader.start()
    engine().score(text(50, 4))
    reader.join()
    snapshot = prefixes.loaded(fetch, found[0])
    assert snapshot is found[0] is fetch.entry.snapshot
    assert (prefixes.ram_bytes, fetch.entry.fetches) == (one, 0)
    session = Session(engine(), prefixes, None)
    assert session.sync([*text(20, 1), 5]).read == 20
    np.testing.assert_array_equal(session.logits, fresh_logits(HYBRID, [*text(20, 1), 5]))
    prefixes.close()


def test_what_becomes_of_a_state_that_is_being_read(tmp_path):
    on_disk(tmp_path, 1, 2, 3, 4)
    prefixes = PrefixStore(engine(), Limits(), tmp_path)
    forgotten, twice, unread, gone = (entry_of(prefixes, branch) for branch in (1, 2, 3, 4))

    fetch = prefixes.fetch(forgotten)
    snapshot = fetch.read()
    prefixes.drop(text(20, 1))
    assert prefixes.loaded(fetch, snapshot) is snapshot  # good to use, not kept
    assert prefixes.ram_bytes == 0

    one, two = prefixes.fetch(twice), prefixes.fetch(twice)
    kept = prefixes.loaded(one, one.read())
    assert prefixes.loaded(two, two.read()) is kept
    assert prefixes.ram_bytes == held_by(kept)

    assert prefixes.loaded(prefixes.fetch(unread), None) is None
    assert prefixes.ram_bytes == held_by(kept)
    assert unread.file.exists()

    fetch = prefixes.fetch(gone)
    disk.remove(gone.file)
    with pytest.raises(ReadError) as caught:
        fetch.read()
    assert prefixes.loaded(fetch, caught.value) is None
    assert prefixes.candidates(text(20, 4), 20) == []
    assert prefixes.ram_bytes == held_by(kept)
    prefixes.close()


def test_an_interrupt_while_reading_gives_the_room_back(tmp_path, monkeypatch):
    on_disk(tmp_path, 1)
    prefixes = PrefixStore(engine(), Limits(), tmp_path)

    def fail(*_):
        raise error

    with monkeypatch.context() as patch:
        error = KeyboardInterrupt()
        patch.setattr("moeflux.session.entry.load_snapshot", fail)
        with pytest.raises(KeyboardInterrupt):
            prefixes.take(entry_of(prefixes, 1), 20)
        assert prefixes.ram_bytes == 0
        error = MemoryError()
        assert prefixes.take(entry_of(prefixes, 1), 20) is None
        assert prefixes.ram_bytes == 0
    assert prefixes.take(entry_of(prefixes, 1), 20) is not None
    prefixes.close()


class Watched(Held):
    """Looks at every change, not only at what is left in the end."""

    limit = 0

    def __setattr__(self, name, value):
        super().__setattr__(name, value)
        if name == "nbytes":
            assert 0 <= value <= self.limit, f"{value} of {self.limit}"


class Room(RuleBasedStateMachine):
    """Puts, takes, drops and evictions, with writes and reads that end whenever they like."""

    name = HYBRID

    def __init__(self):
        super().__init__()
        self.folder = Path(tempfile.mkdtemp(prefix="moeflux-test-"))
        self.patch = pytest.MonkeyPatch()
        self.gate = Gate(self.patch)
        self.patch.setattr("moeflux.session.prefixes.Held", Watched)
        self.fetches = []

    def teardown(self):
        self.gate.open()
        self.prefixes.close()
        self.patch.undo()
        shutil.rmtree(self.folder)

    @initialize(share=st.sampled_from([0.5, 1.0, 2.5, 6.0]), on_disk=st.sampled_from([None, 1.5, 4.0, 50.0]))
    def open_store(self, share, on_disk):
        one = SnapshotSizes.of(engine(self.name).new_states()).held_bytes(256)
        Watched.limit = int(share * one)
        limits = Limits(Watched.limit, disk_bytes=int((on_disk or 0) * one))
        self.prefixes = PrefixStore(engine(self.name), limits, self.folder if on_disk else None)

    @rule(n=SIZES, branch=st.integers(0, 2), whole=st.booleans())
    def put(self, n, branch, whole):
        sequence = sequence_of(self.name, text(n, branch))
        _ = self.prefixes.put_sequence(sequence) if whole else self.prefixes.put(sequence.snapshot())

    @rule(first=SIZES, more=st.sampled_from([1, 40, 256]), branch=st.integers(0, 2))
    def put_one_that_grows(self, first, more, branch):
        """Its states share blocks."""
        sequence = sequence_of(self.name, text(first, branch))
        self.prefixes.put_sequence(sequence)
        engine(self.name).prefill(sequence, text(more, branch, first))
        self.prefixes.put_sequence(sequence)

    def best(self, n, branch):
        return next(iter(self.prefixes.candidates(text(n, branch), n)), (0, None))

    @rule(n=SIZES, branch=st.integers(0, 2))
    def take(self, n, branch):
        length, entry = self.best(n, branch)
        snapshot = entry and self.prefixes.take(entry, length)
        assert not snapshot or snapshot.tokens.tolist() == text(length, branch)

    @rule(n=SIZES, branch=st.integers(0, 2))
    def fetch(self, n, branch):
        _, entry = self.best(n, branch)
        if entry and entry.snapshot is None and (fetch := self.prefixes.fetch(entry)):
            self.fetches.append(fetch)

    @precondition(lambda self: self.fetches)
    @rule(which=st.integers(0, 5), how=st.sampled_from(["read", "read", "read", "not read", "damaged"]))
    def end_fetch(self, which, how):
        fetch = self.fetches.pop(which % len(self.fetches))
        outcome = None
        if how == "damaged":
            outcome = SnapshotError("a bit flipped")
        elif how == "read":
            try:
                outcome = fetch.read()
            except ReadError as error:  # made room for others meanwhile
                outcome = error
        self.prefixes.loaded(fetch, outcome)

    @rule(n=SIZES, branch=st.integers(0, 2))
    def drop(self, n, branch):
        self.prefixes.drop(text(n, branch))

    @rule()
    def let_one_through(self):
        self.gate.pass_one.release()

    @invariant()
    def exactly_counted(self):
        snapshots = [entry.snapshot for entry in self.prefixes._tree if entry.snapshot is not None]
        held = {id(snapshot): snapshot for snapshot in [*snapshots, *self.prefixes._queued.values()]}
        reading = sum(fetch.n_bytes for fetch in self.fetches)
        assert self.prefixes.ram_bytes == unshared_bytes(held.values(), ()) + reading
        assert self.prefixes.ram_bytes <= Watched.limit


@pytest.mark.parametrize("name", [HYBRID, PLAIN])
def test_the_limit_holds_at_every_moment(name):
    machine = type("Machine", (Room,), {"name": name})
    quick = settings(max_examples=40, stateful_step_count=30, suppress_health_check=list(HealthCheck), deadline=None)
    run_state_machine_as_test(machine, settings=quick)
