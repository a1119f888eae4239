"""A look at the machine before any model: what it has, what moeflux will use of it, what would make it faster."""

from __future__ import annotations

import mmap
import os
import tempfile
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from moeflux.backends.registry import OLDEST_GPU, missing_packages, open_backend
from moeflux.core.config import EngineConfig
from moeflux.core.units import format_bytes
from moeflux.formats.checkpoint import Checkpoint, read_config
from moeflux.models.registry import read_spec
from moeflux.plan.machine import Gpu, MemoryFacts, Place, Processor, find_gpus, read_memory, read_place, read_processor
from moeflux.plan.memory import default_budget, used_now
from moeflux.plan.page_cache import cached_share, forget
from moeflux.plan.probe import MemoryProbe, probe_drive, probe_memory

FILE_BYTES = 256 * 2**20
READ_BYTES = 4 * 2**20
N_READERS = 4
SLOW_DRIVE = 2e9  # bytes per second: below it, streaming experts is what everything waits for
BEST_ISA = "avx512_vnni"


@dataclass(frozen=True)
class DriveSpeed:
    bytes_s: float
    cold: bool  # False: some of it came from memory
    how: str


@dataclass(frozen=True)
class Diagnosis:
    processor: Processor
    memory: MemoryFacts
    rates: MemoryProbe
    gpus: tuple[Gpu, ...]
    place: Place
    drive: DriveSpeed | None  # None: it could not be measured
    budget: int  # that a model gets where none is named
    uses: tuple[str, ...]
    faster: tuple[str, ...]

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)


def diagnose(path: Path, *, is_model: bool) -> Diagnosis:
    """`path`: a model, whose own experts are read to measure the drive, or a folder, where a file is written for that."""
    processor, memory, gpus = read_processor(), read_memory(), find_gpus()
    place = read_place(path if path.is_dir() else path.parent)
    rates = probe_memory(open_backend(EngineConfig(path, "native", processor.usable)))
    assert rates is not None
    drive = _model_speed(path) if is_model else folder_speed(path, place.free)
    budget = default_budget(memory.free, used_now())
    uses = tuple(_uses(processor, gpus, budget))
    faster = tuple(_faster(processor, memory, place, drive))
    return Diagnosis(processor, memory, rates, gpus, place, drive, budget, uses, faster)


def _model_speed(path: Path) -> DriveSpeed:
    spec = read_spec(read_config(path))
    checkpoint = Checkpoint(path, spec.names)
    try:
        probe = probe_drive(checkpoint, [layer for layer, _ in spec.moe_layers()])
    finally:
        checkpoint.close()
    how = f"experts of this model, {'past' if probe.direct else 'through'} the page cache, {probe.n_readers} readers"
    return DriveSpeed(probe.bytes_s, probe.cold, how)


def folder_speed(folder: Path, free: int) -> DriveSpeed | None:
    """A file is written, read back and removed. Drives keep some of what was just written in memory of their own."""
    n_bytes = min(FILE_BYTES, free // 20) // READ_BYTES * READ_BYTES
    if not n_bytes:
        return None
    try:
        with tempfile.NamedTemporaryFile(dir=folder, prefix=".moeflux-doctor-") as file:
            block = os.urandom(READ_BYTES)
            for _ in range(n_bytes // READ_BYTES):
                file.write(block)
            file.flush()
            os.fsync(file.fileno())
            return _read_back(file.name, file.fileno(), n_bytes)
    except OSError:
        return None


def _read_back(name: str, descriptor: int, n_bytes: int) -> DriveSpeed:
    forget(descriptor, 0, n_bytes)
    cold = cached_share(descriptor, 0, n_bytes) < 0.02
    try:
        reader, direct = os.open(name, os.O_RDONLY | os.O_CLOEXEC | os.O_DIRECT), True
    except OSError:
        reader, direct = os.open(name, os.O_RDONLY | os.O_CLOEXEC), False
    try:
        buffers = [mmap.mmap(-1, READ_BYTES) for _ in range(N_READERS)]
        start = time.perf_counter()
        with ThreadPoolExecutor(N_READERS) as readers:
            list(readers.map(lambda i: _read_every(reader, buffers[i], i * READ_BYTES, n_bytes), range(N_READERS)))
        seconds = time.perf_counter() - start
    finally:
        os.close(reader)
    how = f"a file of {format_bytes(n_bytes)}, {'past' if direct else 'through'} the page cache, {N_READERS} readers"
    return DriveSpeed(n_bytes / seconds, direct or cold, how)


def _read_every(descriptor: int, buffer: mmap.mmap, offset: int, end: int) -> None:
    while offset < end:
        if os.preadv(descriptor, [buffer], offset) <= 0:
            raise OSError("the file ended early")
        offset += N_READERS * READ_BYTES


def _uses(processor: Processor, gpus: tuple[Gpu, ...], budget: int) -> Iterator[str]:
    threads = f"{processor.usable} thread{'s' if processor.usable > 1 else ''}"
    yield f"the native backend with {processor.isa} kernels and {threads}"
    yield f"up to {format_bytes(budget)} of memory where --ram says nothing else"
    for gpu in gpus[:1]:
        reason = gpu_unusable(gpu)
        yield f"no GPU: {reason}" if reason else f"{gpu.name} where a model has kernels for it and its trunk fits there"


def gpu_unusable(gpu: Gpu) -> str | None:
    """Why it cannot be used, or None, as far as can be said without opening it."""
    if missing := missing_packages():
        return f"the packages {' and '.join(missing)} are not installed (pip install 'moeflux[cuda]')"
    if gpu.capability is not None and tuple(map(int, gpu.capability.split("."))) < OLDEST_GPU:
        return f"{gpu.name} has compute capability {gpu.capability}, kernels need {'.'.join(map(str, OLDEST_GPU))}"
    return None


def _faster(processor: Processor, memory: MemoryFacts, place: Place, drive: DriveSpeed | None) -> Iterator[str]:
    if processor.isa != BEST_ISA:
        yield f"a processor with AVX-512 and VNNI: this one runs the {processor.isa} kernels"
    if processor.usable < processor.cores:
        yield f"all cores: this process may use {processor.usable} of {processor.cores}"
    if memory.huge_pages == "never":
        yield "huge pages: set transparent_hugepage to madvise"
    if memory.free < memory.total // 2:
        yield f"free memory: {format_bytes(memory.free)} of {format_bytes(memory.total)} can be had now"
    if place.file_system in ("nfs", "nfs4", "cifs", "fuse", "9p", "fuse.sshfs", "virtiofs"):
        yield f"a local drive: {place.folder} lies on {place.file_system}"
    if drive and drive.bytes_s < SLOW_DRIVE:
        yield f"a faster drive: this one gives {format_bytes(drive.bytes_s)}/s, NVMe drives several GB/s"
