"""Where experts lie, how they are read and foreseen, and how many dispatches wait: none of it changes a bit."""

from __future__ import annotations

from functools import cache

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import moeflux
from conftest import DATA
from moeflux import Segment, Trace
from moeflux.core.errors import InputError

FAMILIES = ["qwen3_moe-4bit-f32", "qwen3_next-4bit-f32", "qwen3_5_moe_vl_fused-4bit-f32", "deepseek_v3-4bit-f32"]
PROMPT, STEPS = 21, 10


@cache
def expected(name, backend):
    """Logits of a prompt and of some steps after it, with every expert in memory; and the tokens."""
    with moeflux.load(DATA / "mlx" / name, backend=backend) as engine:
        return run(engine, 3)


def run(engine, seed, trace=None):
    random = np.random.default_rng(seed)
    ids = random.integers(0, 512, PROMPT).tolist()
    sequence = engine.sequence()
    (last,) = engine.forward(Segment(sequence, ids, trace=trace))
    rows = [last[0]]
    for _ in range(STEPS):
        ids.append(int(np.argmax(rows[-1])))
        (last,) = engine.forward(Segment(sequence, ids[-1:], trace=trace))
        rows.append(last[0])
    return np.stack(rows), ids


@settings(max_examples=25, deadline=None)
@given(
    name=st.sampled_from(FAMILIES),
    slots=st.integers(2, 40),
    policy=st.sampled_from(["lru", "lfru"]),
    hints=st.sampled_from(["none", "previous", "lookahead", "both"]),
    reader=st.sampled_from(["native", "python"]),
    scales=st.sampled_from(["kept", "streamed"]),
    threads=st.integers(1, 3),
)
def test_streaming_equals_resident(name, slots, policy, hints, reader, scales, threads):
    options = {"slots": slots, "policy": policy, "hints": hints, "reader": reader, "scales": scales, "threads": threads}
    with moeflux.load(DATA / "mlx" / name, **options) as engine:
        assert engine.plan.keep_scales == (scales == "kept" and not engine.plan.resident)
        assert bool(engine.model.experts.store.options.under_way) == engine.plan.keep_scales
        logits, ids = run(engine, 3)
        stats = engine.model.experts.store.stats()
    whole, tokens = expected(name, "native")
    assert ids == tokens
    np.testing.assert_array_equal(logits, whole)
    assert stats.slots <= slots
    assert stats.asked == stats.hits + stats.late + stats.joined + stats.misses


@settings(max_examples=12, deadline=None)
@given(
    name=st.sampled_from(FAMILIES),
    slots=st.integers(2, 20),
    ring=st.integers(0, 3),
    reader=st.sampled_from(["native", "python"]),
)
def test_the_depth_of_the_ring_does_not_matter(name, slots, ring, reader):
    with moeflux.load(DATA / "mlx" / name, backend="numpy", slots=slots, ring=ring, reader=reader) as engine:
        logits, ids = run(engine, 3)
    whole, tokens = expected(name, "numpy")
    assert ids == tokens
    np.testing.assert_array_equal(logits, whole)


@settings(max_examples=12, deadline=None)
@given(name=st.sampled_from(FAMILIES), slots=st.integers(2, 20), reader=st.sampled_from(["native", "python"]))
def test_native_layer_by_layer_does_not_matter(name, slots, reader):
    """As it runs where something is recorded."""
    with moeflux.load(DATA / "mlx" / name, slots=slots, reader=reader) as engine:
        logits, ids = run(engine, 3, Trace())
    whole, tokens = expected(name, "native")
    assert ids == tokens
    np.testing.assert_array_equal(logits, whole)


@pytest.mark.parametrize("name", FAMILIES)
def test_a_batch_that_streams_equals_each_alone(name):
    """Several sequences share every read, and a prompt may run beside a step."""
    whole = [expected(name, "native")]
    with moeflux.load(DATA / "mlx" / name, slots=6) as engine:
        ids = whole[0][1]
        first, second = engine.sequence(), engine.sequence()
        engine.forward(Segment(first, ids[:PROMPT], "none"))
        step, prompt = engine.forward(Segment(first, ids[PROMPT : PROMPT + 1]), Segment(second, ids[:PROMPT]))
    np.testing.assert_array_equal(step[0], whole[0][0][1])
    np.testing.assert_array_equal(prompt[0], whole[0][0][0])


