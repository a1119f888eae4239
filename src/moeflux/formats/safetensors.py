"""One safetensors file: its header, believed only after every number in it has been checked.

Written by hand rather than taken from the safetensors package because extents (file offset and length of every
tensor) are what this project streams, and because every refusal must name file and tensor.
"""

from __future__ import annotations

import os
import struct
from dataclasses import dataclass
from math import prod
from pathlib import Path
from reprlib import repr as shown
from typing import Any, TypeGuard

from moeflux.core.errors import FormatError, ReadError
from moeflux.core.json_file import check_regular, parse_json
from moeflux.formats.dtypes import STORAGE

MAX_HEADER_BYTES = 100_000_000  # the limit of the reference implementation
MAX_DIMENSION = 2**40
MAX_RANK = 8
MAX_OFFSET = 2**63 - 1


@dataclass(frozen=True, slots=True)
class TensorEntry:
    """A stored array: type, shape, and its place counted from the start of the file."""

    dtype: str
    shape: tuple[int, ...]
    offset: int
    length: int


def read_header(path: Path) -> dict[str, TensorEntry]:
    """The tensors of a file. Reads the header only."""
    try:
        check_regular(path)
        with path.open("rb") as file:
            size = os.fstat(file.fileno()).st_size
            length = _header_length(file.read(8), size, path)
            text = file.read(length)
    except OSError as error:
        raise ReadError(error.strerror or str(error), where=str(path)) from error
    header = parse_json(text, str(path))
    header.pop("__metadata__", None)
    start = 8 + length
    entries = {name: _entry(name, fields, start, path) for name, fields in header.items()}
    _check_extents(entries, start, size, path)
    return entries


def _header_length(prefix: bytes, size: int, path: Path) -> int:
    if len(prefix) < 8:
        raise FormatError(f"{size} bytes is too short for a safetensors file", where=str(path), hint="download it again")
    (length,) = struct.unpack("<Q", prefix)
    if length > min(MAX_HEADER_BYTES, size - 8):
        raise FormatError(
            f"the header claims {length} bytes, the file has {size}",
            where=str(path),
            hint="the file is cut short or not a safetensors file; download it again",
        )
    return int(length)


def _entry(name: str, fields: Any, start: int, path: Path) -> TensorEntry:
    if not name.isprintable():
        raise FormatError(f"a tensor is named {shown(name)}, which cannot be printed", where=str(path))
    where = f"{path}: {name}"
    if not isinstance(fields, dict):
        raise FormatError("its header entry is not an object", where=where)
    dtype, shape, offsets = fields.get("dtype"), fields.get("shape"), fields.get("data_offsets")
    if not isinstance(dtype, str) or dtype not in STORAGE:
        raise FormatError(f"unknown dtype {shown(dtype)}", where=where, hint=f"known: {', '.join(STORAGE)}")
    if not _naturals(shape, MAX_DIMENSION) or len(shape) > MAX_RANK:
        raise FormatError(f"impossible shape {shown(shape)}", where=where)
    if not _naturals(offsets, MAX_OFFSET) or len(offsets) != 2 or offsets[0] > offsets[1]:
        raise FormatError(f"impossible data_offsets {shown(offsets)}", where=where)
    length, needed = offsets[1] - offsets[0], prod(shape) * STORAGE[dtype].itemsize
    if length != needed:
        raise FormatError(f"{dtype} of shape {shape} needs {needed} bytes, the header gives it {length}", where=where)
    return TensorEntry(dtype, tuple(shape), start + offsets[0], length)


def _naturals(value: Any, high: int) -> TypeGuard[list[int]]:
    return isinstance(value, list) and all(type(n) is int and 0 <= n <= high for n in value)


def _check_extents(entries: dict[str, TensorEntry], start: int, size: int, path: Path) -> None:
    """Tensors lie side by side, without overlap or holes, up to the last byte of the file."""
    ordered = sorted(entries.items(), key=lambda item: (item[1].offset, item[1].length))
    for name, entry in ordered:
        if entry.offset + entry.length > size:
            raise FormatError(
                f"ends at byte {entry.offset + entry.length}, the file at {size}",
                where=f"{path}: {name}",
                hint="the file is cut short; download it again",
            )
    end, before = start, "the header"
    for name, entry in ordered:
        if entry.offset != end:
            relation = "overlaps" if entry.offset < end else f"leaves {entry.offset - end} unused bytes after"
            raise FormatError(f"{relation} {before}", where=f"{path}: {name}")
        end, before = entry.offset + entry.length, name
    if end != size:
        raise FormatError(f"{size - end} bytes follow the last tensor", where=str(path))
