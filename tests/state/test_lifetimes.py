"""How long a state is kept at least: it orders who leaves, and nothing leaves while there is room."""

from __future__ import annotations

import pytest

from moeflux.session.entry import Limits
from moeflux.session.prefixes import PrefixStore
from moeflux.session.session import Marks, Session
from state.families import HYBRID, PLAIN, opened, text
from state.test_prefix_room import engine, held_by, sequence_of


class Clock:
    def __init__(self):
        self.now = 1000.0

    def __call__(self):
        return self.now


def store(n_states, clock, folder=None, **limits):
    one = held_by(sequence_of(HYBRID, text(20)).snapshot())
    return PrefixStore(engine(), Limits(n_states * one, **limits), folder, clock)


def keep(prefixes, branch, seconds=0.0):
    assert prefixes.put_sequence(sequence_of(HYBRID, text(20, branch)), seconds)


def known(prefixes, branch):
    found = prefixes.candidates([*text(20, branch), 5], 20)
    return bool(found) and found[0][0] == 20


def test_what_was_promised_a_time_leaves_last():
    clock = Clock()
    prefixes = store(2, clock)
    keep(prefixes, 1, 300)
    for branch in (2, 3, 4):
        keep(prefixes, branch)
    assert [known(prefixes, branch) for branch in (1, 2, 3, 4)] == [True, False, False, True]
    clock.now += 301  # its time is over, and it was used longest ago
    keep(prefixes, 5)
    assert [known(prefixes, branch) for branch in (1, 4, 5)] == [False, True, True]


def test_use_begins_the_time_anew():
    clock = Clock()
    prefixes = store(2, clock)
    keep(prefixes, 1, 300)
    clock.now += 200
    (length, entry), *_ = prefixes.candidates([*text(20, 1), 5], 20)
    assert prefixes.take(entry, length) is not None
    clock.now += 200
    keep(prefixes, 2)
    keep(prefixes, 3)
    assert known(prefixes, 1)


def test_where_there_is_room_nothing_leaves():
    clock = Clock()
    prefixes = store(3, clock)
    for branch in (1, 2, 3):
        keep(prefixes, branch, 300 * (branch == 1))
    clock.now += 10**6
    assert all(known(prefixes, branch) for branch in (1, 2, 3))
    for branch in (1, 2, 3):
        prefixes.keep(text(20, branch), 300)
    keep(prefixes, 4)  # where all have a time, the one used longest ago leaves
    assert known(prefixes, 4)


def test_a_time_is_longer_than_the_limit_of_idleness():
    clock = Clock()
    prefixes = store(3, clock, ttl_seconds=100)
    keep(prefixes, 1, 300)
    keep(prefixes, 2)
    clock.now += 200
    assert [known(prefixes, branch) for branch in (1, 2)] == [True, False]


def test_files_leave_in_the_same_order(tmp_path):
    """Also in another process: the order is in the files' times."""
    prefixes = PrefixStore(engine(), None, tmp_path)
    for branch, seconds in ((1, 3600.0), (2, 0.0)):
        keep(prefixes, branch, seconds)
        prefixes.flush()
    prefixes.close()
    (size,) = {path.stat().st_size for path in tmp_path.rglob("*.state")}
    later = PrefixStore(engine(), Limits(disk_bytes=int(1.5 * size)), tmp_path)
    assert [known(later, branch) for branch in (1, 2)] == [True, False]
    later.close()


@pytest.mark.parametrize(("name", "wanted"), [(HYBRID, {10: 300.0, 30: 3600.0, 35: 0.0}), (PLAIN, {40: 3600.0})])
def test_breakpoints_are_anchors_with_their_times(name, wanted):
    """A state that can be cut is one for all."""
    engine = opened(name, prefixes="20MB")
    prefixes = PrefixStore(engine)
    session = Session(engine, prefixes, None)
    tokens = text(40)
    anchors = session._begin(tokens, Marks({10: 300.0, 30: 3600.0}, (35,)))
    for stop in sorted({*anchors, len(tokens)}):
        session._run(tokens, stop, None, None)
        if stop in anchors:
            session._reach(stop)
    assert {len(entry.tokens): entry.keep_s for entry in prefixes._tree} == wanted
    assert session.use.created == max(wanted)
    again = Session(engine, prefixes, None)
    assert again.sync([*tokens[:30], 3, 3, 3]).read == 30
