"""The disk tier of the prefix store: one file per snapshot, written by a thread of its own from a bounded queue.

A snapshot never changes, so it can be written while sequences go on. What does not fit into the queue is not taken:
the store gives it again later. Nobody waits for the disk but `flush`. States of other weights or of other arithmetic lie in
folders of their own. Any number of processes may share a folder: a file is whole or not there, and each may remove what
is used least, so that all states together stay within the limit. A file that is gone is a miss. Nobody but its owner
can read any of it.
"""

from __future__ import annotations

import os
import re
import stat
import time
from collections import deque
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from hashlib import blake2b
from pathlib import Path
from queue import Full, Queue
from threading import Thread

from moeflux.core.atomic_file import UNFINISHED, remove_stale
from moeflux.core.errors import MoefluxError, ReadError, WriteError
from moeflux.core.log import log
from moeflux.core.units import format_bytes
from moeflux.formats.snapshot import VERSION, SnapshotFile
from moeflux.runtime.saving import TOKENS, Identity, check_identity, save_snapshot
from moeflux.runtime.snapshot import Snapshot, Tokens

SUFFIX = ".state"
QUEUE_LENGTH = 4
MOST_BYTES = 10 * 2**30  # of all states, where nothing is said,
MOST_SHARE = 10  # and at most one part in so many of what is free
PRIVATE_FOLDER = 0o700

_OURS = re.compile(r"[0-9a-f]{16}")  # names of folders of states


@dataclass(frozen=True)
class StoredFile:
    path: Path
    tokens: Tokens
    used: float  # seconds since the epoch, kept as the file's time of change


@dataclass(frozen=True)
class Written:
    """`kept`: whether it is on the disk. `removed`: files that made room. The snapshot is held until this is seen."""

    snapshot: Snapshot
    path: Path
    kept: bool
    removed: tuple[Path, ...]


