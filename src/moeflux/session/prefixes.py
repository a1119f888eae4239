"""States by the tokens that they are of, for all sequences of an engine, under one budget of bytes.

Memory first; with a folder, on disk too, where they outlive the process. A state that was found counts as used, and so do
those of shorter texts that it begins with, after it: what many texts begin with stays longest.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from moeflux.core.errors import BudgetError, MoefluxError
from moeflux.core.log import log
from moeflux.runtime.engine import Engine
from moeflux.runtime.saving import load_snapshot
from moeflux.runtime.snapshot import Snapshot, Tokens
from moeflux.session.disk import DiskTier, remove, touch
from moeflux.session.tree import PrefixTree

Clock = Callable[[], float]


@dataclass(eq=False)
class Entry:
    """In memory (`snapshot`), on disk (`file`), on the way there (`pending`), or more than one of these."""

    tokens: Tokens
    used: float
    order: int = 0  # of use, among all entries
    snapshot: Snapshot | None = None
    file: Path | None = None
    file_bytes: int = 0
    pending: bool = False

    @property
    def gone(self) -> bool:
        return self.snapshot is None and self.file is None and not self.pending


@dataclass(frozen=True)
class Limits:
    """Bytes in memory and on disk; seconds after which what was not used is gone."""

    ram_bytes: int
    disk_bytes: int | None = None
    ttl_seconds: float | None = None


class PrefixStore:
    """Used by one thread; files are written by another."""

    def __init__(self, engine: Engine, limits: Limits, folder: Path | None = None, clock: Clock = time.time) -> None:
        self._engine, self._limits, self._clock = engine, limits, clock
        self._tree: PrefixTree[Entry] = PrefixTree()
        self._blocks: dict[int, int] = {}  # of each block in memory: how many entries have it
        self._ram_bytes = 0
        self._order = 0
        self._disk = DiskTier(folder, engine.identity) if folder else None
        if self._disk:
            for stored in sorted(self._disk.stored(), key=lambda s: s.used):
                entry = Entry(stored.tokens, stored.used, self._next(), None, stored.path, stored.nbytes)
                self._tree.put(stored.tokens, entry)
            self._settle()

    # What is kept.

    @property
    def ram_bytes(self) -> int:
        """Of all snapshots in memory; what several share counts once, and also where a sequence has it too."""
        return self._ram_bytes

    @property
    def disk_bytes(self) -> int:
        return sum(entry.file_bytes for entry in self._tree)

    @property
    def lengths(self) -> tuple[int, ...]:
        return tuple(sorted(len(entry.tokens) for entry in self._tree))

    def put(self, snapshot: Snapshot) -> bool:
        """Keep it in memory, and on disk if there is one. False where it fits neither."""
        if len(snapshot) == 0:
            return False
        self._settle()
        entry = self._tree.get(snapshot.tokens)
        if entry is None:
            entry = Entry(snapshot.tokens, self._clock())
            self._tree.put(snapshot.tokens, entry)
        if entry.snapshot is None:
            entry.snapshot = snapshot
            self._count(snapshot, 1)
        if self._disk and entry.file is None and not entry.pending:
            entry.pending = self._disk.write(snapshot)
        self._use(entry)
        self._shrink()
        return not entry.gone

    def candidates(self, tokens: Sequence[int], at_most: int) -> list[tuple[int, Entry]]:
        """Where a text can start from, best first: how many of its tokens, and whose state."""
        self._settle()
        text = np.asarray(tokens[:at_most], dtype=np.int32)
        found = [(length, entry) for length, entry in reversed(self._tree.prefixes(text)) if length]
        nearest = self._tree.nearest(text)
        if nearest is not None and self._cuttable and nearest[0] > (found[0][0] if found else 0):
            found.insert(0, nearest)
        return found

    def take(self, entry: Entry, length: int) -> Snapshot | None:
        """The state of the first `length` tokens; None where it turns out to be unreadable, and then it is gone."""
        snapshot = entry.snapshot if entry.snapshot is not None else self._load(entry)
        if snapshot is None:
            return None
        self._use(entry)
        self._shrink()
        return snapshot.cut(length)

    def drop(self, tokens: Sequence[int]) -> None:
        """From memory and disk."""
        if entry := self._tree.get(np.asarray(tokens, dtype=np.int32)):
            self._forget(entry)

    def flush(self) -> None:
        """Waits until what was put is on disk, and raises where that failed."""
        if self._disk:
            try:
                self._disk.flush()
            finally:
                self._settle()

    def close(self) -> None:
        if self._disk:
            self._disk.close()
            self._settle()
            self._disk = None

    # How.

    @property
    def _cuttable(self) -> bool:
        return self._engine.cuttable

    def _load(self, entry: Entry) -> Snapshot | None:
        if entry.file is None:  # still being written
            return None
        try:
            states = self._engine.sequence().states
            snapshot, _ = load_snapshot(entry.file, states, self._engine.identity, self._engine.spec.vocab)
        except BudgetError:  # nothing is wrong with the file
            return None
        except MoefluxError as error:
            log.warning("a kept prefix of %d tokens is not used and removed: %s", len(entry.tokens), error)
            self._forget(entry)
            return None
        entry.snapshot = snapshot
        self._count(snapshot, 1)
        return snapshot

    def _settle(self) -> None:
        """Take note of what was written and of what is too old or too much by now."""
        for written in self._disk.finished() if self._disk else ():
            entry = self._tree.get(written.tokens)
            if entry is None:  # forgotten meanwhile
                remove(written.path)
                continue
            entry.pending = False
            if written.nbytes is not None:
                entry.file, entry.file_bytes = written.path, written.nbytes
            self._drop_if_gone(entry)
        if self._limits.ttl_seconds is not None:
            oldest = self._clock() - self._limits.ttl_seconds
            for entry in [entry for entry in self._tree if entry.used < oldest]:
                self._forget(entry)
        self._shrink()

    def _use(self, entry: Entry) -> None:
        shorter = [other for length, other in self._tree.prefixes(entry.tokens) if other is not entry]
        for used in (entry, *reversed(shorter)):
            used.used, used.order = self._clock(), self._next()
            if used.file is not None:
                touch(used.file)

    def _next(self) -> int:
        self._order += 1
        return self._order

    def _count(self, snapshot: Snapshot, by: int) -> None:
        self._ram_bytes += by * snapshot.own_bytes
        for block in snapshot.blocks():
            before = self._blocks.get(id(block), 0)
            self._blocks[id(block)] = before + by
            if before + by == 0:
                del self._blocks[id(block)]
            if before == 0 or before + by == 0:
                self._ram_bytes += by * block.nbytes

    def _shrink(self) -> None:
        """The ones used longest ago leave memory, and the disk; those that are on disk can come back."""
        while self._ram_bytes > self._limits.ram_bytes:
            self._leave_memory(min((e for e in self._tree if e.snapshot is not None), key=lambda e: e.order))
        while self._limits.disk_bytes is not None and self.disk_bytes > self._limits.disk_bytes:
            self._leave_disk(min((e for e in self._tree if e.file is not None), key=lambda e: e.order))

    def _leave_memory(self, entry: Entry) -> None:
        if entry.snapshot is not None:
            self._count(entry.snapshot, -1)
            entry.snapshot = None
        self._drop_if_gone(entry)

    def _leave_disk(self, entry: Entry) -> None:
        if entry.file is not None:
            remove(entry.file)
            entry.file, entry.file_bytes = None, 0
        self._drop_if_gone(entry)

    def _forget(self, entry: Entry) -> None:
        entry.pending = False
        self._leave_memory(entry)
        self._leave_disk(entry)

    def _drop_if_gone(self, entry: Entry) -> None:
        if entry.gone:
            self._tree.remove(entry.tokens)
