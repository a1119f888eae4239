"""Files with experts in them, small and awkward: any codec, any sizes, any offsets, several files. Reads nothing itself."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace

import numpy as np

from moeflux.formats.dtypes import encode_float
from moeflux.formats.experts import ExpertLayout, ExpertTable, Projection
from moeflux.formats.files import Extent
from moeflux.formats.quant import Affine, BlockFp8, Codec, Plain
from moeflux.store.store import ExpertStore, StoreOptions

BF16 = Plain("BF16")


@dataclass
class Experts:
    """Stands in for a checkpoint: the store wants only paths and tables."""

    paths: tuple[Path, ...]
    tables: dict[int, ExpertTable]
    contents: dict[tuple[int, int], list[bytes]]  # by layer and expert: the bytes of its components

    @property
    def files(self):
        return SimpleNamespace(paths=self.paths)

    def experts(self, layer: int) -> ExpertTable:
        return self.tables[layer]

    def open(self, **options) -> ExpertStore:
        return ExpertStore(self, sorted(self.tables), StoreOptions(**{"k": 2, **options}))


CODEC = Plain("BF16")


def make_experts(
    folder: Path,
    *,
    n_layers: int = 3,
    n_experts: int = 6,
    codec: Codec = BF16,
    hidden: int = 64,
    width: int = 32,
    n_files: int = 1,
    fused: bool = False,
    seed: int = 0,
    align: int = 1,
    first_layer: int = 0,
) -> Experts:
    """Every component of every expert at an offset of its own, with gaps of random lengths, in random order."""
    rng = np.random.default_rng(seed)
    layout = ExpertLayout(_projections(codec, hidden, width, fused))
    pieces = [
        (layer, expert, i, component)
        for layer in range(first_layer, first_layer + n_layers)
        for expert in range(n_experts)
        for i, component in enumerate(layout.components())
    ]
    files = [bytearray(rng.bytes(int(rng.integers(0, 100)) * align)) for _ in range(n_files)]
    n_parts = len(list(layout.components()))
    contents = {(layer, expert): [b""] * n_parts for layer, expert, _, _ in pieces}
    extents: dict[tuple[int, int, int], Extent] = {}
    for at in rng.permutation(len(pieces)):
        layer, expert, i, component = pieces[at]
        file = int(rng.integers(0, n_files))
        data = _numbers(rng, component.dtype, component.nbytes)
        files[file] += rng.bytes(int(rng.integers(0, 9)) * align)
        extents[layer, expert, i] = Extent(file, len(files[file]), len(data))
        files[file] += data
        contents[layer, expert][i] = data
    paths = tuple(folder / f"part-{i}.bin" for i in range(n_files))
    for path, data in zip(paths, files, strict=True):
        path.write_bytes(data)
    tables = {}
    for layer in range(first_layer, first_layer + n_layers):
        sources = tuple(tuple(extents[layer, e, i] for e in range(n_experts)) for i in range(n_parts))
        tables[layer] = ExpertTable(layer, n_experts, layout, sources)
    return Experts(paths, tables, contents)


def _projections(codec: Codec, hidden: int, width: int, fused: bool) -> tuple[Projection, ...]:
    down = Projection("down", codec, (hidden, width))
    if fused:
        return Projection("gate_up", codec, (2 * width, hidden)), down
    return Projection("gate", codec, (width, hidden)), Projection("up", codec, (width, hidden)), down


def _numbers(rng: np.random.Generator, dtype: str, n_bytes: int) -> bytes:
    """Finite ones: the store checks."""
    if dtype == "U32":
        return rng.bytes(n_bytes)
    if dtype == "F8_E4M3":
        return rng.integers(0, 0x7E, n_bytes, dtype=np.uint8).tobytes()
    n = n_bytes // (4 if dtype == "F32" else 2)
    return encode_float(rng.standard_normal(n, dtype=np.float32), dtype).tobytes()


CODECS = {
    "bf16": Plain("BF16"),
    "affine": Affine(4, 32, "BF16"),
    "affine-f16": Affine(8, 32, "F16"),
    "fp8": BlockFp8((16, 16), "F32"),
}


def held(lease, expert: int) -> list[bytes]:
    """The bytes of an expert as a lease shows them."""
    return [bytes(view) for view in lease.native.views(expert)]


def fill(store: ExpertStore, experts: Experts, n: int | None = None) -> list[tuple[int, int]]:
    """Be the reader of a manual store for the next n jobs, or all. Returns their layers and experts."""
    served = []
    while (n is None or len(served) < n) and (job := store.native.take_job(0)) is not None:
        job.buffer[:] = np.frombuffer(experts.contents[job.layer, job.expert][job.component], np.uint8)
        job.finish(job.length)
        served.append((job.layer, job.expert))
    return served


def load(store: ExpertStore, experts: Experts, layer: int, ids: list[int]) -> None:
    """Bring experts of a manual store into memory."""
    with store.acquire(layer, ids) as lease:
        fill(store, experts)
        lease.wait()


def resident(store: ExpertStore) -> set[tuple[int, int]]:
    return {(layer, expert) for layer, expert, _, state in store.native.slots() if state in ("ready", "leased")}
