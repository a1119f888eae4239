"""Broken activations are noticed, at once or when one asks."""

from __future__ import annotations

import numpy as np
import pytest

from moeflux.backends.cuda.device import open_device
from moeflux.backends.cuda.ops import CudaOps
from moeflux.core.errors import NumericError
from moeflux.models.spec import Router

ROUTER = Router("softmax", 8, 2, True)


def test_broken_scores_raise_at_once_or_when_asked():
    ops = CudaOps(open_device())
    good = ops._tensor(np.ones((2, 8), np.float32))
    bad = good.clone()
    bad[1, 3] = np.nan
    with pytest.raises(NumericError, match="not finite"):
        ops.route(bad, None, ROUTER)
    ops.defer_checks = True
    ops.route(bad, None, ROUTER)
    ops.route(good, None, ROUTER)
    with pytest.raises(NumericError, match="not finite"):
        ops.check()
    ops.check()  # once


def test_equal_scores_go_to_the_lower_index():
    ops = CudaOps(open_device(), poison=True)
    ids, weights = ops.route(
        ops._tensor(np.array([[0, 3, 1, 3, 1, 1, 3, 0]], np.float32)), None, Router("softmax", 8, 5, True)
    )
    assert ops.to_numpy(ids).tolist() == [[1, 3, 6, 2, 4]]
    assert abs(float(weights.sum()) - 1) < 1e-6


def test_an_input_that_was_changed_is_quantised_anew():
    from backends.test_linear import random_matrix
    from moeflux.formats.quant import Affine

    ops = CudaOps(open_device(), poison=True)
    weight = ops.load_matrix(random_matrix(Affine(4, 64, "BF16"), 16, 128))
    x = ops._tensor(np.ones((1, 128), np.float32))
    first = ops.linear(x, weight).clone()
    x *= 2
    np.testing.assert_allclose(ops.to_numpy(ops.linear(x, weight)), 2 * ops.to_numpy(first), rtol=1e-5)
