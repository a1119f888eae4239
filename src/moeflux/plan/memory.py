"""How much memory this process uses, and how much it may: read from /proc and from the limits of its control groups."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

PROC = Path("/proc")
CGROUPS = Path("/sys/fs/cgroup")
LEAST_MARGIN = 512 * 2**20
MARGIN_SHARE = 16  # one in so many bytes of what is free is left to everybody else


def used_now(proc: Path = PROC) -> int:
    """Bytes of this process that are in memory."""
    return _kilobytes(proc / "self/status", "VmRSS")


def used_at_most(proc: Path = PROC) -> int:
    """The most that were in memory at once so far."""
    return _kilobytes(proc / "self/status", "VmHWM")


def free_memory(proc: Path = PROC, cgroups: Path = CGROUPS) -> int:
    """Bytes that can still be had without swapping: what the system has available, or less where a control group says so."""
    return max(0, min(_kilobytes(proc / "meminfo", "MemAvailable"), *_rooms(proc, cgroups)))


def default_budget(free: int, used: int) -> int:
    """For the whole process, so what it uses already counts too; a margin stays free for everybody else."""
    return max(0, free - max(LEAST_MARGIN, free // MARGIN_SHARE)) + used


def _rooms(proc: Path, cgroups: Path) -> Iterator[int]:
    """What each control group above this process still allows. Pages of files are dropped on need, so they count as free."""
    yield 2**62
    try:
        lines = (proc / "self/cgroup").read_text().splitlines()
    except OSError:
        return
    for line in lines:
        number, controllers, path = line.split(":", 2)
        if number == "0" and not controllers:
            yield from _walk(cgroups, path, "memory.max", "memory.current", "")
        elif "memory" in controllers.split(","):
            yield from _walk(cgroups / "memory", path, "memory.limit_in_bytes", "memory.usage_in_bytes", "total_")


def _walk(root: Path, path: str, limit: str, usage: str, prefix: str) -> Iterator[int]:
    """From the group of this process up to the root, the only one there is where a container shows the host's path."""
    here = root / path.strip("/")
    while True:
        most, used = _number(here / limit), _number(here / usage)
        if most is not None and used is not None:
            yield most - used + _file_pages(here / "memory.stat", prefix)
        if here == root or root not in here.parents:
            return
        here = here.parent


def _number(path: Path) -> int | None:
    """None where there is no such file, or no limit ("max")."""
    try:
        text = path.read_text().strip()
    except OSError:
        return None
    return int(text) if text.isdigit() else None


def _file_pages(path: Path, prefix: str) -> int:
    wanted = (f"{prefix}inactive_file", f"{prefix}active_file")
    try:
        words = [line.split() for line in path.read_text().splitlines()]
    except OSError:
        return 0
    return sum(int(word[1]) for word in words if word[0] in wanted)


def _kilobytes(path: Path, key: str) -> int:
    for line in path.read_text().splitlines():
        if line.startswith(f"{key}:"):
            return int(line.split()[1]) * 1024
    return 0
