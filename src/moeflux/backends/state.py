"""What one layer of one sequence carries from token to token. Blocks read and write it; the sequence owns it.

Rows by position live in blocks that sequences and snapshots share by reference. A row is written once and never changes
after that: whoever wants other rows behind a shared beginning gets a block of its own. So sharing costs nothing, cutting
is exact, and nobody has to count who shares what. Arrays come from the backend and are opaque here. All memory is taken
from the account of the engine.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import prod
from typing import Any, Protocol, overload

import numpy as np
import numpy.typing as npt

from moeflux.backends.account import Charge, StateAccount

Array = Any
HostArray = npt.NDArray[np.generic]

BLOCK = 256  # positions in a block, as in native/types.h


class Storage(Protocol):
    """How rows are kept: as float32, or as bf16 rounded to nearest even when they are written."""

    @property
    def dtype(self) -> str:
        """Of an element, as files name it."""

    @property
    def element_bytes(self) -> int: ...

    def allocate(self, shape: tuple[int, ...]) -> Array:
        """Memory for rows; what is in it does not matter."""

    def encode(self, rows: Array) -> Array: ...

    def decode(self, parts: list[Array]) -> Array:
        """Kept rows, one after the other, as one float32 array of its own."""

    def address(self, block: Array) -> int:
        """Where native code finds it."""

    def table(self, addresses: list[int]) -> Array: ...

    def host(self, kept: Array) -> HostArray:
        """Kept rows as the bytes of a file have them: the memory itself where the host can reach it, else a copy."""

    def take(self, kept: Array, host: HostArray) -> None:
        """What was put into an array that `host` gave becomes the kept rows."""


class HostParts(Sequence[HostArray]):
    """Kept rows as host arrays, each copied when it is looked at: a state on a device is never in host memory whole."""

    def __init__(self, parts: list[Array], host: Callable[[Array], HostArray]) -> None:
        self._parts, self._host = parts, host

    def __len__(self) -> int:
        return len(self._parts)

    @overload
    def __getitem__(self, i: int) -> HostArray: ...

    @overload
    def __getitem__(self, i: slice) -> HostParts: ...

    def __getitem__(self, i: int | slice) -> HostArray | HostParts:
        return HostParts(self._parts[i], self._host) if isinstance(i, slice) else self._host(self._parts[i])


@dataclass(frozen=True)
class StatePart:
    """A named piece of a state as a file has it."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    parts: Sequence[HostArray]


ReadInto = Callable[[str, Sequence[HostArray]], None]  # the name of a piece, and arrays to be filled with it


class Block:
    """Rows of BLOCK positions, the first `written` of which are final."""

    __slots__ = ("address", "charge", "data", "written")

    def __init__(self, storage: Storage, row_shape: tuple[int, ...], account: StateAccount) -> None:
        self.charge = account.take(BLOCK * storage.element_bytes * prod(row_shape))
        self.data = storage.allocate((BLOCK, *row_shape))
        self.address = storage.address(self.data)
        self.written = 0

    @property
    def nbytes(self) -> int:
        return int(self.data.nbytes)


