"""Integer activations end to end, on models whose residual branches are small beside the stream, as in trained ones.

A random model without that amplifies every rounding into other routing, which says nothing about kernels.
"""

from __future__ import annotations

import numpy as np
import pytest

import moeflux
from backends.machines import on_machine
from moeflux.backends.native.ops import NativeOps, available_isas
from moeflux.bench.synthetic import write_checkpoint
from unit.test_synthetic import DEEPSEEK, NEXT, QUANT, QWEN, QWEN3

IDS = np.random.default_rng(4).integers(0, 300, 90).tolist()


@pytest.fixture(scope="module", params=[QWEN, NEXT, QWEN3, DEEPSEEK], ids=lambda c: c["model_type"])
def model(request, tmp_path_factory):
    folder = tmp_path_factory.mktemp("damped") / "model"
    write_checkpoint(request.param | QUANT, folder)
    with moeflux.load(folder, backend="numpy") as engine:
        return folder, engine.score(IDS)


@pytest.mark.parametrize("isa", available_isas())
def test_text_stays_the_same(model, isa):
    folder, expected = model
    ours = on_machine(folder, NativeOps(2, isa, poison=True)).score(IDS)
    p, q = _log_softmax(expected), _log_softmax(ours)
    divergence = (np.exp(p) * (p - q)).sum(-1).mean()
    assert divergence < 5e-3, divergence
    assert (ours.argmax(-1) == expected.argmax(-1)).mean() >= 0.93


def _log_softmax(x):
    x = x.astype(np.float64) - x.max(-1, keepdims=True)
    return x - np.log(np.exp(x).sum(-1, keepdims=True))
