"""Fused native blocks against the composed ones of `backends/ops.py`, in exact mode, on every instruction set."""

from __future__ import annotations

import numpy as np
import pytest

from backends.machines import on_machine
from conftest import DATA
from moeflux import Segment, Trace, load
from moeflux.backends.native.ops import NativeOps, available_isas
from moeflux.backends.numpy.ops import NumpyOps
from moeflux.backends.ops import Span
from moeflux.core.errors import InputError
from moeflux.models.spec import Router
from moeflux.runtime.sequence import Sequence

FAMILIES = [
    "qwen3_moe-4bit-f32",
    "qwen3_moe-mixed-f32",
    "qwen3_next-4bit-f32",
    "qwen3_5_moe_vl_fused-4bit-f32",
    "deepseek_v3-4bit-f32",
    "deepseek_v3-oldkv-4bit-f32",
]
N = 80  # past one block of positions
IDS = np.random.default_rng(3).integers(0, 512, N).tolist()
TOLERANCE = 1e-3  # exact mode: the same float32 math in another order; logits are about +-15

# Integer activations, layer by layer with the reference's inputs and routing: the part of a layer's own contribution,
# in the root mean square, that may differ.
INT8_TOLERANCE = 0.03


@pytest.fixture(scope="module", params=FAMILIES)
def reference(request):
    engine = load(DATA / "mlx" / request.param, backend="numpy", kv="f32")
    trace = Trace()
    logits = engine.score(IDS, trace=trace)
    return request.param, engine, trace, logits


@pytest.mark.parametrize("isa", available_isas())
def test_exact_mode_agrees_end_to_end(reference, isa):
    name, _, theirs, logits = reference
    trace = Trace()
    engine = on_machine(DATA / "mlx" / name, NativeOps(2, isa, exact=True, poison=True), kv="f32")
    ours = engine.score(IDS, trace=trace)
    comparison = theirs.compare(trace, TOLERANCE)
    assert np.abs(ours - logits).max() <= TOLERANCE, f"\n{comparison}"
    assert np.abs(engine.score(IDS) - logits).max() <= TOLERANCE  # and layer by layer, untraced


@pytest.mark.parametrize("isa", available_isas())
def test_integer_activations_layer_by_layer(reference, isa):
    """Each layer from the reference's own hidden states, with its routing forced: no flip can hide or amplify."""
    name, _, trace, _ = reference
    engine = on_machine(DATA / "mlx" / name, NativeOps(2, isa, poison=True))
    model = engine.model
    for index in range(len(engine.spec.layers)):
        x = trace[index, "input"]
        span = Span(0, N, 0, Sequence(engine.spec, model.ops, "f32").states[index])
        routing = None
        if (index, "router_ids") in trace:
            routing = (trace[index, "router_ids"], trace[index, "router_weights"])
        ours = model.runner.layer(index, x.copy(), [span], routing=routing) - x
        expected = trace[index, "output"] - x
        error = np.sqrt(np.mean((ours - expected) ** 2) / np.mean(expected**2))
        assert error <= INT8_TOLERANCE, f"layer {index}: {error:.3f}"


@pytest.mark.parametrize("isa", available_isas())
@pytest.mark.parametrize("name", FAMILIES)
def test_bf16_keys_and_values(name, isa):
    """Rounded to bf16 when they are appended, as the reference rounds them: the same states, and logits within tolerance."""
    folder = DATA / "mlx" / name
    theirs, ours = load(folder, backend="numpy"), on_machine(folder, NativeOps(2, isa, exact=True, poison=True))
    states = []
    for engine in (theirs, ours):
        sequence = engine.sequence()
        (logits,) = engine.forward(Segment(sequence, IDS, "all"))
        states.append((sequence.states, logits))
    (expected, reference), (found, logits) = states
    for a, b in zip(expected, found, strict=True):
        for key in a.rows:
            assert a.rows[key].filled.dtype == np.float32
            same = np.isclose(a.rows[key].filled, b.rows[key].filled, rtol=2**-7, atol=1e-3)  # a rounding may flip
            assert same.mean() > 0.99
    assert np.abs(logits - reference).max() < 1.0  # a flipped rounding moves logits of about 15 a little
    whole = load(folder, backend="numpy", kv="f32").score(IDS)
    assert 0 < np.abs(reference - whole).max() < 1.0


