"""The prefix tree against a plain dictionary."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from moeflux.runtime.snapshot import common_length
from moeflux.session.tree import PrefixTree

TEXT = st.lists(st.integers(0, 2), max_size=7).map(tuple)
STEPS = st.lists(st.tuples(st.booleans(), TEXT), max_size=25)


def ids(text):
    return np.array(text, dtype=np.int32)


@given(STEPS, TEXT)
def test_it_finds_what_a_dictionary_finds(steps, text):
    tree, plain = PrefixTree(), {}
    for put, key in steps:
        if put:
            tree.put(ids(key), key)
            plain[key] = key
        else:
            assert tree.remove(ids(key)) == plain.pop(key, None)
    assert sorted(tree) == sorted(plain)
    assert len(tree) == len(plain)
    assert tree.get(ids(text)) == plain.get(text)
    assert tree.prefixes(ids(text)) == [(n, text[:n]) for n in range(len(text) + 1) if text[:n] in plain]
    nearest = tree.nearest(ids(text))
    best = max((common_length(text, key) for key in plain), default=None)
    if best is None:
        assert nearest is None
    else:
        length, key = nearest
        assert length == best == common_length(text, key)
