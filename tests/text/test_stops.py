"""Stop sequences are found however the text was cut, and no part of one is shown."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from moeflux import InputError
from moeflux.text.stops import MOST_CHARACTERS, Stops, read_stops

texts = st.text("abc\n", max_size=30)
stop_lists = st.lists(st.text("abc\n", min_size=1, max_size=4), max_size=3)


def plain(text, stops):
    """Character by character: the first end wins, and of those that end together the longest."""
    for end in range(1, len(text) + 1):
        found = [stop for stop in stops if text[:end].endswith(stop)]
        if found:
            stop = max(found, key=len)
            return text[: end - len(stop)], stop
    return text, None


@given(texts, stop_lists, st.lists(st.integers(1, 5), max_size=30))
def test_cut_anywhere_it_is_the_same(text, stops, cuts):
    wanted = plain(text, stops)
    matcher, shown, rest = Stops(stops), "", text
    for n in [*cuts, len(text)]:
        shown += matcher.add(rest[:n])
        assert wanted[0].startswith(shown)
        rest = rest[n:]
    assert (shown + matcher.finish(), matcher.found) == wanted


@given(texts)
def test_nothing_is_held_back_without_need(text):
    matcher = Stops(["xyz"])
    assert matcher.add(text) == text
    assert matcher.add("x") == ""
    assert matcher.add("yq") == "xyq"


@pytest.mark.parametrize("stop", ["", 5, None, b"x", ["x"], "\ud800", "x" * 5000])
def test_what_cannot_stop(stop):
    with pytest.raises(InputError, match="stop"):
        Stops([stop])


@pytest.mark.parametrize("stops", [5, {"a": 1}, {"a"}, b"abc", ["x"] * 100])
def test_what_is_no_list_of_stops(stops):
    with pytest.raises(InputError, match="option 'stop'"):
        Stops(stops)


def test_a_text_is_one_stop():
    assert read_stops("abc") == ("abc",)
    assert read_stops(None) == read_stops([]) == ()
    matcher = Stops("abc")
    assert (matcher.add("a b c ab"), matcher.add("cd"), matcher.found) == ("a b c ", "", "abc")


def test_long_stops_are_followed_in_one_pass():
    """A text that is almost a long stop again and again."""
    stop = "a" * (MOST_CHARACTERS - 1) + "b"
    matcher, shown = Stops([stop, stop[1:]]), 0
    for _ in range(20_000):
        shown += len(matcher.add("a"))
    assert shown == 20_000 - (MOST_CHARACTERS - 1)
    assert (matcher.add("b"), matcher.found) == ("", stop)