class Rows:
    """A growing table with one row per position."""

    def __init__(self, storage: Storage, *row_shape: int, account: StateAccount | None = None) -> None:
        """`account`: where its blocks are counted."""
        self.storage = storage
        self._account = StateAccount() if account is None else account
        self.row_shape = row_shape
        self._blocks: list[Block] = []
        self._length = 0
        self._table: Array | None = None

    def __len__(self) -> int:
        return self._length

    def append(self, rows: Array) -> None:
        self.append_kept(self.storage.encode(rows))

    def append_kept(self, rows: Array) -> None:
        """Rows that are already as this table keeps them."""
        at, start = self._length, 0
        self.extend(len(rows))
        while start < len(rows):
            offset = at % BLOCK
            n = min(BLOCK - offset, len(rows) - start)
            self._blocks[at // BLOCK].data[offset : offset + n] = rows[start : start + n]
            at, start = at + n, start + n

    def extend(self, n: int) -> None:
        """Make room for n more rows, which count as written from now on."""
        end = self._length + n
        offset = self._length % BLOCK
        if offset and n:
            self._own_last(offset)
            self._blocks[-1].written = min(BLOCK, offset + n)
        while len(self._blocks) * BLOCK < end:
            block = Block(self.storage, self.row_shape, self._account)
            block.written = min(BLOCK, end - len(self._blocks) * BLOCK)
            self._blocks.append(block)
            self._table = None
        self._length = end

    def growth_bytes(self, n: int) -> int:
        """What `extend(n)` would allocate."""
        blocks = -(-(self._length + n) // BLOCK) - len(self._blocks)
        offset = self._length % BLOCK
        copied = bool(offset and n) and self._blocks[-1].written != offset
        return (blocks + copied) * BLOCK * self.row_bytes

    def _own_last(self, offset: int) -> None:
        """Rows from `offset` on may be written: nobody wrote them yet, or into a copy of what stands before them."""
        last = self._blocks[-1]
        if last.written == offset:
            return
        block = Block(self.storage, self.row_shape, self._account)
        block.data[:offset] = last.data[:offset]
        self._blocks[-1] = block
        self._table = None

    def cut(self, length: int) -> None:
        """Forget all rows from `length` on."""
        del self._blocks[-(-length // BLOCK) :]
        self._length = length
        self._table = None

    def share(self, length: int | None = None) -> Rows:
        """The first rows, all by default, as a table of its own on the same blocks."""
        other = Rows(self.storage, *self.row_shape, account=self._account)
        other._length = self._length if length is None else length
        other._blocks = self._blocks[: -(-other._length // BLOCK)]
        return other

    def parts(self) -> list[Array]:
        """The rows as they are kept, block by block."""
        return [block.data[: self._length - i * BLOCK] for i, block in enumerate(self._blocks)]

    @property
    def filled(self) -> Array:
        """All rows as float32."""
        return self.storage.decode(self.parts() or [self.storage.allocate((0, *self.row_shape))])

    @property
    def table(self) -> Array:
        """Addresses of the blocks, for native code."""
        if self._table is None:
            self._table = self.storage.table([block.address for block in self._blocks])
        return self._table

    @property
    def blocks(self) -> list[Block]:
        return self._blocks

    @property
    def row_bytes(self) -> int:
        return self.storage.element_bytes * prod(self.row_shape)

    @property
    def nbytes(self) -> int:
        return sum(block.nbytes for block in self._blocks)


class LayerState(ABC):
    """Rows by position, which can be cut anywhere, and arrays that only go forward."""

    rows: Mapping[str, Rows]
    arrays: Mapping[str, Array]

    @property
    def cuttable(self) -> bool:
        return not self.arrays

    @abstractmethod
    def fork(self) -> LayerState:
        """A state that goes on from here by itself: rows are shared, arrays copied."""

    # To host bytes and back, whatever memory it lives in.

    def host_array(self, array: Array) -> HostArray:
        """One of its arrays for the host: the memory itself, or a copy where it lives on a device."""
        found: HostArray = array
        return found

    def take_array(self, array: Array, host: HostArray) -> None:
        """What was put into an array that `host_array` gave, or any other of its shape, becomes the state's."""
        if host is not array:
            array[...] = host

    def copy_out(self) -> Iterator[StatePart]:
        for name, rows in self.rows.items():
            shape = (len(rows), *rows.row_shape)
            yield StatePart(name, rows.storage.dtype, shape, HostParts(rows.parts(), rows.storage.host))
        for name, array in self.arrays.items():
            yield StatePart(name, "F32", tuple(array.shape), HostParts([array], self.host_array))

    def copy_in(self, n_tokens: int, read_into: ReadInto) -> None:
        """Fill an empty state with what `copy_out` gave of so many tokens."""
        for name, rows in self.rows.items():
            rows.extend(n_tokens)
            kept = rows.parts()
            hosts = [rows.storage.host(part) for part in kept]
            read_into(name, hosts)
            for part, host in zip(kept, hosts, strict=True):
                rows.storage.take(part, host)
        for name, array in self.arrays.items():
            host = self.host_array(array)
            read_into(name, [host])
            self.take_array(array, host)

    @property
    def nbytes(self) -> int:
        return sum(rows.nbytes for rows in self.rows.values()) + self.array_bytes

    @property
    def array_bytes(self) -> int:
        return sum(int(array.nbytes) for array in self.arrays.values())


class KvState(LayerState):
    """Keys and values of grouped-query attention, after norm and rotation."""

    def __init__(self, keys: Rows, values: Rows) -> None:
        self.keys, self.values = keys, values
        self.rows = {"keys": keys, "values": values}
        self.arrays = {}

    def fork(self) -> KvState:
        return KvState(self.keys.share(), self.values.share())


class LatentState(LayerState):
    """Latent attention: the normed latent and, behind it, the rotated key that all heads share."""

    def __init__(self, latents: Rows) -> None:
        self.latents = latents
        self.rows = {"latents": latents}
        self.arrays = {}

    def fork(self) -> LatentState:
        return LatentState(self.latents.share())


class DeltaState(LayerState):
    """Gated delta net: the last inputs of the convolution and the recurrent matrix of each value head."""

    def __init__(self, conv: Array, delta: Array, charge: Charge, account: StateAccount) -> None:
        """`charge`: of its arrays, taken before they were made."""
        self._charge, self._account = charge, account
        self.conv = conv  # [width - 1, C], oldest first, before the convolution
        self.delta = delta  # [value heads, key dim, value dim]
        self.rows = {}
        self.arrays = {"conv": conv, "delta": delta}

    def fork(self) -> DeltaState:
        charge = self._account.take(self.array_bytes)
        return DeltaState(self.conv.copy(), self.delta.copy(), charge, self._account)
