"""Files that appear under their name only when they are whole and on the disk. Everything that is kept is written here.

Bytes go into a file beside the target, which takes the target's place at the end: whoever reads sees the old file or
the new one. The unfinished file is locked while its writer lives, so that other processes can tell it from one that a
crash left behind. Only regular files are replaced: a rename onto a device or a pipe would take the node away from
everybody.
"""

from __future__ import annotations

import errno
import fcntl
import os
import secrets
import stat
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import IO

from moeflux.core.errors import WriteError
from moeflux.core.units import format_bytes

UNFINISHED = ".part"  # how names of files end that are being written
PRIVATE = 0o600  # conversations, and states and traces, which hold their tokens
STALE_SECONDS = 86_400  # after which an unfinished file that nobody locks has no writer, whatever its name says

_KINDS = {
    stat.S_IFDIR: "a folder",
    stat.S_IFIFO: "a pipe",
    stat.S_IFSOCK: "a socket",
    stat.S_IFCHR: "a device",
    stat.S_IFBLK: "a device",
}


def write_atomically(
    path: Path, write: Callable[[IO[bytes]], object], *, n_bytes: int | None = None, mode: int = PRIVATE
) -> None:
    """`write` gets a file to fill. All or nothing: until it is whole and on the disk, what was under this name stays.

    A link is followed, and stays. A file that was there keeps its mode; a new one gets `mode`, whatever the umask says.
    `n_bytes`: what is to be written, if that is known; an error says it where there is no room.
    """
    target = find_target(path)
    unfinished: Path | None = None
    try:
        unfinished, descriptor = _open_beside(target)
        with os.fdopen(descriptor, "wb") as file:
            write(file)
            file.flush()
            os.fchmod(descriptor, _mode(target, mode))
            os.fsync(descriptor)
            os.replace(unfinished, target)  # while it is locked: nobody takes it for a leftover
        _sync_folder(target.parent)
    except BaseException as error:
        if unfinished is not None:
            with suppress(OSError):
                unfinished.unlink(missing_ok=True)
        if isinstance(error, OSError):
            raise _write_error(path, error, n_bytes) from error
        raise


def find_target(path: Path) -> Path:
    """The file that writing to `path` replaces or makes: where links lead. Refuses what is not a regular file."""
    try:
        target, found = Path(os.path.realpath(path)), _stat(path)
    except OSError as error:
        raise WriteError(error.strerror or str(error), where=str(path)) from error
    except ValueError as error:  # a NUL, or what no file name can hold
        raise WriteError(f"is not the name of a file: {error}", where=repr(str(path))) from error
    if found is not None and not stat.S_ISREG(found.st_mode):
        kind = _KINDS.get(stat.S_IFMT(found.st_mode), "something else")
        raise WriteError(f"is {kind}, not a regular file", where=str(path), hint="give the name of a file, new or old")
    return target


def remove_stale(folder: Path) -> None:
    """Take away unfinished files whose writers are gone. One that is being written, by anybody, stays."""
    with suppress(OSError):
        for path in folder.iterdir():
            if path.name.endswith(UNFINISHED):
                with suppress(OSError):
                    _remove_if_stale(path)


def _open_beside(target: Path) -> tuple[Path, int]:
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC | os.O_NOFOLLOW
    while True:
        name = f".{target.name[:32]}.{os.getpid()}.{secrets.token_hex(4)}{UNFINISHED}"
        descriptor = os.open(target.with_name(name), flags, PRIVATE)
        with suppress(OSError):  # some file systems have no locks; then only its age tells
            fcntl.flock(descriptor, fcntl.LOCK_EX)
        if os.fstat(descriptor).st_nlink:
            return target.with_name(name), descriptor
        os.close(descriptor)  # between the two calls somebody took it for a leftover


def _remove_if_stale(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK)
    try:
        old = time.time() - os.fstat(descriptor).st_mtime > STALE_SECONDS
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return
        except OSError:
            if not old:
                return
        if old or not _owner_lives(path.name):
            path.unlink()
    finally:
        os.close(descriptor)


def _owner_lives(name: str) -> bool:
    """By the process number in an unfinished file's name. Names of another making have no owner."""
    *_, number, _, _ = ("", "", *name.split("."))
    if not number.isdecimal():
        return False
    try:
        os.kill(int(number), 0)
    except ProcessLookupError:
        return False
    except (OSError, OverflowError):
        return True
    return True


def _stat(path: Path) -> os.stat_result | None:
    """Of where links lead."""
    try:
        return os.stat(path)
    except FileNotFoundError:
        return None


def _mode(target: Path, mode: int) -> int:
    found = _stat(target)
    return mode if found is None else found.st_mode & 0o777


def _sync_folder(folder: Path) -> None:
    """So that the name lasts too. Where a folder may not be read, or cannot do this, the file is there anyway."""
    try:
        descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    except PermissionError:
        return
    try:
        os.fsync(descriptor)
    except OSError as error:
        if error.errno not in (errno.EINVAL, errno.ENOTSUP):
            raise
    finally:
        os.close(descriptor)


def _write_error(path: Path, error: OSError, n_bytes: int | None) -> WriteError:
    reason = error.strerror or str(error)
    if error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
        what = "no room" if n_bytes is None else f"no room for {format_bytes(n_bytes)}"
        return WriteError(f"{what}: {reason}", where=str(path), hint="free some space, or write elsewhere")
    return WriteError(reason, where=str(path))
