"""The numpy backend against HF transformers in float32: the first link in the chain of trust."""

from __future__ import annotations

import numpy as np
import pytest

import moeflux
from models.configs import CASES
from models.hf import Reference, reference, save
from moeflux import Segment, Trace

TOLERANCE = 5e-4  # on logits of about +-10; HF's own two delta-net forms differ by up to 1.4e-4

pytestmark = pytest.mark.parametrize(("family", "name"), CASES, ids=[f"{family}-{name}" for family, name in CASES])


@pytest.fixture
def case(family, name, tmp_path_factory):
    """The oracle's results and an engine over the files it saved, as transformers lays them out."""
    ref = reference(family, name)
    folder = tmp_path_factory.getbasetemp() / f"{family}-{name}"
    if not (folder / "config.json").exists():
        save(ref.model, folder)
    with moeflux.load(folder, backend="numpy", kv="f32") as engine:
        yield ref, engine


def test_prefill(case):
    ref, engine = case
    logits = engine.score(ref.ids)
    assert logits.dtype == np.float32
    assert logits.std() > 0.5  # a model that says nothing would agree with anything
    assert np.abs(logits - ref.logits).max() <= TOLERANCE


def test_layers(case):
    """Names the first layer that is wrong."""
    ref, engine = case
    trace = Trace()
    engine.score(ref.ids, trace=trace)
    for index, expected in enumerate(ref.outputs):
        worst = np.abs(trace[index, "output"] - expected).max()
        assert worst <= TOLERANCE, f"layer {index} differs by {worst:.2g}\n{trace}"


def test_cached_decode(case):
    ref, engine = case
    sequence = engine.sequence()
    rows = [engine.forward(Segment(sequence, [token]))[0][0] for token in ref.ids]
    assert np.abs(np.stack(rows) - ref.stepped).max() <= TOLERANCE


def test_mixed_batch(case):
    """Three sequences of different lengths: one begins, one goes on with a chunk, one decodes a single token."""
    ref, engine = case
    begins, goes_on, decodes = (engine.sequence() for _ in range(3))
    ids = [int(token) for token in ref.ids]
    engine.forward(Segment(goes_on, ids[:20], "none"), Segment(decodes, ids[:66], "none"))
    first, second, third = engine.forward(
        Segment(begins, ids[:31], "all"), Segment(goes_on, ids[20:70], "all"), Segment(decodes, ids[66:67])
    )
    assert np.abs(first - ref.logits[:31]).max() <= TOLERANCE
    assert np.abs(second - ref.logits[20:70]).max() <= TOLERANCE
    assert np.abs(third - ref.logits[66:67]).max() <= TOLERANCE
    assert [len(s) for s in (begins, goes_on, decodes)] == [31, 70, 67]


def test_routing(case):
    """Ids and weights agree with HF's routers wherever the choice is not a near-tie."""
    ref, engine = case
    trace = Trace()
    engine.score(ref.ids, trace=trace)
    compared = 0
    for index, layer in enumerate(engine.spec.layers):
        if (index, "router_ids") not in trace:
            continue
        ids, weights = _hf_routing(ref, index, trace[index, "ffn_input"])
        margin = _margin(trace[index, "router_logits"], layer.ffn.router.k)
        clear = margin > 1e-3
        ours, shares = trace[index, "router_ids"], trace[index, "router_weights"]
        order, hf_order = np.argsort(ours, axis=-1), np.argsort(ids, axis=-1)
        same = (np.take_along_axis(ours, order, -1) == np.take_along_axis(ids, hf_order, -1)).all(axis=-1)
        if layer.ffn.router.kind == "softmax":
            assert same[clear].all()
        gap = np.abs(np.take_along_axis(shares, order, -1) - np.take_along_axis(weights, hf_order, -1)).max(axis=-1)
        assert gap[same].max() < 1e-5
        assert same.mean() > 0.95
        compared += 1
    assert compared


def _hf_routing(ref: Reference, index: int, rows):
    import torch

    with torch.no_grad():
        _, weights, ids = ref.model.model.layers[index].mlp.gate(torch.tensor(rows))
    return ids.numpy(), weights.numpy()


def _margin(logits, k):
    ordered = np.sort(logits, axis=-1)[:, ::-1]
    return ordered[:, k - 1] - ordered[:, k]
