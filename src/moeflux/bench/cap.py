"""A machine with less memory, for one child process: a memory control group in which the page cache counts too.

The group is a child of the group that this process is in, is made for one run and removed after it.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Self

from moeflux.core.errors import OptionError
from moeflux.core.units import format_bytes
from moeflux.plan.memory import CGROUPS, PROC
from moeflux.plan.page_cache import cached_share, forget

USUAL_READ_AHEAD = 128  # KiB, Linux's own; with more, a page fault of a mapped model reads what nobody needs
COLD_SHARE = 0.02

# The shell joins the group before it becomes the command, so that every byte of the command counts.
_JOIN = 'echo $$ > "$0" && exec "$@"'


class MemoryCap:
    """Around one run: `with MemoryCap(limit) as cap: subprocess.run(cap.command([...]))`."""

    def __init__(self, limit: int, proc: Path = PROC, cgroups: Path = CGROUPS) -> None:
        self._limit = limit
        self._parent, self._files = _own_group(proc, cgroups)
        self._group = self._parent / f"moeflux-{os.getpid()}"

    def command(self, command: Sequence[str]) -> list[str]:
        return ["/bin/sh", "-c", _JOIN, str(self._group / "cgroup.procs"), *command]

    def __enter__(self) -> Self:
        try:
            self._group.mkdir()
        except OSError as error:
            raise self._refused(f"{error.strerror}: no group can be made there") from error
        try:
            (self._group / self._files.limit).write_text(str(self._limit))
            if (self._group / self._files.swap).exists():
                (self._group / self._files.swap).write_text(self._files.no_swap or str(self._limit))
        except OSError as error:
            self._group.rmdir()
            raise self._refused(f"{error.strerror}: {error.filename}") from error
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._group.rmdir()

    def _refused(self, what: str) -> OptionError:
        hint = "needs the right to make a memory control group below this one: root, or a delegated group"
        return OptionError(f"memory cannot be capped: {what}", where=f"option 'cap', {self._parent}", hint=hint)


@dataclass(frozen=True)
class _Files:
    """What a group calls things. `no_swap` empty: as much as the limit."""

    limit: str
    swap: str
    no_swap: str


_V1 = _Files("memory.limit_in_bytes", "memory.memsw.limit_in_bytes", "")
_V2 = _Files("memory.max", "memory.swap.max", "0")


def _own_group(proc: Path, cgroups: Path) -> tuple[Path, _Files]:
    try:
        lines = (proc / "self/cgroup").read_text().splitlines()
    except OSError as error:
        raise OptionError("there are no control groups here", where="option 'cap'") from error
    for line in lines:
        _, controllers, path = line.split(":", 2)
        if "memory" in controllers.split(","):
            return cgroups / "memory" / path.strip("/"), _V1
    return cgroups / lines[-1].split(":", 2)[2].strip("/"), _V2


def forget_files(paths: Sequence[Path]) -> str | None:
    """Drop them from the page cache. A warning where that did not work, because someone else has them mapped."""
    for path in paths:
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        try:
            forget(descriptor, 0, 0)
            if (size := path.stat().st_size) and (share := cached_share(descriptor, 0, size)) > COLD_SHARE:
                return f"NOT COLD: {share:.0%} of {path} ({format_bytes(size)}) stayed in the page cache"
        finally:
            os.close(descriptor)
    return None


class ReadAhead:
    """How much a drive reads around a page fault: a setting of the machine, changed only for as long as this is entered."""

    def __init__(self, file: Path, kib: int | None, sys: Path = Path("/sys")) -> None:
        self._kib = kib
        device = file.stat().st_dev
        drive = (sys / "dev/block" / f"{os.major(device)}:{os.minor(device)}").resolve()
        places = [drive / "queue/read_ahead_kb", drive.parent / "queue/read_ahead_kb"]  # a partition has its drive's
        self._path = next((place for place in places if place.exists()), None)
        self._before = self.kib

    @property
    def kib(self) -> int | None:
        """Now; None where the drive does not say."""
        return int(self._path.read_text()) if self._path else None

    @property
    def warning(self) -> str | None:
        if self.kib is None or self.kib <= USUAL_READ_AHEAD:
            return None
        return f"{self.kib} KiB are read around a page fault; llama.cpp is faster with --read-ahead {USUAL_READ_AHEAD}"

    def __enter__(self) -> Self:
        if self._kib is not None and self._kib != self._before:
            self._set(self._kib)
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        if self._before is not None and self.kib != self._before:
            self._set(self._before)

    def _set(self, kib: int) -> None:
        try:
            if self._path is None:
                raise FileNotFoundError(0, "this drive has no such setting")
            self._path.write_text(str(kib))
        except OSError as error:
            where = f"option 'read-ahead', {self._path or 'drive'}"
            raise OptionError(f"cannot be set: {error.strerror}", where=where, hint="needs root") from error
