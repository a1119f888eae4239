"""Stop sequences are found however the text was cut, and no part of one is shown."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from moeflux import InputError
from moeflux.text.stops import Stops

texts = st.text("abc\n", max_size=30)
stop_lists = st.lists(st.text("abc\n", min_size=1, max_size=4).filter(str.strip), max_size=3)


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


@pytest.mark.parametrize("stop", ["", " \n", 5, None])
def test_what_cannot_stop(stop):
    with pytest.raises(InputError, match="stop sequence"):
        Stops([stop])
