"""The disk tier of the prefix store: one file per snapshot, written by a thread of its own from a bounded queue.

A snapshot never changes, so it can be written while sequences go on. What does not fit into the queue is not written: the
disk is a convenience, and nobody waits for it but `flush`. Files of other weights lie in folders of their own.
"""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from hashlib import blake2b
from pathlib import Path
from queue import Full, Queue
from threading import Thread

from moeflux.core.atomic_file import UNFINISHED
from moeflux.core.errors import MoefluxError, WriteError
from moeflux.core.log import log
from moeflux.formats.snapshot import SnapshotFile
from moeflux.runtime.saving import TOKENS, Identity, check_identity, save_snapshot
from moeflux.runtime.snapshot import Snapshot, Tokens

SUFFIX = ".state"
QUEUE_LENGTH = 4


@dataclass(frozen=True)
class StoredFile:
    path: Path
    tokens: Tokens
    nbytes: int
    used: float  # seconds since the epoch, kept as the file's time of change


@dataclass(frozen=True)
class Written:
    """`nbytes`: None where it could not be written."""

    tokens: Tokens
    path: Path
    nbytes: int | None


class DiskTier:
    """`failed`: why the latest write failed, if it did; what it should have kept is then not on the disk."""

    def __init__(self, folder: Path, identity: Identity) -> None:
        self._identity = identity
        self._folder = folder / blake2b(repr(identity).encode(), digest_size=8).hexdigest()
        try:
            self._folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise WriteError(error.strerror or str(error), where=str(self._folder)) from error
        self.failed: MoefluxError | None = None
        self._queue: Queue[Snapshot | None] = Queue(QUEUE_LENGTH)
        self._finished: deque[Written] = deque()
        self._writer = Thread(target=self._run, name="moeflux-prefixes", daemon=True)
        self._writer.start()

    def path(self, tokens: Tokens) -> Path:
        return self._folder / f"{blake2b(tokens.tobytes(), digest_size=16).hexdigest()}{SUFFIX}"

    def stored(self) -> Iterator[StoredFile]:
        """What earlier processes left. What they did not finish, or what cannot be read, is removed."""
        for path in sorted(self._folder.iterdir()):
            if path.name.endswith(UNFINISHED):
                remove(path)
            elif path.suffix == SUFFIX:
                try:
                    with SnapshotFile(path) as file:
                        check_identity(file, self._identity)
                        tokens = file.read(TOKENS)
                    stat = path.stat()
                    yield StoredFile(path, tokens, stat.st_size, stat.st_mtime)
                except (MoefluxError, KeyError, OSError) as error:
                    log.warning("%s: not used and removed: %s", path, error)
                    remove(path)

    def write(self, snapshot: Snapshot) -> bool:
        """Later, unless the queue is full. `finished` will say what became of it."""
        try:
            self._queue.put_nowait(snapshot)
        except Full:
            return False
        return True

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
            path, n_bytes = self.path(snapshot.tokens), None
            try:
                n_bytes = save_snapshot(path, snapshot, self._identity)
                self.failed = None
            except Exception as error:  # whatever it is, the next one is written, and nobody waits for ever
                self.failed = error if isinstance(error, MoefluxError) else WriteError(repr(error), where=str(path))
                log.warning("a prefix was not kept on disk: %s", error)
            self._finished.append(Written(snapshot.tokens, path, n_bytes))
            del snapshot  # or it would stay in memory until the next one comes
            self._queue.task_done()
        self._queue.task_done()


def remove(path: Path) -> None:
    with suppress(OSError):
        path.unlink()


def touch(path: Path) -> None:
    """Used now: a process that starts later goes on with this order."""
    with suppress(OSError):
        os.utime(path)
