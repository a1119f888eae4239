"""The trace: what it records, and how it shows where two runs part."""

from __future__ import annotations

import numpy as np
import pytest

import moeflux
from moeflux import Segment, Trace

NAME = "qwen3_5_moe_vl_fused-4bit-f32"
IDS = list(range(3, 15))
LAYER = ["input", "mixer", "ffn_input", "router_logits", "router_ids", "router_weights", "experts", "shared", "output"]


@pytest.fixture(scope="module")
def engine():
    from conftest import DATA

    with moeflux.load(DATA / "mlx" / NAME) as engine:
        yield engine


def test_records_everything_in_order(engine):
    trace = Trace()
    engine.score(IDS, trace=trace)
    expected = [(-1, "embedding"), *((i, name) for i in range(4) for name in LAYER), (4, "final")]
    assert trace.keys() == expected
    assert trace[2, "mixer"].shape == (12, 128)
    assert trace[2, "router_ids"].shape == (12, 2)
    np.testing.assert_array_equal(trace[4, "final"], trace[3, "output"])


def test_chooses_layers_and_positions(engine):
    everything, chosen = Trace(), Trace(layers=[1], positions=[5, -1])
    engine.score(IDS, trace=everything)
    engine.score(IDS, trace=chosen)
    assert chosen.keys() == [(1, name) for name in LAYER]
    np.testing.assert_array_equal(chosen[1, "experts"], everything[1, "experts"][[5, 11]])


def test_joins_chunks_of_one_sequence(engine):
    whole, chunked, sequence = Trace(), Trace(), engine.sequence()
    engine.score(IDS, trace=whole)
    other = engine.sequence()
    engine.forward(Segment(sequence, IDS[:5], trace=chunked), Segment(other, [1, 2, 3]))
    engine.forward(Segment(other, [4]), Segment(sequence, IDS[5:], trace=chunked))
    assert whole.compare(chunked, tolerance=0).first is None


def test_names_the_first_difference(engine, tmp_path):
    right, wrong = Trace(), Trace()
    engine.score(IDS, trace=right)
    engine.score([*IDS[:7], 99, *IDS[8:]], trace=wrong)
    comparison = right.compare(wrong)
    assert comparison.first is not None
    assert (comparison.first.layer, comparison.first.name, comparison.first.row) == (-1, "embedding", 7)
    assert "first above tolerance" in str(comparison)
    right.save(tmp_path / "trace.npz")
    assert right.compare(Trace.load(tmp_path / "trace.npz"), tolerance=0).worst == 0
    assert "router_weights" in str(right)


def test_nan_counts_as_a_difference():
    a, b = Trace(), Trace()
    a.record(0, "mixer", 0, np.zeros((2, 3)))
    b.record(0, "mixer", 0, np.array([[0, 0, 0], [0, np.nan, 0]]))
    assert a.compare(b).first is not None
    assert a.compare(b).first.row == 1
