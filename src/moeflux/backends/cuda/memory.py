"""Weights and states in device memory, as torch tensors. Nothing here computes.

A handle keeps its tensors alive. Codes of 4 and 8 bits stay as they are in the file; others are widened to the next of the
two when they are loaded, which changes no value.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import prod
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from moeflux.backends.account import StateAccount
from moeflux.backends.cuda.device import Device, device_errors
from moeflux.backends.state import DeltaState
from moeflux.core.config import Kv
from moeflux.core.errors import FormatError
from moeflux.formats.quant import Affine, BlockFp8, Matrix, Plain, broken_part, decode, pack, unpack

Tensor = torch.Tensor

_FLOATS = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
_KEPT: dict[Kv, str] = {"f32": "F32", "bf16": "BF16"}


@dataclass(frozen=True)
class AffineMatrix:
    """codes [rows, cols * bits / 32] of int32, scales and biases [rows, groups]."""

    codes: Tensor
    scales: Tensor
    biases: Tensor
    bits: int
    group: int

    @property
    def rows(self) -> int:
        return int(self.scales.shape[0])

    @property
    def groups(self) -> int:
        return int(self.scales.shape[1])

    @property
    def cols(self) -> int:
        return self.groups * self.group


@dataclass(frozen=True)
class FloatMatrix:
    """weight [heads, rows, cols]; float8 has scales by block."""

    weight: Tensor
    scales: Tensor | None = None
    block: int = 1

    @property
    def rows(self) -> int:
        return int(self.weight.shape[1])


Handle = AffineMatrix | FloatMatrix


class Uploader:
    """Copies host arrays to one device. The host's memory may be used again when a call returns."""

    def __init__(self, device: Device) -> None:
        self.device = device

    def tensor(self, array: npt.NDArray[Any], what: str = "a weight") -> Tensor:
        host = torch.from_numpy(array if array.flags.writeable and array.flags.c_contiguous else np.array(array, order="C"))
        with device_errors(self.device, what, array.nbytes):
            return host.to(self.device.name, copy=True)

    def floats(self, array: npt.NDArray[Any], dtype: str, what: str) -> Tensor:
        kind = _FLOATS[dtype]
        return self.tensor(array.view(np.int32 if kind is torch.float32 else np.int16), what).view(kind)

    def matrix(self, matrix: Matrix) -> Handle:
        """Still coded; leading dimensions become rows."""
        if part := broken_part(matrix):
            hint = "the file is damaged; download it again"
            raise FormatError(f"{part} holds NaN or infinity", where=matrix.source, hint=hint)
        parts, what = matrix.parts, matrix.source
        rows, cols = int(np.prod(matrix.shape[:-1])), matrix.shape[-1]
        match matrix.codec:
            case Affine(bits, group, dtype):
                wide = 4 if bits <= 4 else 8
                words = parts["weight"] if bits == wide else pack(unpack(parts["weight"], bits), wide)
                codes = self.tensor(np.ascontiguousarray(words).view(np.int32).reshape(rows, -1), what)
                scales, biases = (self.floats(parts[n].reshape(rows, -1), dtype, what) for n in ("scales", "biases"))
                return AffineMatrix(codes, scales, biases, wide, group)
            case BlockFp8(block, dtype):
                codes = self.tensor(parts["weight"].view(np.uint8).reshape(1, rows, cols), what)
                return FloatMatrix(codes, self.floats(parts["scale_inv"], dtype, what), block[0])
            case Plain(dtype):
                return FloatMatrix(self.floats(parts["weight"].reshape(1, rows, cols), dtype, what))

    def heads(self, values: npt.NDArray[np.float32]) -> FloatMatrix:
        """[heads, rows, cols], decoded."""
        return FloatMatrix(self.tensor(values, "a matrix by heads"))

    def decoded(self, matrix: Matrix) -> npt.NDArray[np.float32]:
        values = decode(matrix)
        if not np.isfinite(values).all():
            raise FormatError("holds NaN or infinity", where=matrix.source, hint="the file is damaged; download it again")
        return values


@dataclass(frozen=True)
class DeviceStorage:
    """How states keep rows on the device. `poison`: fresh memory reads as NaN, for tests."""

    kind: Kv
    device: Device
    poison: bool = False

    @property
    def dtype(self) -> str:
        return _KEPT[self.kind]

    @property
    def element_bytes(self) -> int:
        return 4 if self.kind == "f32" else 2

    def allocate(self, shape: tuple[int, ...]) -> Tensor:
        with device_errors(self.device, "keys and values"):
            rows = torch.empty(shape, dtype=_FLOATS[self.dtype], device=self.device.name)
            return rows.fill_(float("nan")) if self.poison else rows

    def encode(self, rows: Tensor | npt.NDArray[np.float32]) -> Tensor:
        if not isinstance(rows, torch.Tensor):
            rows = torch.from_numpy(np.ascontiguousarray(rows)).to(self.device.name)
        return rows.to(_FLOATS[self.dtype])  # to the nearest, ties to even

    def decode(self, parts: list[Tensor]) -> Tensor:
        rows = parts[0] if len(parts) == 1 else torch.cat(parts)
        return rows.to(torch.float32)

    def host(self, kept: Tensor) -> npt.NDArray[Any]:
        bits: npt.NDArray[Any] = _bits(kept).cpu().numpy()
        return bits if kept.element_size() == 2 else bits.view(np.float32)

    def take(self, kept: Tensor, host: npt.NDArray[Any]) -> None:
        kept.copy_(torch.from_numpy(host).view(kept.dtype))

    def address(self, block: Tensor) -> int:
        return int(block.data_ptr())

    def table(self, addresses: list[int]) -> Tensor:
        return torch.tensor(addresses, dtype=torch.int64, device=self.device.name)


class DeviceDeltaState(DeltaState):
    """`delta` [value heads, key dim, value dim] as everywhere, but the key dimension lies innermost in memory."""

    @classmethod
    def empty(
        cls, conv: tuple[int, int], delta: tuple[int, int, int], device: Device, account: StateAccount
    ) -> DeviceDeltaState:
        heads, key_dim, value_dim = delta
        charge = account.take(4 * (prod(conv) + prod(delta)))
        with device_errors(device, "a recurrent state"):
            matrix = torch.zeros(heads, value_dim, key_dim, device=device.name).transpose(1, 2)
            return cls(torch.zeros(conv, device=device.name), matrix, charge, account)

    def fork(self) -> DeviceDeltaState:
        charge = self._account.take(self.array_bytes)
        return DeviceDeltaState(self.conv.clone(), self.delta.clone(), charge, self._account)

    def host_array(self, array: Tensor) -> npt.NDArray[Any]:
        found: npt.NDArray[Any] = array.contiguous().cpu().numpy()
        return found

    def take_array(self, array: Tensor, host: npt.NDArray[Any]) -> None:
        array.copy_(torch.from_numpy(np.ascontiguousarray(host, dtype=np.float32)))


def _bits(rows: Tensor) -> Tensor:
    """As integers, which numpy has for every width."""
    return rows.view(torch.uint16 if rows.element_size() == 2 else torch.int32)
