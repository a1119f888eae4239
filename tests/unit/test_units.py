from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from moeflux import OptionError
from moeflux.core.units import format_at_least, format_bytes, format_count, parse_bytes, parse_rate


@pytest.mark.parametrize(
    ("text", "value"),
    [("24GiB", 24 * 2**30), ("1.5 GB", 1_500_000_000), ("4096", 4096), (4096, 4096), ("8 mib", 8 * 2**20), ("0", 0)],
)
def test_parse(text, value):
    assert parse_bytes(text) == value


@pytest.mark.parametrize("text", ["", "GiB", "-3GB", "3 XB", "1e9", -1, "3.GB", True, 1.5, "7GB/s"])
def test_refuse(text):
    with pytest.raises(OptionError) as caught:
        parse_bytes(text)
    assert caught.value.hint


@pytest.mark.parametrize(("text", "value"), [("7GB/s", 7 * 10**9), ("800 MB / s", 800 * 10**6), ("1GiB", 2**30), (5, 5)])
def test_parse_rate(text, value):
    assert parse_rate(text) == value


@pytest.mark.parametrize("text", ["", "fast", "/s", "7GB/h", "0", "0GB/s", -7])
def test_refuse_rate(text):
    with pytest.raises(OptionError):
        parse_rate(text)


@given(st.integers(0, 10**14))
def test_at_least_can_be_typed_and_is_enough(n):
    typed = parse_bytes(format_at_least(n))
    assert n <= typed <= n * 1.11 + 10**6


@pytest.mark.parametrize(
    ("n", "text"), [(0, "0 B"), (999, "999 B"), (1_769_472, "1.77 MB"), (18_119_393_280, "18.1 GB"), (367.8e9, "368 GB")]
)
def test_format_bytes(n, text):
    assert format_bytes(n) == text


@pytest.mark.parametrize(
    ("n", "text"), [(48_000_000, "48 M"), (2.95e9, "2.95 B"), (671e9, "671.0 B"), (1026.4e9, "1,026.4 B")]
)
def test_format_count(n, text):
    assert format_count(n) == text
