"""Logits are a function of weights and tokens alone: bit for bit the same however the work is cut and batched."""

from __future__ import annotations

from functools import cache, partial
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import moeflux
from backends.machines import on_machine
from conftest import DATA
from moeflux import Segment, Trace
from moeflux.backends.native.ops import NativeOps, available_isas
from moeflux.runtime.batch import Batch
from moeflux.runtime.forward import forward

FAMILIES = ["qwen3_moe-4bit-f32", "qwen3_next-4bit-f32", "qwen3_5_moe_vl_fused-4bit-f32", "deepseek_v3-4bit-f32"]
N = 24


BACKENDS = ["numpy", *available_isas()]


@cache
def opened(name, backend):
    """An engine, tokens and their logits. The native ones have NaN in every piece of fresh memory."""
    engine = moeflux.load(DATA / "mlx" / name, backend="numpy" if backend == "numpy" else "native")
    if backend != "numpy":
        engine = on_machine(DATA / "mlx" / name, NativeOps(2, backend, poison=True))
    ids = np.random.default_rng(1).integers(0, 512, N).tolist()
    return engine, ids, engine.score(ids)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("name", FAMILIES)
def test_token_by_token_equals_one_chunk(name, backend):
    engine, ids, whole = opened(name, backend)
    sequence = engine.sequence()
    rows = [engine.forward(Segment(sequence, [token]))[0] for token in ids]
    np.testing.assert_array_equal(np.concatenate(rows), whole)


@pytest.mark.parametrize("isa", available_isas())
@pytest.mark.parametrize("name", FAMILIES)
def test_a_long_chunk_equals_short_ones(name, isa):
    """Mixers and experts take many tokens in turns, which end within sequences."""
    engine, *_ = opened(name, isa)
    ids = np.random.default_rng(2).integers(0, 512, 1100).tolist()
    parts = [ids[:130], ids[130:630], ids[630:]]
    sequences = [engine.sequence() for _ in parts]
    batch = [Segment(sequence, part, "all") for sequence, part in zip(sequences, parts, strict=True)]
    whole = forward(engine.model, Batch(tuple(batch)))  # an engine refuses more tokens than were planned
    for part, found in zip(parts, whole, strict=True):
        sequence = engine.sequence()
        rows = [engine.forward(Segment(sequence, part[i : i + 100], "all"))[0] for i in range(0, len(part), 100)]
        np.testing.assert_array_equal(np.concatenate(rows), found)


CUTS = st.lists(st.sets(st.integers(1, N - 1), max_size=6), min_size=1, max_size=3)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("name", FAMILIES)
@settings(max_examples=15)
@given(cuts=CUTS)
def test_any_cut_in_any_company_equals_one_chunk(name, backend, cuts):
    """Sequences over the same tokens, each cut at places of its own, advance side by side."""
    engine, ids, whole = opened(name, backend)
    edges = [[0, *sorted(cut), N] for cut in cuts]
    sequences = [engine.sequence() for _ in cuts]
    for step in range(max(map(len, edges)) - 1):
        going = [i for i, edge in enumerate(edges) if step + 1 < len(edge)]
        spans = [slice(edges[i][step], edges[i][step + 1]) for i in going]
        batch = [Segment(sequences[i], ids[span], "all") for i, span in zip(going, spans, strict=True)]
        for span, logits in zip(spans, engine.forward(*batch), strict=True):
            np.testing.assert_array_equal(logits, whole[span])


def keep(into, first, rows):
    into[first : first + len(rows)] = rows


@pytest.mark.parametrize("kv", ["bf16", "f32"])
@pytest.mark.parametrize("isa", available_isas())
@pytest.mark.parametrize("name", FAMILIES)
def test_across_blocks_of_state(name, isa, kv):
    """Past the edge of a block, in chunks that end before, on and behind it, with keys and values rounded or not."""
    engine = on_machine(DATA / "mlx" / name, NativeOps(2, isa, poison=True), kv=kv)
    ids = np.random.default_rng(2).integers(0, 512, 300).tolist()
    whole = engine.score(ids)
    for edges in ([0, 255, 256, 257, 258, 300], [0, 120, 256, 300]):
        sequence = engine.sequence()
        logits = np.empty_like(whole)
        for a, b in pairwise(edges):
            engine.forward(Segment(sequence, ids[a:b], "all", take=partial(keep, logits[a:b])))
        np.testing.assert_array_equal(logits, whole)


@pytest.mark.parametrize("name", FAMILIES)
def test_threads_do_not_matter(name):
    _, ids, two = opened(name, available_isas()[0])
    for threads in (1, 3, 8):
        engine = on_machine(DATA / "mlx" / name, NativeOps(threads, poison=True))
        np.testing.assert_array_equal(engine.score(ids), two)


@pytest.mark.parametrize("isa", available_isas())
@pytest.mark.parametrize("name", FAMILIES)
def test_watching_does_not_matter(name, isa):
    """A traced run goes block by block, an untraced one layer by layer: the same bits."""
    engine, ids, whole = opened(name, isa)
    np.testing.assert_array_equal(engine.score(ids, trace=Trace()), whole)
