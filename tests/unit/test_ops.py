"""Primitives of the numpy backend where HF cannot be asked: ties, extremes, worked values."""

from __future__ import annotations

import numpy as np
import pytest

from moeflux.backends.numpy.ops import NumpyOps
from moeflux.backends.rope import frequencies, mla_scale, rotation_scale
from moeflux.core.errors import NumericError
from moeflux.models.spec import Mla, Rope, Router, Yarn

OPS = NumpyOps()
DEEPSEEK_YARN = Yarn(40.0, 4096, 32.0, 1.0, True, None, 1.0, 1.0)


def softmax_router(n, k):
    return Router("softmax", n, k, normalize=True)


def test_ties_go_to_the_lower_index():
    ids, weights = OPS.route(np.array([[1, 1, 2, 1]], np.float32), None, softmax_router(4, 3))
    assert ids.tolist() == [[2, 0, 1]]
    assert weights[0, 1] == weights[0, 2]


def test_noaux_worked_example():
    logits = np.array([[3, -2, 1, -1, -3, 2, 0, 4]], np.float32)
    bias = np.array([0.1, 0.2, -0.3, 0, 0, 0.4, -0.1, 0.05], np.float32)
    router = Router("noaux_tc", 8, 2, normalize=True, scale=2.5, n_groups=2, top_groups=1)
    ids, weights = OPS.route(logits, bias, router)
    assert ids.tolist() == [[5, 7]]
    sigmoids = 1 / (1 + np.exp(-np.array([2.0, 4.0])))  # unbiased: the correction only chooses
    np.testing.assert_allclose(weights[0], 2.5 * sigmoids / sigmoids.sum(), rtol=1e-6)


def test_noaux_groups_may_hold_negative_scores():
    """Experts outside the kept groups are out, even when every score inside is negative."""
    router = Router("noaux_tc", 4, 2, normalize=True, n_groups=2, top_groups=1)
    ids, _ = OPS.route(np.zeros((1, 4), np.float32), np.array([-0.7, -0.8, -0.9, -0.9], np.float32), router)
    assert ids.tolist() == [[0, 1]]


def test_noaux_tied_groups_keep_the_lower_one():
    router = Router("noaux_tc", 4, 1, normalize=False, n_groups=2, top_groups=1)
    ids, _ = OPS.route(np.zeros((1, 4), np.float32), np.zeros(4, np.float32), router)
    assert ids.tolist() == [[0]]


def test_router_refuses_nan():
    with pytest.raises(NumericError, match="not finite"):
        OPS.route(np.array([[1, np.nan]], np.float32), None, softmax_router(2, 1))


def test_activations_at_extremes():
    x = np.array([-1e4, -90, -1, 0, 1, 90, 1e4], np.float32)
    expected = 1 / (1 + np.exp(-np.clip(x.astype(np.float64), -700, 700)))
    np.testing.assert_allclose(OPS.sigmoid(x), expected, rtol=1e-6, atol=1e-38)
    assert np.isfinite(OPS.silu(x)).all()


def test_softplus_does_not_overflow():
    """A large argument with a tiny rate: the reference system's unguarded exp gives 0 here, the truth is exp(-1)."""
    a = np.array([[100.0]], np.float32)
    decay, _ = OPS.delta_gates(a, a, np.log(np.array([0.01], np.float32)), np.zeros(1, np.float32))
    np.testing.assert_allclose(decay, np.exp(-1.0), rtol=1e-6)


def test_yarn_of_deepseek_v3():
    rope = Rope(64, 10000.0, "interleaved", DEEPSEEK_YARN)
    plain = 10000.0 ** (-np.arange(0, 64, 2) / 64)
    ours = frequencies(rope)
    np.testing.assert_allclose(ours[:11], plain[:11])  # fast channels are kept: ramp starts at 10
    np.testing.assert_allclose(ours[23:], plain[23:] / 40)  # slow ones are divided by the factor, ramp ends at 23
    assert rotation_scale(rope) == 1.0
    spec = Mla(128, 1536, 512, 128, 128, rope, 1e-6, False)
    assert mla_scale(spec) == pytest.approx(192**-0.5 * 1.87385, rel=1e-5)


def test_rotation_keeps_length_and_position_zero():
    x = np.random.default_rng(0).normal(size=(3, 2, 8)).astype(np.float32)
    for pairing in ("half", "interleaved"):
        y = OPS.rotate(x, Rope(8, 100.0, pairing), 0)
        np.testing.assert_array_equal(y[0], x[0])
        np.testing.assert_allclose(np.linalg.norm(y, axis=-1), np.linalg.norm(x, axis=-1), rtol=1e-6)
