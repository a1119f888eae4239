"""A file of named arrays with checksums: how states are kept on disk. It knows nothing about models.

    magic (8 bytes)  version, header length, checksum of both and of the header (3 x u32)  header (JSON)  sections

The header lists the sections in the order in which they lie, without gaps, and the file ends with the last one: there is
no byte that no checksum covers. A file appears under its name only when it is whole and on the disk.
"""

from __future__ import annotations

import json
import os
import struct
import zlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from math import prod
from operator import index
from pathlib import Path
from types import TracebackType
from typing import IO, Any, Self

import numpy as np
import numpy.typing as npt

from moeflux.core.atomic_file import write_atomically
from moeflux.core.errors import ReadError, SnapshotError
from moeflux.core.json_file import check_regular, parse_json
from moeflux.core.units import format_bytes
from moeflux.formats.dtypes import STORAGE

MAGIC = b"moeflux\x1a"
VERSION = 1
MAX_HEADER_BYTES = 16 * 2**20

_PREFIX = struct.Struct("<8sIII")
Array = npt.NDArray[Any]


@dataclass(frozen=True)
class Section:
    """One array to be written: the pieces that it consists of, one after the other, and how it is to be read."""

    name: str
    dtype: str  # as in safetensors
    shape: tuple[int, ...]
    parts: Sequence[Array]  # looked at twice: for the checksum and for the file

    @property
    def nbytes(self) -> int:
        return prod(self.shape) * STORAGE[self.dtype].itemsize


@dataclass(frozen=True)
class Entry:
    """A section in a file."""

    dtype: str
    shape: tuple[int, ...]
    offset: int
    nbytes: int
    checksum: int


def write_snapshot(
    path: Path, about: Mapping[str, Any], sections: Sequence[Section], make_room: Callable[[int], None] | None = None
) -> int:
    """All or nothing: until it is whole and on the disk, what was under this name stays. Returns the bytes written.

    `make_room` is told the bytes of the file before the first is written.
    """
    header = json.dumps({"about": about, "sections": [_describe(section) for section in sections]}).encode()
    if len(header) > MAX_HEADER_BYTES:
        raise SnapshotError(f"a header of {format_bytes(len(header))} is larger than {format_bytes(MAX_HEADER_BYTES)}")
    prefix = _PREFIX.pack(MAGIC, VERSION, len(header), _header_checksum(VERSION, header))
    total = len(prefix) + len(header) + sum(section.nbytes for section in sections)

    def write(file: IO[bytes]) -> None:
        file.write(prefix + header)
        for section in sections:
            for part in section.parts:
                file.write(_bytes(part))

    if make_room:
        make_room(total)
    write_atomically(path, write, n_bytes=total)
    return total


def _describe(section: Section) -> dict[str, Any]:
    checksum, n_bytes = 0, 0
    for part in section.parts:
        checksum = zlib.crc32(_bytes(part), checksum)
        n_bytes += part.nbytes
    assert n_bytes == section.nbytes, section.name
    return {"name": section.name, "dtype": section.dtype, "shape": list(section.shape), "crc32": checksum}


def _bytes(part: Array) -> memoryview:
    assert part.flags.c_contiguous
    return part.reshape(-1).view(np.uint8).data


def _header_checksum(version: int, header: bytes) -> int:
    return zlib.crc32(header, zlib.crc32(struct.pack("<II", version, len(header))))


class SnapshotFile:
    """A snapshot opened for reading: its header is checked, its sections are when they are read."""

    def __init__(self, path: Path) -> None:
        self.path = path
        try:
            check_regular(path)
            self._file = path.open("rb")
        except OSError as error:
            raise ReadError(error.strerror or str(error), where=str(path)) from error
        try:
            self.about, self.sections = self._read_header()
        except BaseException:
            self._file.close()
            raise

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._file.close()

    def read(self, name: str) -> Array:
        """A whole section."""
        entry = self.sections[name]
        array = np.empty(entry.shape, dtype=STORAGE[entry.dtype])
        self.read_into(name, [array])
        return array

    def read_into(self, name: str, parts: Sequence[Array]) -> None:
        """A section into contiguous arrays that together have its size. Raises where its bytes are not what was written."""
        entry, checksum = self.sections[name], 0
        assert entry.nbytes == sum(part.nbytes for part in parts), name
        try:
            self._file.seek(entry.offset)
            for part in parts:
                view = _bytes(part)
                if self._file.readinto(view) != len(view):
                    raise self._damaged(f"section {name!r} ends too early")
                checksum = zlib.crc32(view, checksum)
        except OSError as error:
            raise ReadError(error.strerror or str(error), where=str(self.path)) from error
        if checksum != entry.checksum:
            raise self._damaged(f"section {name!r} is not what was written")

    def _read_header(self) -> tuple[dict[str, Any], dict[str, Entry]]:
        size = os.fstat(self._file.fileno()).st_size
        prefix = self._file.read(_PREFIX.size)
        if len(prefix) < _PREFIX.size or not prefix.startswith(MAGIC):
            raise SnapshotError("is not a snapshot", where=str(self.path))
        _, version, length, checksum = _PREFIX.unpack(prefix)
        if version != VERSION:
            age = "a newer" if version > VERSION else "an older"
            raise SnapshotError(
                f"was written by {age} moeflux: version {version}, this one reads {VERSION}",
                where=str(self.path),
                hint="run the prompt again"
                if version < VERSION
                else "use the moeflux that wrote it, or run the prompt again",
            )
        if length > min(MAX_HEADER_BYTES, size):
            raise self._damaged(f"a header of {length} bytes in a file of {size}")
        header = self._file.read(length)
        if len(header) < length or checksum != _header_checksum(version, header):
            raise self._damaged("its header is not what was written")
        fields = parse_json(header, str(self.path))
        try:
            about, sections = dict(fields["about"]), _entries(fields["sections"], _PREFIX.size + length)
        except (KeyError, TypeError, ValueError) as error:
            raise self._damaged(f"its header makes no sense: {error!r}") from None
        end = max((entry.offset + entry.nbytes for entry in sections.values()), default=_PREFIX.size + length)
        if end != size:
            raise self._damaged(f"has {size} bytes, should have {end}")
        return about, sections

    def _damaged(self, what: str) -> SnapshotError:
        return SnapshotError(
            f"the snapshot is damaged: {what}", where=str(self.path), hint="delete it; the prompt can be run again"
        )


def _entries(described: list[dict[str, Any]], at: int) -> dict[str, Entry]:
    entries: dict[str, Entry] = {}
    for fields in described:
        name, dtype, shape = str(fields["name"]), fields["dtype"], tuple(map(index, fields["shape"]))
        if name in entries or any(size < 0 for size in shape):
            raise ValueError(f"section {name!r}")
        n_bytes = prod(shape) * STORAGE[dtype].itemsize
        entries[name] = Entry(dtype, shape, at, n_bytes, index(fields["crc32"]))
        at += n_bytes
    return entries
