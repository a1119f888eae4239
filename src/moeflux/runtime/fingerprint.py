"""Which weights these are: a number that other weights of the same shape do not have.

Made from config.json, the headers and sizes of all files, and some bytes of every tensor (of experts that are stored one by
one, of some). So a fine-tuned model differs from the one it came from, and reading costs milliseconds, not the file.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from hashlib import blake2b

import numpy as np

from moeflux.formats.checkpoint import Checkpoint
from moeflux.formats.files import Extent

SAMPLE_BYTES = 64
MAX_EXPERT_TENSORS = 512

_ONE_EXPERT = re.compile(r"\.experts\.\d+\.")


def fingerprint(checkpoint: Checkpoint) -> str:
    digest = blake2b(digest_size=16)
    digest.update(json.dumps(checkpoint.config, sort_keys=True).encode())
    for name in sorted(checkpoint.names):
        extent = checkpoint.extent(name)
        digest.update(f"{name} {checkpoint.files.paths[extent.file].name} {extent.offset} {extent.length}\n".encode())
    for name in _sampled(sorted(checkpoint.names)):
        digest.update(_sample(checkpoint, name))
    return digest.hexdigest()


def _sampled(names: list[str]) -> Iterator[str]:
    single = [name for name in names if _ONE_EXPERT.search(name)]
    yield from (name for name in names if not _ONE_EXPERT.search(name))
    yield from single[:: max(1, len(single) // MAX_EXPERT_TENSORS)]


def _sample(checkpoint: Checkpoint, name: str) -> bytes:
    """Bytes from a place that the name chooses, so that not all tensors are looked at where they begin."""
    whole = checkpoint.extent(name)
    n = min(SAMPLE_BYTES, whole.length)
    place = int.from_bytes(blake2b(name.encode(), digest_size=8).digest(), "little") % (whole.length - n + 1)
    buffer = np.empty(n, dtype=np.uint8)
    checkpoint.files.read(Extent(whole.file, whole.offset + place, n), buffer)
    return buffer.tobytes()
