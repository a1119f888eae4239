"""Products of the CUDA backend against numpy, and their bits alone and in company, on a GPU or in the interpreter."""

from __future__ import annotations

from itertools import product

import numpy as np
import pytest

from backends.test_linear import random_matrix
from moeflux.backends.cuda.device import open_device
from moeflux.backends.cuda.ops import CudaOps
from moeflux.backends.numpy.ops import NumpyOps
from moeflux.formats.quant import AFFINE_BITS, AFFINE_GROUPS, Affine, BlockFp8, Plain

NUMPY = NumpyOps()
CODECS = [
    *(Affine(bits, group, "BF16") for bits, group in product(AFFINE_BITS, AFFINE_GROUPS)),
    *(Affine(4, 64, dtype) for dtype in ("F32", "F16")),
    *(Plain(dtype) for dtype in ("F32", "BF16", "F16")),
    BlockFp8((128, 128), "F32"),
]
TOLERANCE = 1e-4  # of the result's size in the root mean square: activations have 16 bits per group


@pytest.fixture(scope="module")
def ops():
    return CudaOps(open_device(), poison=True)


def inputs(tokens, cols, seed=1):
    return np.random.default_rng(seed).normal(size=(tokens, cols)).astype(np.float32)


def distance(ours, expected):
    return np.sqrt(np.mean((ours - expected) ** 2) / np.mean(expected**2))


@pytest.mark.parametrize("codec", CODECS, ids=str)
@pytest.mark.parametrize(("rows", "cols"), [(7, 128), (40, 640)])
def test_products_are_close_to_numpy(ops, codec, rows, cols):
    matrix, x = random_matrix(codec, rows, cols), inputs(3, cols)
    expected = NUMPY.linear(x, NUMPY.load_matrix(matrix))
    ours = ops.to_numpy(ops.linear(ops._tensor(x), ops.load_matrix(matrix)))
    assert distance(ours, expected) <= TOLERANCE


@pytest.mark.parametrize(
    "codec", [Affine(4, 64, "BF16"), Affine(8, 64, "BF16"), Affine(4, 32, "BF16"), Affine(8, 128, "F32")], ids=str
)
def test_tensor_cores_give_the_bits_of_single_rows(ops, codec):
    """The same order of sums in two kernels: a prompt and a step agree to the bit."""
    matrix = ops.load_matrix(random_matrix(codec, 70, 1024))
    x = ops._tensor(inputs(37, 1024))
    together = ops.to_numpy(ops.linear(x, matrix))
    for t in (0, 5, 36):
        alone = ops.to_numpy(ops.linear(x[t : t + 1], matrix))
        np.testing.assert_array_equal(alone[0], together[t])
    np.testing.assert_array_equal(ops.to_numpy(ops.linear(x[:3], matrix)), together[:3])


def test_activations_of_zero_of_any_size_and_broken_ones(ops):
    matrix = random_matrix(Affine(4, 64, "BF16"), 48, 128)
    weight, reference = ops.load_matrix(matrix), NUMPY.load_matrix(matrix)
    assert (ops.to_numpy(ops.linear(ops.zeros((1, 128)), weight)) == 0).all()
    for size in (1e-20, 1e20):
        x = inputs(1, 128) * np.float32(size)
        assert distance(ops.to_numpy(ops.linear(ops._tensor(x), weight)) / size, NUMPY.linear(x, reference) / size) <= 1e-4
    for bad in (np.nan, np.inf):
        x = inputs(1, 128)
        x[0, 3] = bad
        assert not np.isfinite(ops.to_numpy(ops.linear(ops._tensor(x), weight))).any()


def test_embedding_rows_are_exact(ops):
    for codec in CODECS:
        matrix = random_matrix(codec, 256, 256)
        ours = ops.to_numpy(ops.embed(ops.load_embedding(matrix), [3, 255, 0]))
        np.testing.assert_array_equal(ours, NUMPY.embed(NUMPY.load_embedding(matrix), [3, 255, 0]))