def test_experts_may_arrive_one_by_one():
    """In any order and any portions, the sum is the same bits: it is taken in rank order at the end."""
    engine = on_machine(DATA / "mlx" / "qwen3_moe-4bit-f32", NativeOps(2, poison=True))
    ops = engine.model.ops
    random = np.random.default_rng(5)
    x = random.normal(size=(9, 128)).astype(np.float32)
    ids = np.argsort(random.normal(size=(9, 8)), axis=-1)[:, :2].copy()
    weights = random.uniform(size=(9, 2)).astype(np.float32)
    with engine.model.experts.acquire(1, np.arange(8)[None]) as lease:
        bank, experts = next(lease.arrivals())  # all are in memory
        whole = ops.experts(x, ids, weights, [(bank, experts)])
        for portions in ([[5, 3], [0, 1, 2, 4, 6, 7]], [[e] for e in range(7, -1, -1)]):
            np.testing.assert_array_equal(ops.experts(x, ids, weights, [(bank, some) for some in portions]), whole)


@pytest.mark.parametrize("most", [2047, 2048, 2049, 5000])
def test_many_tokens_of_one_expert(most):
    """More than the 2,048 pairs of a turn: some of all experts, and one that nearly all tokens choose, or all but a few."""
    engine = on_machine(DATA / "mlx" / "qwen3_moe-4bit-f32", NativeOps(2, poison=True))
    ops = engine.model.ops
    random = np.random.default_rng(6)
    tokens = most + 40
    x = random.normal(size=(tokens, 128)).astype(np.float32)
    ids = np.stack([np.full(tokens, 3), random.integers(4, 8, tokens)], axis=-1)
    ids[random.permutation(tokens)[:40]] = 0, 1
    weights = random.uniform(size=(tokens, 2)).astype(np.float32)
    with engine.model.experts.acquire(1, np.arange(8)[None]) as lease:
        bank, experts = next(lease.arrivals())
        whole = ops.experts(x, ids, weights, [(bank, experts)])
        few = [slice(i, i + 500) for i in range(0, tokens, 500)]
        np.testing.assert_array_equal(
            np.concatenate([ops.experts(x[i], ids[i], weights[i], [(bank, experts)]) for i in few]), whole
        )


def test_an_expert_that_is_not_there_is_refused():
    ops = NativeOps(1)
    x = np.zeros((1, 128), np.float32)
    with pytest.raises(InputError, match="not in the bank"):
        ops.experts(x, np.zeros((1, 1), np.int64), np.ones((1, 1), np.float32), [(ops.new_bank(4), [0])])


@pytest.mark.parametrize("isa", available_isas())
def test_routing_ties_go_to_the_lower_index(isa):
    ops = NativeOps(1, isa)
    random = np.random.default_rng(0)
    for router in (
        Router("softmax", 12, 5, normalize=True),
        Router("noaux_tc", 12, 4, normalize=True, scale=2.5, n_groups=4, top_groups=2),
    ):
        # Full of exact ties, but of no sums that are equal only before rounding, as sigmoid(2) + sigmoid(-2) = 1.
        logits = random.integers(0, 3, (200, 12)).astype(np.float32)
        bias = np.zeros(12, np.float32) if router.kind == "noaux_tc" else None
        ids, weights = ops.route(logits, bias, router)
        expected_ids, expected = NumpyOps().route(logits, bias, router)
        np.testing.assert_allclose(weights, expected, rtol=3e-6)
        np.testing.assert_array_equal(ids, expected_ids)
