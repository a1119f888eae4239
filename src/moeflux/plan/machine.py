"""What this machine is, from what the system says about itself: processor, memory, graphics cards, the place of a folder."""

from __future__ import annotations

import os
import shutil
import subprocess
from dataclasses import dataclass
from pathlib import Path

from moeflux.backends.registry import best_isa
from moeflux.plan.memory import PROC, free_memory

HUGE_PAGES = Path("/sys/kernel/mm/transparent_hugepage/enabled")
FIELDS = ("name", "memory.total", "memory.free", "driver_version", "compute_cap")
QUERY = ("nvidia-smi", f"--query-gpu={','.join(FIELDS)}", "--format=csv,noheader,nounits")
SECONDS = 10.0
MIB = 2**20


@dataclass(frozen=True)
class Processor:
    name: str
    cores: int  # that the system has,
    usable: int  # and that this process may use
    isa: str  # the best instruction set that there are kernels for


@dataclass(frozen=True)
class MemoryFacts:
    total: int
    free: int  # without swapping, and within the limits of control groups
    huge_pages: str | None  # always, madvise or never; None where the system does not say


@dataclass(frozen=True)
class Gpu:
    """What its driver says; None where it does not."""

    name: str
    memory: int | None = None
    free: int | None = None
    driver: str | None = None
    capability: str | None = None  # of computing, like 9.0


@dataclass(frozen=True)
class Place:
    """Where a folder is."""

    folder: str
    file_system: str
    free: int


def read_processor(proc: Path = PROC) -> Processor:
    names = [line.split(":", 1)[1].strip() for line in _lines(proc / "cpuinfo") if line.startswith("model name")]
    usable = len(os.sched_getaffinity(0))
    return Processor(names[0] if names else "unknown", os.cpu_count() or usable, usable, best_isa())


def read_memory(proc: Path = PROC, huge_pages: Path = HUGE_PAGES) -> MemoryFacts:
    total = next((int(line.split()[1]) * 1024 for line in _lines(proc / "meminfo") if line.startswith("MemTotal:")), 0)
    words = [word for line in _lines(huge_pages) for word in line.split() if word.startswith("[")]
    return MemoryFacts(total, free_memory(), words[0].strip("[]") if words else None)


def find_gpus(proc: Path = PROC) -> tuple[Gpu, ...]:
    """From nvidia-smi, or from what the driver shows where there is no such program. Loads no library."""
    if shutil.which(QUERY[0]):
        try:
            result = subprocess.run(QUERY, capture_output=True, text=True, timeout=SECONDS)
        except (OSError, subprocess.TimeoutExpired):
            return ()
        rows = [
            line.rsplit(",", len(FIELDS) - 1) for line in result.stdout.splitlines() if line.count(",") >= len(FIELDS) - 1
        ]
        return tuple(_gpu(*(word.strip() for word in row)) for row in rows)
    found = sorted((proc / "driver/nvidia/gpus").glob("*/information"))
    names = [line.split(":", 1)[1].strip() for path in found for line in _lines(path) if line.startswith("Model:")]
    return tuple(Gpu(name) for name in names)


def _gpu(name: str, total: str, free: str, driver: str, capability: str) -> Gpu:
    memory, left = (int(word) * MIB if word.isdigit() else None for word in (total, free))
    version, able = (word if word[:1].isdigit() else None for word in (driver, capability))
    return Gpu(name, memory, left, version, able)


def read_place(folder: Path, proc: Path = PROC) -> Place:
    """The mount with the longest path above the folder is the one that it lies on."""
    inside = folder.resolve()
    mounts = [line.split()[1:3] for line in _lines(proc / "mounts")]
    above = [(point, kind) for point, kind in mounts if inside.is_relative_to(_unescaped(point))]
    _, kind = max(above, key=lambda mount: len(mount[0]), default=("", "unknown"))
    return Place(str(folder), kind, shutil.disk_usage(inside).free)


def _unescaped(point: str) -> str:
    return point.replace("\\040", " ")


def _lines(path: Path) -> list[str]:
    try:
        return path.read_text().splitlines()
    except OSError:
        return []
