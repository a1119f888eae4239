"""Codecs: how a weight of logical shape [..., out, in] is stored as components.

A codec is geometry only: names, types and shapes of its components. The functions below it are the exact
numpy reference for the arithmetic (MLX's affine groups, block-scaled float8, plain floats).

Affine: each row is cut into groups along the input dimension; w = scale * code + bias. Codes form one
little-endian bit stream per row, held in uint32 words.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from math import prod

import numpy as np
import numpy.typing as npt

from moeflux.formats.dtypes import F32, STORAGE, Array, all_finite, decode_float, encode_float

AFFINE_BITS = (2, 3, 4, 5, 6, 8)
AFFINE_GROUPS = (32, 64, 128)

Shape = tuple[int, ...]


@dataclass(frozen=True)
class Component:
    """One stored array of a weight."""

    name: str
    dtype: str
    shape: Shape

    @property
    def nbytes(self) -> int:
        return prod(self.shape) * STORAGE[self.dtype].itemsize

    @property
    def is_weight(self) -> bool:
        """The codes or numbers themselves; the others (scales, biases) are small."""
        return self.name == "weight"


@dataclass(frozen=True)
class Plain:
    """Every weight as one float."""

    dtype: str

    def components(self, shape: Shape) -> tuple[Component, ...]:
        return (Component("weight", self.dtype, shape),)


@dataclass(frozen=True)
class Affine:
    """MLX affine quantisation."""

    bits: int
    group: int
    scales: str  # dtype of scales and biases

    def components(self, shape: Shape) -> tuple[Component, ...]:
        *rows, n_in = shape
        per_group = (*rows, n_in // self.group)
        return (
            Component("weight", "U32", (*rows, n_in * self.bits // 32)),
            Component("scales", self.scales, per_group),
            Component("biases", self.scales, per_group),
        )


@dataclass(frozen=True)
class BlockFp8:
    """float8 e4m3 with one scale for each block of rows and columns: w = code * scale_inv[block]."""

    block: tuple[int, int]
    scales: str

    def components(self, shape: Shape) -> tuple[Component, ...]:
        *stack, n_out, n_in = shape
        blocks = (*stack, -(-n_out // self.block[0]), -(-n_in // self.block[1]))
        return (Component("weight", "F8_E4M3", shape), Component("scale_inv", self.scales, blocks))


Codec = Plain | Affine | BlockFp8


def nbytes(codec: Codec, shape: Shape) -> int:
    return sum(component.nbytes for component in codec.components(shape))


def describe(codec: Codec) -> str:
    match codec:
        case Plain(dtype):
            return dtype.lower()
        case Affine(bits, group, _):
            return f"affine {bits}-bit g{group}"
        case BlockFp8(block, _):
            return f"fp8 e4m3 {block[0]}x{block[1]}"


@dataclass(frozen=True)
class Matrix:
    """A weight in memory, still coded: the arrays of its components, and where they came from (for errors)."""

    codec: Codec
    shape: Shape
    parts: Mapping[str, Array]
    source: str

    def rows(self, index: npt.NDArray[np.int64] | slice) -> Matrix:
        """Some of the rows of a two-dimensional weight. Not for block codecs, whose rows share scales."""
        parts = {name: part[index] for name, part in self.parts.items()}
        return Matrix(self.codec, (len(parts["weight"]), self.shape[1]), parts, self.source)

    def halves(self) -> tuple[Matrix, Matrix]:
        """The upper and the lower half of the rows, which for a block codec must be whole blocks."""
        parts = {name: (part[: len(part) // 2], part[len(part) // 2 :]) for name, part in self.parts.items()}
        shape = (self.shape[0] // 2, self.shape[1])
        first, second = ({name: pair[i] for name, pair in parts.items()} for i in range(2))
        return Matrix(self.codec, shape, first, self.source), Matrix(self.codec, shape, second, self.source)


def decode(matrix: Matrix) -> F32:
    """The weight as float32: exact for plain floats, one multiplication and addition for the others."""
    with np.errstate(over="ignore", invalid="ignore"):  # damaged scales: whoever needs finite weights checks the result
        return _decode(matrix.codec, matrix.shape, matrix.parts)


def _decode(codec: Codec, shape: Shape, parts: Mapping[str, Array]) -> F32:
    match codec:
        case Plain(dtype):
            return decode_float(parts["weight"], dtype)
        case Affine(bits, group, scales):
            codes = unpack(parts["weight"], bits)
            return dequantize(codes, decode_float(parts["scales"], scales), decode_float(parts["biases"], scales), group)
        case BlockFp8(block, scales):
            scale = decode_float(parts["scale_inv"], scales)
            scale = scale.repeat(block[0], axis=-2).repeat(block[1], axis=-1)
            n_out, n_in = shape[-2:]
            return decode_float(parts["weight"], "F8_E4M3") * scale[..., :n_out, :n_in]


def broken_part(matrix: Matrix) -> str | None:
    """The first component that holds NaN or infinity, if one does. Decodes nothing."""
    for component in matrix.codec.components(matrix.shape):
        if component.dtype != "U32" and not all_finite(matrix.parts[component.name], component.dtype):
            return component.name
    return None


def unpack(words: Array, bits: int) -> npt.NDArray[np.uint8]:
    """uint32 words [..., n * bits / 32] to codes [..., n]."""
    words = np.ascontiguousarray(words, dtype="<u4")
    if 32 % bits == 0:
        shifts = np.arange(0, 32, bits, dtype=np.uint32)
        codes = (words[..., None] >> shifts) & np.uint32(2**bits - 1)
        return codes.astype(np.uint8).reshape(*words.shape[:-1], -1)
    stream = np.unpackbits(words.view(np.uint8), axis=-1, bitorder="little")
    digits = stream.reshape(*words.shape[:-1], -1, bits)
    return np.packbits(digits, axis=-1, bitorder="little")[..., 0]


def pack(codes: Array, bits: int) -> npt.NDArray[np.uint32]:
    """Codes [..., n] to uint32 words [..., n * bits / 32]; the inverse of `unpack`."""
    digits = np.unpackbits(codes.astype(np.uint8)[..., None], axis=-1, bitorder="little")[..., :bits]
    stream = np.packbits(digits.reshape(*codes.shape[:-1], -1), axis=-1, bitorder="little")
    return np.ascontiguousarray(stream).view("<u4").astype(np.uint32, copy=False)


def dequantize(codes: Array, scales: F32, biases: F32, group: int) -> F32:
    grouped = codes.reshape(*codes.shape[:-1], -1, group).astype(np.float32)
    grouped *= scales[..., None]
    grouped += biases[..., None]
    return grouped.reshape(codes.shape)


def quantize(weights: F32, bits: int, group: int, dtype: str = "BF16") -> dict[str, Array]:
    """The components of an affine weight, bit for bit as MLX computes them.

    The end of the range with the larger magnitude is represented exactly, so that zero stays close to a code;
    this makes about half of the scales negative. Codes come from the unrounded scale.
    """
    n_in = weights.shape[-1]
    if bits not in AFFINE_BITS or group not in AFFINE_GROUPS or n_in % group:
        raise ValueError(f"no affine codec for {bits} bits, group {group}, input dimension {n_in}")
    w = np.asarray(weights, dtype=np.float32).reshape(*weights.shape[:-1], n_in // group, group)
    low, high = w.min(axis=-1), w.max(axis=-1)
    top = np.float32(2**bits - 1)
    low_is_edge = np.abs(low) > np.abs(high)
    edge = np.where(low_is_edge, low, high)
    scale = np.maximum((high - low) / top, np.float32(1e-7))
    scale = np.where(low_is_edge, scale, -scale)
    edge_code = np.rint(edge / scale)
    on_grid = edge_code != 0
    scale = np.where(on_grid, edge / np.where(on_grid, edge_code, np.float32(1)), scale)
    bias = np.where(on_grid, edge, np.float32(0))
    codes = np.clip(np.rint((w - bias[..., None]) / scale[..., None]), 0, top)
    return {
        "weight": pack(codes.reshape(weights.shape), bits),
        "scales": encode_float(scale, dtype),
        "biases": encode_float(bias, dtype),
    }
