"""Reading for the store in Python: `os.preadv` on threads. The oracle of the native readers, with the same answers to
short reads, interruptions, failing drives, files that end early and file systems without direct reads.
"""

from __future__ import annotations

import errno
import mmap
import os
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from threading import Lock, Thread

import moeflux._native as _native
from moeflux.core.errors import ReadError
from moeflux.core.log import log

PAGE = 4096
BOUNCE_BYTES = 2**20
RETRIES = 2
PAUSE_S = 0.005
PATIENCE_S = 0.25  # between two looks whether the store is closed; closing wakes a reader anyhow


@dataclass
class Outcome:
    """How a read ended: bytes that arrived, errno (0 with too few bytes: the file ends there), failed attempts."""

    done: int = 0
    error: int = 0
    retries: int = 0


class FileReader:
    """One file, through the page cache or past it."""

    def __init__(self, path: Path, *, direct: bool) -> None:
        self._path = path
        flags = os.O_RDONLY | os.O_CLOEXEC
        try:
            self._buffered = os.open(path, flags)
        except OSError as error:
            raise ReadError(error.strerror or str(error), where=str(path)) from error
        self._direct = -1
        self._refused = False  # by the file system, at the first read
        self._lock = Lock()
        if direct:
            try:
                self._direct = os.open(path, flags | os.O_DIRECT)
            except OSError:
                log.warning("%s: its file system has no direct reads; it is read through the page cache", path)

    def read(self, offset: int, into: memoryview) -> Outcome:
        outcome = Outcome()
        if self._direct >= 0 and not self._refused:
            self._read_direct(offset, into, outcome)
            if outcome.error != errno.EINVAL:
                return outcome
            self._refuse()
            outcome.done = outcome.error = 0
        self._read_buffered(offset, into, outcome)
        return outcome

    def close(self) -> None:
        for descriptor in (self._buffered, self._direct):
            if descriptor >= 0:
                os.close(descriptor)

    def _refuse(self) -> None:
        with self._lock:
            if not self._refused:
                log.warning("%s: direct reads are refused; it is read through the page cache", self._path)
            self._refused = True

    def _read_buffered(self, offset: int, into: memoryview, outcome: Outcome) -> None:
        while outcome.done < len(into):
            got = _some(self._buffered, into[outcome.done :], offset + outcome.done, outcome)
            if got <= 0:
                return
            outcome.done += got

    def _read_direct(self, offset: int, into: memoryview, outcome: Outcome) -> None:
        """Whole pages into memory of our own, from which the bytes are copied."""
        with mmap.mmap(-1, BOUNCE_BYTES) as memory, memoryview(memory) as pages:
            while outcome.done < len(into):
                at = offset + outcome.done
                skip = at % PAGE
                wanted = min(len(into) - outcome.done, BOUNCE_BYTES - skip)
                whole = -(-(skip + wanted) // PAGE) * PAGE
                with pages[:whole] as room:
                    got = _some(self._direct, room, at - skip, outcome)
                useful = min(got - skip, wanted)
                if useful > 0:
                    into[outcome.done : outcome.done + useful] = pages[skip : skip + useful]
                    outcome.done += useful
                    continue
                if got > 0:  # cut before the first byte that is wanted: the page cache can go on from there
                    self._read_buffered(offset, into, outcome)
                return


def _some(descriptor: int, into: memoryview, offset: int, outcome: Outcome) -> int:
    """One read of at least one byte: 0 at the end of the file, -1 where `outcome` has an error. Python repeats EINTR."""
    for attempt in range(1, RETRIES + 2):
        try:
            return os.preadv(descriptor, [into], offset)
        except OSError as error:
            number = error.errno or errno.EIO
            if number not in (errno.EIO, errno.EAGAIN) or attempt > RETRIES:
                outcome.error = number
                break
            outcome.retries += 1
            time.sleep(PAUSE_S * attempt)
    return -1


class PythonReaders:
    """Threads that serve a store until it is closed."""

    def __init__(self, store: _native.Store, paths: Sequence[Path], n: int, *, direct: bool) -> None:
        self._store = store
        self._files: list[FileReader] = []
        try:
            for path in paths:
                self._files.append(FileReader(path, direct=direct))
        except BaseException:
            self._close_files()
            raise
        self._threads = [Thread(target=self._work, name=f"reader-{i}", daemon=True) for i in range(n)]
        for thread in self._threads:
            thread.start()

    def join(self) -> None:
        """After the store was closed."""
        for thread in self._threads:
            thread.join()
        self._close_files()

    def _work(self) -> None:
        while not self._store.closed:
            job = self._store.take_job(PATIENCE_S)
            if job is not None:
                outcome = self._files[job.file].read(job.offset, memoryview(job.buffer.data))
                job.finish(outcome.done, outcome.error, outcome.retries)

    def _close_files(self) -> None:
        while self._files:
            self._files.pop().close()
