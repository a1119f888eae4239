"""`engine.record_routing`: the same choices are recorded however a forward runs."""

from __future__ import annotations

import numpy as np
import pytest

import moeflux
from moeflux.bench.routing import TokenStream
from moeflux.core.errors import InputError, StateError
from moeflux.runtime.batch import Segment

NAME = "deepseek_v3-4bit-f32"  # its first layer has no experts
PROMPT = [3, 1, 4, 1, 5]


def recorded(engine, traced=False):
    recorder = engine.record_routing()
    trace = moeflux.Trace() if traced else None
    sequence = engine.sequence()
    engine.forward(Segment(sequence, PROMPT, "last", trace))
    for token in (9, 2, 6):
        engine.forward(Segment(sequence, [token], "last", trace))
    return recorder.trace(), trace


def test_both_ways_through_the_layers_record_the_same(mlx):
    """In one call, and layer by layer."""
    with moeflux.load(mlx(NAME), threads=1) as engine:
        layers = [layer for layer, _ in engine.spec.moe_layers()]
        fused, _ = recorded(engine)
    with moeflux.load(mlx(NAME), threads=1) as engine:
        stepped, _ = recorded(engine, traced=True)
    assert fused.layers == tuple(layers) != (0, 1, 2)
    assert fused.tokens.tolist() == [*PROMPT, 9, 2, 6]
    assert fused.steps.tolist() == [0] * 5 + [1, 2, 3]
    np.testing.assert_array_equal(fused.ids, stepped.ids)


@pytest.mark.parametrize("backend", ["native", "numpy"])
def test_what_is_recorded_is_what_the_router_chose(mlx, backend):
    with moeflux.load(mlx(NAME), backend=backend) as engine:
        found, trace = recorded(engine, traced=True)
    for row, layer in enumerate(found.layers):
        np.testing.assert_array_equal(found.ids[:, row], trace[layer, "router_ids"])


def test_a_forward_that_fails_is_left_out(mlx):
    with moeflux.load(mlx(NAME), threads=1) as engine:
        recorder = engine.record_routing()
        with pytest.raises(StateError, match="nothing was recorded"):
            recorder.last_step()
        with pytest.raises(InputError):
            engine.forward(Segment(engine.sequence(), [10**9]))
        engine.forward(Segment(engine.sequence(), [7]))
        assert recorder.trace().tokens.tolist() == [7]
        assert recorder.last_step().shape == (1, len(recorder.trace().layers), 2)


def test_streams_with_common_topics_are_in_step():
    """Other tokens of the same topics; with topics of their own they part."""
    first, second = (TokenStream("local", 64_000, seed, topics=7).take(200) for seed in (1, 2))
    assert first != second
    assert [token // 64 for token in first] == [token // 64 for token in second]
    alone = TokenStream("local", 64_000, 2).take(200)
    assert [token // 64 for token in alone] != [token // 64 for token in second]
