"""Matrix products of the native backend against numpy: every codec, every instruction set, odd sizes."""

from __future__ import annotations

from itertools import product

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from moeflux.backends.native.ops import NativeOps, available_isas
from moeflux.backends.numpy.ops import NumpyOps
from moeflux.core.errors import InputError, OptionError
from moeflux.formats.dtypes import encode_float
from moeflux.formats.quant import AFFINE_BITS, AFFINE_GROUPS, Affine, BlockFp8, Matrix, Plain, quantize

NUMPY = NumpyOps()
CODECS = [
    *(Affine(bits, group, "BF16") for bits, group in product(AFFINE_BITS, AFFINE_GROUPS)),
    *(Affine(4, 64, dtype) for dtype in ("F32", "F16")),
    *(Plain(dtype) for dtype in ("F32", "BF16", "F16")),
    BlockFp8((128, 128), "F32"),
]
SHAPES = [(1, 128), (7, 128), (16, 384), (70, 256), (130, 640)]
TOKENS = [1, 2, 3, 4, 5, 6, 7, 13]


def random_matrix(codec, rows, cols, seed=0):
    w = np.random.default_rng(seed).normal(size=(rows, cols)).astype(np.float32) / cols**0.5
    match codec:
        case Plain(dtype):
            parts = {"weight": encode_float(w, dtype)}
        case Affine(bits, group, dtype):
            parts = quantize(w, bits, group, dtype)
        case BlockFp8(block, _):
            n = (-(-rows // block[0]), -(-cols // block[1]))
            codes = np.random.default_rng(seed).integers(0, 256, (rows, cols)).astype(np.uint8)
            codes[(codes & 0x7F) == 0x7F] = 1
            parts = {"weight": codes, "scale_inv": np.full(n, 1e-3, np.float32) * (1 + np.arange(n[0] * n[1]).reshape(n))}
            parts["scale_inv"] = parts["scale_inv"].astype(np.float32)
    return Matrix(codec, (rows, cols), parts, "random")


def inputs(tokens, cols, seed=1):
    return np.random.default_rng(seed).normal(size=(tokens, cols)).astype(np.float32)


def machine(isa, **options):
    return NativeOps(2, isa, poison=True, **options)


@pytest.mark.parametrize("isa", available_isas())
@pytest.mark.parametrize("codec", CODECS, ids=str)
def test_exact_mode_equals_numpy(isa, codec):
    ops = machine(isa, exact=True)
    for (rows, cols), tokens in product(SHAPES, (1, 5)):
        matrix, x = random_matrix(codec, rows, cols), inputs(tokens, cols)
        expected = NUMPY.linear(x, NUMPY.load_matrix(matrix))
        worst = np.abs(ops.linear(x, ops.load_matrix(matrix)) - expected).max()
        assert worst <= 2e-6 * np.abs(expected).max() + 1e-6, f"{rows}x{cols}, {tokens} tokens"


@pytest.mark.parametrize("isa", available_isas())
@pytest.mark.parametrize("codec", [c for c in CODECS if isinstance(c, Affine)], ids=str)
def test_integer_activations_are_close(isa, codec):
    """Activations of 8 bits: about 0.6 % of the result's size in the root mean square, never more than 2 %."""
    ops = machine(isa)
    for (rows, cols), tokens in product(SHAPES[2:], TOKENS):
        matrix, x = random_matrix(codec, rows, cols), inputs(tokens, cols)
        expected = NUMPY.linear(x, NUMPY.load_matrix(matrix))
        error = ops.linear(x, ops.load_matrix(matrix)) - expected
        assert np.sqrt(np.mean(error**2)) <= 0.02 * np.sqrt(np.mean(expected**2))


@pytest.mark.parametrize("codec", [c for c in CODECS if isinstance(c, Affine)], ids=str)
def test_instruction_sets_agree_to_the_bit(codec):
    """Integer dots are exact and floats are added in one stated order, so affine products have one result."""
    for (rows, cols), tokens in product(SHAPES, TOKENS):
        matrix, x = random_matrix(codec, rows, cols), inputs(tokens, cols)
        results = [(ops := machine(isa)).linear(x, ops.load_matrix(matrix)) for isa in available_isas()]
        for other in results[1:]:
            np.testing.assert_array_equal(other, results[0])


@pytest.mark.parametrize("isa", available_isas())
@settings(max_examples=40)
@given(
    codec=st.sampled_from(CODECS),
    rows=st.integers(1, 200),
    groups=st.integers(1, 7),
    tokens=st.integers(1, 40),
    threads=st.integers(1, 3),
)
def test_a_row_alone_equals_the_row_in_company(isa, codec, rows, groups, tokens, threads):
    """Bit for bit, for any number of rows, columns, tokens and threads."""
    cols = 128 * groups
    matrix, x = random_matrix(codec, rows, cols), inputs(tokens, cols)
    together = (ops := NativeOps(threads, isa, poison=True)).linear(x, ops.load_matrix(matrix))
    alone = machine(isa)
    weight = alone.load_matrix(matrix)
    for t in {0, tokens // 2, tokens - 1}:
        np.testing.assert_array_equal(alone.linear(x[t : t + 1], weight)[0], together[t])


@pytest.mark.parametrize("isa", available_isas())
def test_activations_of_zero_and_of_any_size(isa):
    ops = machine(isa)
    matrix = random_matrix(Affine(4, 64, "BF16"), 48, 128)
    weight, reference = ops.load_matrix(matrix), NUMPY.load_matrix(matrix)
    assert (ops.linear(np.zeros((1, 128), np.float32), weight) == 0).all()
    for size in (1e-20, 1e20):
        x = inputs(1, 128) * np.float32(size)
        expected = NUMPY.linear(x, reference)
        assert np.abs(ops.linear(x, weight) - expected).max() <= 0.03 * np.abs(expected).max()


@pytest.mark.parametrize("isa", available_isas())
def test_several_products_in_one_call(isa):
    """Of different codecs and sizes, over the same input."""
    ops = machine(isa)
    x = inputs(3, 256)
    matrices = [
        random_matrix(codec, rows, 256) for codec, rows in zip(CODECS[::3], (1, 40, 64, 65, 7, 128, 16, 9), strict=False)
    ]
    handles = {f"w{i}": ops.load_matrix(matrix) for i, matrix in enumerate(matrices)}
    for y, weight in zip(ops._linears(x, handles, list(handles)), handles.values(), strict=True):
        np.testing.assert_array_equal(y, ops.linear(x, weight))


def test_wrong_sizes_are_refused():
    ops = machine("generic")
    weight = ops.load_matrix(random_matrix(Plain("F32"), 4, 8))
    with pytest.raises(InputError, match="width"):
        ops.linear(inputs(1, 9), weight)
    with pytest.raises(OptionError, match="no kernels"):
        NativeOps(1, "mmx")
