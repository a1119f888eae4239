"""How states keep rows in host memory: float32 as they are, or bf16 rounded to nearest even, as 16-bit integers."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from moeflux.core.config import Kv
from moeflux.formats.dtypes import STORAGE, decode_float, encode_float

F32 = npt.NDArray[np.float32]
Kept = npt.NDArray[Any]

_DTYPES = {"f32": "F32", "bf16": "BF16"}


@dataclass(frozen=True)
class HostStorage:
    """`poison`: fresh memory is filled with what reads as NaN, for tests."""

    kind: Kv
    poison: bool = False

    @property
    def dtype(self) -> str:
        """Its name in files."""
        return _DTYPES[self.kind]

    @property
    def element_bytes(self) -> int:
        return STORAGE[self.dtype].itemsize

    def allocate(self, shape: tuple[int, ...]) -> Kept:
        rows = np.empty(shape, dtype=STORAGE[self.dtype])
        if self.poison:
            rows.view(np.uint8)[...] = 0xFF
        return rows

    def encode(self, rows: F32) -> Kept:
        return encode_float(rows, self.dtype)

    def decode(self, parts: list[Kept]) -> F32:
        rows = parts[0] if len(parts) == 1 else np.concatenate(parts)
        return decode_float(rows, self.dtype)

    def host(self, kept: Kept) -> Kept:
        return kept

    def take(self, kept: Kept, host: Kept) -> None:
        """It is the same memory."""

    def address(self, block: Kept) -> int:
        return int(block.ctypes.data)

    def table(self, addresses: list[int]) -> npt.NDArray[np.uint64]:
        return np.array(addresses, dtype=np.uint64)
