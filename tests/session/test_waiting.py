"""The line in front of the worker: bounded, by priority, and clients take turns."""

from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from moeflux.core.errors import OverloadError
from moeflux.session.waiting import WaitingLine


def served(line):
    """In which order all of them come."""
    order = []
    while len(line):
        item = next(iter(line))
        assert line.remove(item)
        order.append(item)
    return order


def test_one_client_is_served_in_order():
    line = WaitingLine(10)
    for item in "abc":
        line.add(item, 0)
    assert [line.place(item) for item in "abc"] == [0, 1, 2]
    assert served(line) == ["a", "b", "c"]


def test_who_asks_once_waits_for_one_of_eight():
    line = WaitingLine(20)
    for number in range(8):
        line.add(number, 0, "greedy")
    assert line.remove(0)  # it runs
    assert line.place_for(0, "modest") == 0
    line.add("modest", 0, "modest")
    assert served(line)[:3] == ["modest", 1, 2]


def test_priority_comes_before_turns():
    line = WaitingLine(10)
    line.add("low", 0, "a")
    line.add("high", 1, "b")
    line.add("high too", 1, "b")
    assert served(line) == ["high", "high too", "low"]


def test_a_full_line():
    line = WaitingLine(2)
    line.add("a", 0)
    line.check_room()
    line.add("b", 0)
    with pytest.raises(OverloadError):
        line.check_room()
    assert not line.remove("c")
    assert line.place("c") is None


@given(st.lists(st.tuples(st.sampled_from("abc"), st.booleans()), max_size=40))
def test_while_a_client_waits_no_other_is_served_more_than_twice(steps):
    line, since = WaitingLine(100), Counter()
    waiting = {client: [] for client in "abc"}
    for n, (client, serve) in enumerate(steps):
        item = (client, n)
        if not waiting[client]:
            since = Counter({key: value for key, value in since.items() if key[0] != client})
        line.add(item, 0, client)
        waiting[client].append(item)
        assert [i for i in line if i[0] == client] == waiting[client]  # its own order
        if serve:
            first = next(iter(line))
            line.remove(first)
            waiting[first[0]].remove(first)
            for other in "abc":
                if other != first[0] and waiting[other]:
                    since[other, first[0]] += 1
                    assert since[other, first[0]] <= 2
            since = Counter({key: value for key, value in since.items() if key[0] != first[0]})
