"""How states keep rows in host memory: float32 as they are, or bf16 rounded to nearest even, as 16-bit integers."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from moeflux.core.config import Kv

F32 = npt.NDArray[np.float32]
Kept = npt.NDArray[Any]


@dataclass(frozen=True)
class HostStorage:
    """`poison`: fresh memory is filled with what reads as NaN, for tests."""

    kind: Kv
    poison: bool = False

    @property
    def element_bytes(self) -> int:
        return 4 if self.kind == "f32" else 2

    def allocate(self, shape: tuple[int, ...]) -> Kept:
        rows = np.empty(shape, dtype=np.float32 if self.kind == "f32" else np.uint16)
        if self.poison:
            rows.view(np.uint8)[...] = 0xFF
        return rows

    def encode(self, rows: F32) -> Kept:
        return rows if self.kind == "f32" else to_bf16(rows)

    def decode(self, parts: list[Kept]) -> F32:
        rows = parts[0] if len(parts) == 1 else np.concatenate(parts)
        return rows if self.kind == "f32" else from_bf16(rows)

    def address(self, block: Kept) -> int:
        return int(block.ctypes.data)

    def table(self, addresses: list[int]) -> npt.NDArray[np.uint64]:
        return np.array(addresses, dtype=np.uint64)


def to_bf16(x: F32) -> npt.NDArray[np.uint16]:
    bits = np.ascontiguousarray(x, dtype=np.float32).view(np.uint32)
    rounded = (bits + np.uint32(0x7FFF) + ((bits >> np.uint32(16)) & np.uint32(1))) >> np.uint32(16)
    return np.where(np.isnan(x), np.uint32(0x7FC0), rounded).astype(np.uint16)


def from_bf16(x: npt.NDArray[np.uint16]) -> F32:
    return (x.astype(np.uint32) << np.uint32(16)).view(np.float32)
