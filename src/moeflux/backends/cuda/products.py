"""Matrix products: which kernel for how many rows. The choice never changes bits, so it may follow speed alone."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
import triton

from moeflux.backends.cuda.device import Device
from moeflux.backends.cuda.kernels import floats, linear
from moeflux.backends.cuda.memory import AffineMatrix, FloatMatrix, Tensor

EXACT = {"enable_fp_fusion": False}
FEW = 8  # rows up to here are taken one by one: reading the weights anew is cheaper than a tile of mostly nothing


@dataclass(frozen=True)
class Digits:
    """Activations as integers: digits [T, 2, K] of int8, and per group the worth of one unit and the sum of the integers."""

    digits: Tensor
    step: Tensor
    total: Tensor

    def __len__(self) -> int:
        return len(self.step)


@dataclass(frozen=True)
class Tile:
    """How a tensor-core product is cut."""

    rows: int = 32
    columns: int = 128
    warps: int = 4
    stages: int = 2

    # 32 rows: five float tiles are alive in the sums of four groups, and larger ones do not fit the registers.


@dataclass(frozen=True)
class Slots:
    """Matrices of one shape: codes in bytes, scales, biases, the slot of each, and words from one slot to the next."""

    codes: Tensor
    scales: Tensor
    biases: Tensor
    table: Tensor
    stride: int


class Products:
    def __init__(self, device: Device, empty: Callable[..., Tensor]) -> None:
        self._device = device
        self._empty = empty
        self.few = FEW
        self.tile = Tile()
        self._last: tuple[Tensor, tuple[int, int, int], Digits] | None = None
        self._whole: tuple[Tensor, Tensor] | None = None

    def affine(self, x: Tensor, weight: AffineMatrix) -> Tensor:
        """[T, in] -> [T, out]"""
        digits = self._digits_of(x, weight)
        if len(x) <= self.few or weight.groups % 4 or weight.group * weight.bits < 256:
            return self._one_by_one(digits, weight)
        return self._together(digits, weight)

    def _digits_of(self, x: Tensor, weight: AffineMatrix) -> Digits:
        """Several matrices in a row take the same input, so the last digits are kept, and with them their input."""
        key = (x._version, weight.group, weight.bits)
        if self._last is None or self._last[0] is not x or self._last[1] != key:
            self._last = (x, key, self.digits(x, weight.group, weight.bits))
        return self._last[2]

    def digits(self, x: Tensor, group: int, bits: int, up: Tensor | None = None) -> Digits:
        """Of x, or of silu(x) * up."""
        (n, cols), groups = x.shape, x.shape[1] // group
        q = torch.empty(n, 2, cols, dtype=torch.int8, device=x.device)
        step, total = self._empty(n, groups), torch.empty(n, groups, dtype=torch.int32, device=x.device)
        at_once = 16
        linear.quantise_kernel[(n, triton.cdiv(groups, at_once))](
            x, x if up is None else up, q, step, total, cols, groups, group, bits == 4, at_once, up is not None, **EXACT
        )
        return Digits(q, step, total)

    def _one_by_one(self, x: Digits, w: AffineMatrix) -> Tensor:
        y, rows, at_once = (
            self._empty(len(x), w.rows),
            16 if self._device.dp4a else 256,
            min(32, max(4, triton.next_power_of_2(w.groups))),
        )
        linear.vector_kernel[(triton.cdiv(w.rows, rows), len(x))](
            w.codes, w.scales, w.biases, x.digits.view(torch.int32), x.step, x.total, y, w.rows, w.cols, w.groups,
            w.group, w.bits, rows, at_once, self._device.dp4a, num_warps=8, **EXACT,
        )  # fmt: skip
        return y

    def _together(self, x: Digits, w: AffineMatrix) -> Tensor:
        n = len(x)
        rows, edges = self._all_rows(n)
        slots = Slots(w.codes.view(torch.uint8), w.scales, w.biases, edges, 0)
        return self.grouped(x, rows, edges, slots, w.rows, -(-n // self.tile.rows), w.bits, w.group)

    def _all_rows(self, n: int) -> tuple[Tensor, Tensor]:
        """0..n - 1, and the edges of one group of them. Kept, because making them waits for the device."""
        if self._whole is None or len(self._whole[0]) != n:
            name = self._device.name
            self._whole = (
                torch.arange(n, dtype=torch.int32, device=name),
                torch.tensor([0, n], dtype=torch.int32, device=name),
            )
        return self._whole

    def grouped(
        self, x: Digits, rows: Tensor, edges: Tensor, slots: Slots, n_out: int, turns: int, bits: int = 4, group: int = 64
    ) -> Tensor:
        """Row i of the result, which lies between two edges, is row rows[i] of x times the matrix in that slot."""
        y, tile, cols = self._empty(len(rows), n_out), self.tile, x.digits.shape[2]
        columns = triton.cdiv(n_out, tile.columns)
        linear.matrix_kernel[(columns * (len(edges) - 1), turns)](
            slots.codes, slots.scales, slots.biases, x.digits, x.step, x.total, rows, edges, slots.table, y, n_out,
            slots.stride * 4, slots.stride * 2, columns, turns, cols, group, bits, tile.rows, tile.columns, tile.stages,
            self._device.dp4a, num_warps=tile.warps, **EXACT,
        )  # fmt: skip
        return y

    def floats(self, x: Tensor, weight: FloatMatrix) -> Tensor:
        """[T, heads, in] -> [T, heads, out], each head with its own matrix."""
        x = x.contiguous()
        n, (heads, rows, cols) = len(x), weight.weight.shape
        y, tall, log = self._empty(n, heads, rows), 16, min(8, max(4, (cols - 1).bit_length()))
        scales = weight.scales if weight.scales is not None else x
        floats.float_kernel[(heads * triton.cdiv(rows, tall), n)](
            weight.weight, scales, x, y, rows, cols, heads, weight.block, triton.cdiv(cols, weight.block), tall, 1 << log,
            log, weight.scales is not None, num_warps=4, **EXACT,
        )  # fmt: skip
        return y