class DiskTier:
    """`failed`: why the latest write failed, if it did; what it should have kept is then not on the disk.

    `limit`: bytes of all states in the folder, of any model and process; None: the smaller of 10 GiB and a tenth of
    what is free (or was, before states took it) when this is opened.
    """

    def __init__(self, folder: Path, identity: Identity, limit: int | None) -> None:
        self._identity, self._root = identity, folder
        self._folder = folder / blake2b(repr((VERSION, identity)).encode(), digest_size=8).hexdigest()
        try:
            _open_folders(folder, self._folder)
            self.limit = self._default_limit() if limit is None else limit
        except (OSError, ValueError) as error:
            what = (error.strerror if isinstance(error, OSError) else None) or str(error)
            raise WriteError(what, where=str(self._folder)) from error
        for left in _state_folders(folder):
            remove_stale(left)
        self._prune(0)
        self.failed: MoefluxError | None = None
        self._queue: Queue[Snapshot | None] = Queue(QUEUE_LENGTH)
        self._finished: deque[Written] = deque()
        self._writer = Thread(target=self._run, name="moeflux-prefixes", daemon=True)
        self._writer.start()

    @property
    def nbytes(self) -> int:
        """Of all that is really there, from whichever process, unfinished files too."""
        return sum(n_bytes for _, n_bytes, _ in self._files())

    def path(self, tokens: Tokens) -> Path:
        return self._folder / f"{blake2b(tokens.tobytes(), digest_size=16).hexdigest()}{SUFFIX}"

    def stored(self) -> Iterator[StoredFile]:
        """What processes left. What is damaged is removed; what somebody else removes meanwhile is left out."""
        for path in sorted(self._folder.glob(f"*{SUFFIX}")):
            try:
                with SnapshotFile(path) as file:
                    check_identity(file, self._identity)
                    tokens = file.read(TOKENS)
                yield StoredFile(path, tokens, path.stat().st_mtime)
            except (ReadError, OSError) as error:
                if not is_missing(error):
                    log.warning("%s: not used: %s", path, error)
            except (MoefluxError, KeyError) as error:
                log.warning("%s: not used and removed: %s", path, error)
                remove(path)

    def write(self, snapshot: Snapshot) -> bool:
        """Later, unless the queue is full. `finished` will say what became of it."""
        try:
            self._queue.put_nowait(snapshot)
        except Full:
            return False
        return True

    @property
    def has_room(self) -> bool:
        """Whether it would take another one now."""
        return not self._queue.full()

    def finished(self) -> Iterator[Written]:
        """What was written, or could not be, since this was last asked."""
        while self._finished:
            yield self._finished.popleft()

    def flush(self) -> None:
        """Waits until all that was taken is on the disk; raises where the latest write failed."""
        self._queue.join()
        if self.failed is not None:
            raise self.failed

    def close(self) -> None:
        self._queue.put(None)
        self._writer.join()

    def _run(self) -> None:
        while (snapshot := self._queue.get()) is not None:
            path, kept, removed = self.path(snapshot.tokens), False, list[Path]()
            try:
                self._save(path, snapshot, removed)
                kept, self.failed = True, None
            except Exception as error:  # whatever it is, the next one is written, and nobody waits for ever
                self.failed = error if isinstance(error, MoefluxError) else WriteError(repr(error), where=str(path))
                log.warning("a prefix was not kept on disk: %s", error)
            self._finished.append(Written(snapshot, path, kept, tuple(removed)))
            del snapshot  # or it would stay in memory until the next one comes
            self._queue.task_done()
        self._queue.task_done()

    def _save(self, path: Path, snapshot: Snapshot, removed: list[Path]) -> None:
        def make_room(n_bytes: int) -> None:
            if n_bytes > self.limit:
                what = f"a state of {format_bytes(n_bytes)} does not fit the {format_bytes(self.limit)} on disk"
                raise WriteError(what, where=str(path), hint="allow more with Limits(disk_bytes=…)")
            removed.extend(self._prune(n_bytes))

        with suppress(MoefluxError), SnapshotFile(path) as file:  # another process was first: its bytes are the same
            check_identity(file, self._identity)
            touch(path)
            return
        save_snapshot(path, snapshot, self._identity, None, make_room)

    def _prune(self, room: int) -> list[Path]:
        """Remove what was used longest ago, of any model, until there is room for so many bytes."""
        files = sorted(self._files())
        total, removed = sum(n_bytes for _, n_bytes, _ in files), list[Path]()
        for _, n_bytes, path in files:
            if total + room <= self.limit:
                break
            if path.suffix == SUFFIX:
                remove(path)
                removed.append(path)
                total -= n_bytes
        return removed

    def _files(self) -> Iterator[tuple[float, int, Path]]:
        """When each was last used, and its bytes."""
        for folder in _state_folders(self._root):
            with suppress(OSError):
                for path in folder.iterdir():
                    if path.suffix in (SUFFIX, UNFINISHED):
                        with suppress(OSError):  # gone meanwhile
                            found = path.lstat()
                            yield found.st_mtime, found.st_size, path

    def _default_limit(self) -> int:
        system = os.statvfs(self._root)
        free = system.f_bavail * system.f_frsize + self.nbytes
        limit = min(MOST_BYTES, free // MOST_SHARE)
        log.info("%s: states may take %s on disk", self._root, format_bytes(limit))
        return limit


def _open_folders(root: Path, own: Path) -> None:
    """A root that was there before may be anything: its mode is left alone. What is in our own folders is private."""
    if not root.is_dir():
        root.mkdir(mode=PRIVATE_FOLDER, parents=True, exist_ok=True)
        root.chmod(PRIVATE_FOLDER)  # whatever the umask says
    with suppress(FileExistsError):
        own.mkdir(mode=PRIVATE_FOLDER)
        own.chmod(PRIVATE_FOLDER)
    for folder in _state_folders(root):
        try:
            if stat.S_IMODE(folder.stat().st_mode) & 0o077:
                folder.chmod(PRIVATE_FOLDER)
        except OSError as error:
            log.warning("%s: others may read the conversations in it: %s", folder, error)


def _state_folders(root: Path) -> list[Path]:
    try:
        ours = [path for path in root.iterdir() if _OURS.fullmatch(path.name)]
        return [path for path in ours if path.is_dir() and not path.is_symlink()]
    except OSError:
        return []


def is_missing(error: BaseException) -> bool:
    """Whether it says that a file is not there."""
    return isinstance(error, FileNotFoundError) or isinstance(error.__cause__, FileNotFoundError)


def modified(path: Path) -> float | None:
    """When it was last used, by any process; None: it is not there."""
    try:
        return path.stat().st_mtime
    except OSError:
        return None


def remove(path: Path) -> None:
    with suppress(OSError):
        path.unlink()


def touch(path: Path, later_s: float = 0.0) -> None:
    """Used now, or as if it were so much later: other processes, and those that start later, go on with this order."""
    with suppress(OSError):
        at = time.time() + later_s
        os.utime(path, (at, at))
