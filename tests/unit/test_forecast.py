"""Hit rates and times, without a plan around them."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from moeflux.plan.forecast import LOCALITY, Rates, local_hit_rate, make_forecast
from unit.test_plan import model

GB = 10**9


@given(st.integers(0, 1000), st.integers(0, 1000))
def test_more_in_memory_never_hits_less(a, b):
    low, high = sorted((a / 1000, b / 1000))
    assert 0 <= local_hit_rate(low) <= local_hit_rate(high) <= 1
    assert local_hit_rate(high) >= high


def test_published_points_are_met():
    assert [local_hit_rate(share) for share, _ in LOCALITY] == pytest.approx([hit for _, hit in LOCALITY])


def forecast(rates=None, **given):
    options = {"n_slots": 3072, "resident": False, "chunk": 1024, "context": 8192, "prompt": 1024} | given
    return make_forecast(*model("qwen3-30b-a3b"), rates or Rates(3 * GB, 20 * GB, 300 * GB), **options)


def test_one_chunk_reads_what_its_tokens_choose_once():
    """1024 tokens choose practically every expert, one token chooses 8 of 128."""
    experts = model("qwen3-30b-a3b")[1].experts
    assert forecast().first_token.drive_bytes == pytest.approx(experts, rel=1e-6)
    assert forecast(prompt=1).first_token.drive_bytes == pytest.approx(experts / 16, rel=1e-6)


def test_later_chunks_find_what_is_in_memory():
    experts = model("qwen3-30b-a3b")[1].experts
    assert forecast(prompt=3072).first_token.drive_bytes == pytest.approx(experts * (1 + 2 * 0.5), rel=1e-6)


def test_a_chunk_takes_as_long_as_its_slowest_part():
    experts = model("qwen3-30b-a3b")[1].experts
    slow_drive = forecast(Rates(GB, 20 * GB, 300 * GB)).first_token
    assert slow_drive.bound == "drive"
    assert slow_drive.seconds == pytest.approx(experts / GB, rel=1e-6)
    assert forecast(Rates(50 * GB, 20 * GB, 10**15)).first_token.bound == "memory"
    assert forecast(Rates(50 * GB, 200 * GB, 10 * GB)).first_token.bound == "arithmetic"


def test_below_the_working_set_nothing_is_promised():
    assert forecast(n_slots=383).uniform.hit_rate == 0
    assert forecast(n_slots=384).uniform.hit_rate == 384 / 6144


def test_loading():
    sizes = model("qwen3-30b-a3b")[1]
    assert forecast().load_seconds == pytest.approx(sizes.trunk / (3 * GB))
    assert forecast(resident=True, n_slots=6144).load_seconds == pytest.approx((sizes.trunk + sizes.experts) / (3 * GB))
