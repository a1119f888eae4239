"""The affine codec, bit for bit against MLX's own results (tests/data/affine_golden.npz), and float decoding."""

from __future__ import annotations

from itertools import product

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from conftest import DATA
from moeflux.formats.dtypes import decode_float, encode_float
from moeflux.formats.quant import AFFINE_BITS, AFFINE_GROUPS, dequantize, pack, quantize, unpack

DTYPES = {"f32": "F32", "bf16": "BF16", "f16": "F16"}


@pytest.fixture(scope="module")
def golden():
    with np.load(DATA / "affine_golden.npz") as arrays:
        return dict(arrays)


def bits_of(array):
    return array.view(np.uint16) if array.dtype.itemsize == 2 else array.view(np.uint32)


@pytest.mark.parametrize(("bits", "group", "dtype"), [*product(AFFINE_BITS, AFFINE_GROUPS, DTYPES)])
def test_quantize_equals_mlx(golden, bits, group, dtype):
    source = golden["source"] if dtype == "f32" else decode_float(_stored(golden[f"source_{dtype}"], dtype), DTYPES[dtype])
    key = f"b{bits}_g{group}_{dtype}"
    ours = quantize(source, bits, group, DTYPES[dtype])
    np.testing.assert_array_equal(ours["weight"], golden[f"{key}.codes"])
    np.testing.assert_array_equal(bits_of(ours["scales"]), bits_of(golden[f"{key}.scales"]))
    np.testing.assert_array_equal(bits_of(ours["biases"]), bits_of(golden[f"{key}.biases"]))


@pytest.mark.parametrize(("bits", "group", "dtype"), [*product(AFFINE_BITS, AFFINE_GROUPS, DTYPES)])
def test_dequantize_equals_mlx(golden, bits, group, dtype):
    key = f"b{bits}_g{group}_{dtype}"
    scales, biases = (decode_float(_stored(golden[f"{key}.{part}"], dtype), DTYPES[dtype]) for part in ("scales", "biases"))
    ours = dequantize(unpack(golden[f"{key}.codes"], bits), scales, biases, group)
    np.testing.assert_array_equal(ours, golden[f"{key}.dequant"])


def _stored(array, dtype):
    return array.view(np.float16) if dtype == "f16" else array


@given(st.sampled_from(AFFINE_BITS), st.integers(1, 3), st.integers(1, 5), st.randoms())
def test_pack_and_unpack_are_inverse(bits, rows, groups, random):
    codes = np.array([[random.randrange(2**bits) for _ in range(32 * groups)] for _ in range(rows)], dtype=np.uint8)
    words = pack(codes, bits)
    assert words.shape == (rows, groups * bits)
    np.testing.assert_array_equal(unpack(words, bits), codes)


def test_quantize_refuses_what_it_cannot_code():
    with pytest.raises(ValueError, match="input dimension 100"):
        quantize(np.ones((2, 100), np.float32), 4, 64)


def test_every_fp8_code_equals_torch():
    codes = np.arange(256, dtype=np.uint8)
    expected = torch.tensor(codes).view(torch.float8_e4m3fn).float().numpy()
    np.testing.assert_array_equal(decode_float(codes, "F8_E4M3"), expected)


def test_every_bf16_equals_torch():
    codes = np.arange(2**16, dtype=np.uint16)
    expected = torch.tensor(codes.view(np.int16)).view(torch.bfloat16).float().numpy()
    np.testing.assert_array_equal(decode_float(codes, "BF16"), expected)


@given(st.lists(st.floats(width=32), min_size=1))
def test_bf16_rounds_as_torch_does(values):
    array = np.array(values, dtype=np.float32)
    expected = torch.tensor(array).to(torch.bfloat16).float().numpy()
    np.testing.assert_array_equal(decode_float(encode_float(array, "BF16"), "BF16"), expected)