def test_two_engines_never_mix():
    name = FAMILIES[2]
    whole, tokens = expected(name, "native")
    with moeflux.load(DATA / "mlx" / name, slots=3) as one, moeflux.load(DATA / "mlx" / name, slots=9) as other:
        sequences = [(engine, engine.sequence()) for engine in (one, other)]
        for start in range(0, PROMPT, 7):
            rows = [engine.forward(Segment(sequence, tokens[start : start + 7]))[0] for engine, sequence in sequences]
    for row in rows:
        np.testing.assert_array_equal(row[0], whole[0])


@cache
def alone(name, n):
    """Of sequences that each run alone, with every expert in memory: tokens and logits [steps, vocab] of each."""
    found = []
    with moeflux.load(DATA / "mlx" / name) as engine:
        for seed in range(n):
            ids = np.random.default_rng(seed).integers(0, 512, 1 + seed % 3 + MANY_STEPS).tolist()
            sequence = engine.sequence()
            rows = [engine.forward(Segment(sequence, ids[: -MANY_STEPS + 1]))[0][0]]
            rows += [engine.forward(Segment(sequence, [token]))[0][0] for token in ids[-MANY_STEPS + 1 :]]
            found.append((ids, np.stack(rows)))
    return found


MANY, MANY_STEPS = 16, 4


@settings(max_examples=20, deadline=None)
@given(
    name=st.sampled_from(FAMILIES),
    n=st.integers(2, MANY),
    slots=st.integers(2, 40),
    policy=st.sampled_from(["lru", "lfru"]),
    hints=st.sampled_from(["none", "previous", "lookahead", "both"]),
    kinds=st.lists(st.sampled_from(["decode", "prompt", None]), min_size=MANY, max_size=MANY),
    native=st.booleans(),
)
def test_rows_do_not_depend_on_company_or_kind(name, n, slots, policy, hints, kinds, native):
    """Up to 16 sequences in one step, whatever is said of them."""
    expected = alone(name, MANY)[:n]
    options = {"slots": slots, "policy": policy, "hints": hints, "sequences": n}
    with moeflux.load(DATA / "mlx" / name, **options) as engine:
        sequences = [engine.sequence() for _ in range(n)]
        trace = None if native else Trace()
        for step in range(MANY_STEPS):
            cut = [(ids[: -MANY_STEPS + 1] if step == 0 else ids[step - MANY_STEPS :][:1]) for ids, _ in expected]
            segments = [
                Segment(sequence, tokens, kind=kind, trace=trace if i == 0 else None)
                for i, (sequence, tokens, kind) in enumerate(zip(sequences, cut, kinds[:n], strict=True))
            ]
            for (_, rows), logits in zip(expected, engine.forward(*segments), strict=True):
                np.testing.assert_array_equal(logits[0], rows[step])


def decode_anew(engine, n, tokens):
    """Each of the tokens as the first of n sequences at once; returns the experts that were not in memory."""
    before = engine.model.experts.store.stats()
    for token in tokens:
        engine.forward(*(Segment(engine.sequence(), [token]) for _ in range(n)))
    stats = engine.model.experts.store.stats().since(before)
    return stats.asked - stats.hits


@pytest.mark.parametrize("backend", ["numpy", "native"])
@pytest.mark.parametrize("slots", [12, 18])  # a step asks for more than half of them, and for less
@pytest.mark.parametrize("n", [1, 8, 9, 16])
def test_the_cache_learns_from_any_number_of_rows(n, slots, backend):
    """Experts that one step after the other asks for come to stay, also where many sequences decode."""
    options = {"slots": slots, "sequences": n, "hints": "none", "backend": backend}
    with moeflux.load(DATA / "mlx" / FAMILIES[0], **options) as engine:
        decode_anew(engine, n, range(100, 120))  # memory is full of other experts
        assert decode_anew(engine, n, [7]) > 0
        decode_anew(engine, n, [7] * 12)
        assert decode_anew(engine, n, [7] * 4) == 0


def test_a_prompt_beside_decoding_rows_takes_nothing_from_them():
    with moeflux.load(DATA / "mlx" / FAMILIES[0], slots=26, sequences=2, hints="none") as engine:
        store = engine.model.experts.store
        decode_anew(engine, 1, [*range(100, 120), *[7] * 8])
        before = store.stats()
        engine.forward(Segment(engine.sequence(), [9]), Segment(engine.sequence(), list(range(200, 260))))
        assert store.stats().since(before).misses > 0
        assert decode_anew(engine, 1, [9, 7]) == 0  # what the decoding row asked for beside the prompt has stayed too


def test_an_unknown_kind():
    with moeflux.load(DATA / "mlx" / FAMILIES[0]) as engine, pytest.raises(InputError, match="kind 'both'"):
        engine.forward(Segment(engine.sequence(), [1], kind="both"))
