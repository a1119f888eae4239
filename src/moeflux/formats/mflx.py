"""State files of the Metal program whose model this one follows ("MFLX", versions 1 and 2), for import.

    u32 words: magic, version, layers, attention interval, kv heads, head dim, conv bytes, delta bytes; version 2 adds latent
    rank and rotary dim. Then the layers in order: with rows by position an i32 count and each table (f32); else conv, delta.

They hold no tokens, no checksum and no name of a model, so the words and all lengths must fit the model exactly.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt

from moeflux.core.errors import ReadError, SnapshotError
from moeflux.core.json_file import check_regular

MAGIC = 0x4D464C58
WORDS = ("layers", "attention interval", "kv heads", "head dim", "conv bytes", "delta bytes", "latent rank", "rotary dim")
_IN_VERSION = {1: 6, 2: 8}

F32 = npt.NDArray[np.float32]


@dataclass(frozen=True)
class MflxLayer:
    """Elements per position of each table, or of each whole array."""

    sizes: tuple[int, ...]
    by_position: bool


def read_mflx(path: Path, words: Sequence[int], layers: Sequence[MflxLayer], n_tokens: int) -> list[list[F32]]:
    """The tables of each layer, flat, with so many positions. `words`: what the model's header must say."""
    try:
        check_regular(path)
        data = path.read_bytes()
    except OSError as error:
        raise ReadError(error.strerror or str(error), where=str(path)) from error
    at = _check_header(path, data, words)
    found = []
    for i, layer in enumerate(layers):
        positions = 1
        if layer.by_position:
            positions = _integer(path, data, at)
            at += 4
            if positions != n_tokens:
                raise SnapshotError(
                    f"layer {i} has {positions} positions, but {n_tokens} tokens were given", where=str(path)
                )
        tables = []
        for size in layer.sizes:
            end = at + positions * size * 4
            if end > len(data):
                raise SnapshotError(f"ends within layer {i}, at {len(data)} of at least {end} bytes", where=str(path))
            tables.append(np.frombuffer(data, dtype="<f4", count=positions * size, offset=at))
            at = end
        found.append(tables)
    if at != len(data):
        raise SnapshotError(f"has {len(data)} bytes, this model's state has {at}", where=str(path))
    return found


def _check_header(path: Path, data: bytes, words: Sequence[int]) -> int:
    if len(data) < 8 or struct.unpack_from("<I", data)[0] != MAGIC:
        raise SnapshotError("is not an MFLX state", where=str(path))
    version = struct.unpack_from("<I", data, 4)[0]
    if version not in _IN_VERSION:
        raise SnapshotError(f"is MFLX version {version}; 1 and 2 can be read", where=str(path))
    n = _IN_VERSION[version]
    if version == 1 and any(words[n:]):
        raise SnapshotError("is MFLX version 1, which has no latent attention", where=str(path))
    if len(data) < 8 + 4 * n:
        raise SnapshotError("ends within its header", where=str(path))
    for name, theirs, ours in zip(WORDS, struct.unpack_from(f"<{n}I", data, 8), words[:n], strict=False):
        if theirs != ours:
            raise SnapshotError(f"is of another model: {name} {theirs}, this one has {ours}", where=str(path))
    return 8 + 4 * n


def _integer(path: Path, data: bytes, at: int) -> int:
    if at + 4 > len(data):
        raise SnapshotError(f"ends at {len(data)} bytes, within a layer", where=str(path))
    return int(struct.unpack_from("<i", data, at)[0])
