"""Element types of safetensors files: size, numpy storage, and exact decoding of the floating ones to float32."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

Array = npt.NDArray[Any]
F32 = npt.NDArray[np.float32]

# numpy has no bfloat16 or float8, so those are stored as the integers that hold their bits.
STORAGE: dict[str, np.dtype[Any]] = {
    name: np.dtype(code)
    for name, code in {
        "BOOL": "?", "U8": "u1", "I8": "i1", "F8_E4M3": "u1", "F8_E5M2": "u1",
        "U16": "<u2", "I16": "<i2", "F16": "<f2", "BF16": "<u2",
        "U32": "<u4", "I32": "<i4", "F32": "<f4",
        "U64": "<u8", "I64": "<i8", "F64": "<f8",
    }.items()
}  # fmt: skip

FLOATS = ("F32", "BF16", "F16")

# Of each stored type: unsigned storage, and the bits that are all set in what is not finite (float8 has NaN alone).
_EXPONENTS = {"F32": ("<u4", 0x7F800000), "BF16": ("<u2", 0x7F80), "F16": ("<u2", 0x7C00), "F8_E4M3": ("u1", 0x7F)}
_PIECE = 2**20  # values looked at together


def decode_float(values: Array, dtype: str) -> F32:
    """The stored values of a floating type, exactly, as float32."""
    if dtype == "F32":
        return np.ascontiguousarray(values, dtype=np.float32)
    if dtype == "F16":
        return values.astype(np.float32)
    if dtype == "BF16":
        return (values.astype(np.uint32) << 16).view(np.float32)
    if dtype == "F8_E4M3":
        return _E4M3[values]
    raise ValueError(f"not a floating type: {dtype}")


def encode_float(values: F32, dtype: str) -> Array:
    """float32 rounded to nearest even into the storage of `dtype`."""
    if dtype == "F32":
        return np.ascontiguousarray(values, dtype=np.float32)
    if dtype == "F16":
        return values.astype(np.float16)
    if dtype == "BF16":
        bits = np.ascontiguousarray(values, dtype=np.float32).view(np.uint32)
        rounded = (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16
        return np.where(np.isnan(values), 0x7FC0, rounded).astype(np.uint16)
    raise ValueError(f"cannot write {dtype}")


def all_finite(values: Array, dtype: str) -> bool:
    """Whether no stored value is NaN or infinity, from the bits alone."""
    unsigned, exponent = _EXPONENTS[dtype]
    flat = values.view(unsigned).reshape(-1)
    pieces = (flat[i : i + _PIECE] for i in range(0, len(flat), _PIECE))  # so that a large weight costs little more memory
    return not any(((piece & exponent) == exponent).any() for piece in pieces)


def _e4m3_table() -> F32:
    codes = np.arange(256)
    sign = np.where(codes & 0x80, -1.0, 1.0)
    exponent, mantissa = (codes >> 3) & 15, codes & 7
    value = np.where(exponent == 0, mantissa / 8 * 2.0**-6, (1 + mantissa / 8) * 2.0 ** (exponent - 7.0))
    value[(codes & 0x7F) == 0x7F] = np.nan  # this float8 has no infinities and two NaNs
    return (sign * value).astype(np.float32)


_E4M3 = _e4m3_table()
