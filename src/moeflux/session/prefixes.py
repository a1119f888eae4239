"""States by the tokens that they are of, for all sequences of an engine, within the bytes that its plan keeps for them.

Memory first; with a folder, on disk too, where they outlive the process. A state that was found counts as used, and so
do those of shorter texts that it begins with, after it: what many texts begin with stays longest. Those that were promised a
time since their latest use leave last. Room is made before a state is copied or read, and what waits to be written counts
until it is: the limit holds at every moment.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

import numpy as np

from moeflux.backends.state import Block
from moeflux.core.errors import BudgetError, MoefluxError, ReadError, SnapshotError
from moeflux.core.log import log
from moeflux.core.units import format_bytes
from moeflux.runtime.engine import Engine
from moeflux.runtime.sequence import Sequence as EngineSequence
from moeflux.runtime.snapshot import Snapshot, SnapshotSizes, Tokens, blocks_of, own_bytes, unshared_bytes
from moeflux.session.disk import DiskTier, is_missing, modified, remove, touch
from moeflux.session.entry import Entry, Fetch, Limits
from moeflux.session.held import Held
from moeflux.session.tree import PrefixTree

Clock = Callable[[], float]


class PrefixStore:
    """Used by one thread, the one that runs the engine. Files are written by a thread of its own.

    A state can be read from disk beside the engine's steps: `fetch` (this thread), `Fetch.read` (any), `loaded` (this).
    """

    def __init__(
        self, engine: Engine, limits: Limits | None = None, folder: Path | None = None, clock: Clock = time.time
    ) -> None:
        self._engine, self._limits, self._clock = engine, limits or Limits(), clock
        self._limit = _ram_limit(engine, self._limits)
        self._sizes = SnapshotSizes.of(engine.new_states())
        self._tree: PrefixTree[Entry] = PrefixTree()
        self._held = Held()
        self._queued: dict[int, Snapshot] = {}  # for the disk; not written yet, as far as this thread knows
        self._missed: dict[Entry, None] = {}  # for the disk too, when it has time for them; the latest last
        self._order = 0
        self._disk = DiskTier(folder, engine.identity, self._limits.disk_bytes) if folder else None
        if self._disk:
            for stored in sorted(self._disk.stored(), key=lambda s: s.used):
                if len(stored.tokens) <= engine.plan.context:
                    self._tree.put(stored.tokens, Entry(stored.tokens, stored.used, self._next(), None, stored.path))
            self._settle()

    # What is kept.

    @property
    def ram_bytes(self) -> int:
        """Of all snapshots in memory, on their way to the disk or from it; what several share counts once, and also
        where a sequence has it too."""
        return self._held.nbytes

    @property
    def disk_bytes(self) -> int:
        """Of all states in the folder, those of other processes too."""
        return self._disk.nbytes if self._disk else 0

    @property
    def n_states(self) -> int:
        """In memory, on disk or both; from any thread."""
        return len(self._tree)

    @property
    def lengths(self) -> tuple[int, ...]:
        return tuple(sorted(len(entry.tokens) for entry in self._tree))

    @property
    def texts(self) -> list[list[int]]:
        """Tokens of all states, the one used longest ago first."""
        return [entry.tokens.tolist() for entry in sorted(self._tree, key=lambda entry: entry.order)]

    def put(self, snapshot: Snapshot) -> bool:
        """Keep it in memory, and on disk if there is one. False where there is no room."""
        return self._keep(snapshot.tokens, snapshot.own_bytes, snapshot.blocks(), lambda: snapshot)

    def put_sequence(self, sequence: EngineSequence, keep_s: float = 0.0) -> bool:
        """As `put`, with the state that a sequence has now: copied if it is not here yet, and once there is room."""
        sequence.check_usable()
        tokens = np.array(sequence.tokens, dtype=np.int32)
        own = own_bytes(len(tokens), sequence.states)
        return self._keep(tokens, own, blocks_of(sequence.states), sequence.snapshot, keep_s)

    def keep(self, tokens: Sequence[int], keep_s: float) -> None:
        """What is here of these tokens leaves after what nobody asked for: for so long since it was last used."""
        found = self._tree.prefixes(np.asarray(tokens, dtype=np.int32))
        if found and found[-1][1].keep_s < keep_s:
            found[-1][1].keep_s = keep_s
            self._touch(found[-1][1])

    def candidates(self, tokens: Sequence[int], at_most: int) -> list[tuple[int, Entry]]:
        """Where a text can start from, best first: how many of its tokens, and whose state."""
        self._settle()
        text = np.asarray(tokens[:at_most], dtype=np.int32)
        found = [(length, entry) for length, entry in reversed(self._tree.prefixes(text)) if length]
        nearest = self._tree.nearest(text)
        if nearest is not None and self._engine.cuttable and nearest[0] > (found[0][0] if found else 0):
            found.insert(0, nearest)
        return found

    def take(self, entry: Entry, length: int) -> Snapshot | None:
        """The state of the first `length` tokens, read here and now if it must be. None: it cannot be had."""
        snapshot = entry.snapshot
        if snapshot is not None:
            self._use(entry)
        elif fetch := self.fetch(entry):
            outcome: Snapshot | MoefluxError | None = None
            try:
                outcome = fetch.read()
            except MoefluxError as error:
                outcome = error
            finally:
                snapshot = self.loaded(fetch, outcome)
        return None if snapshot is None else snapshot.cut(length)

    def fetch(self, entry: Entry) -> Fetch | None:
        """A state that is on disk only: what reads it, with its bytes reserved. None: not there, or no room for it.

        Each is given to `loaded` once, whatever became of it. `entry.fetches` says how many are under way: a second one
        would read the same.
        """
        self._settle()
        if entry.file is None:
            return None
        n_bytes = self._sizes.held_bytes(len(entry.tokens))
        if not self._make_room(n_bytes, ()):
            return None
        self._held.reserve(n_bytes)
        entry.fetches += 1
        return Fetch(self._engine, entry, entry.file, n_bytes)

    def loaded(self, fetch: Fetch, outcome: Snapshot | MoefluxError | None) -> Snapshot | None:
        """What `read` gave or raised; None: it was not read after all. The snapshot to go on with, if there is one."""
        entry = fetch.entry
        self._held.reserve(-fetch.n_bytes)
        entry.fetches -= 1
        if isinstance(outcome, MoefluxError):
            self._unreadable(fetch, outcome)
            outcome = None
        if self._tree.get(entry.tokens) is not entry:  # forgotten meanwhile: it may be used, but is not kept
            return outcome
        if outcome is not None and entry.snapshot is None:
            entry.snapshot = outcome
            self._held.hold(outcome)
        self._drop_if_gone(entry)
        if entry.snapshot is not None:
            self._use(entry)
        return entry.snapshot

    def drop(self, tokens: Sequence[int]) -> None:
        """From memory and disk."""
        if entry := self._tree.get(np.asarray(tokens, dtype=np.int32)):
            self._forget(entry)

    def flush(self) -> None:
        """Waits until what was put is on disk, and raises where that failed."""
        if self._disk:
            try:
                self._disk.flush()
                while self._write_missed():
                    self._disk.flush()
            finally:
                self._settle()

    def close(self) -> None:
        if self._disk:
            self._disk.close()
            self._settle()
            self._disk = None

    # How.

    def _keep(
        self, tokens: Tokens, own: int, blocks: Iterable[Block], snapshot: Callable[[], Snapshot], keep_s: float = 0.0
    ) -> bool:
        if len(tokens) == 0:
            return False
        self._settle()
        entry = self._tree.get(tokens)
        if entry is None or entry.snapshot is None:
            if not self._make_room(own, list(blocks)):
                return entry is not None and entry.file is not None
            kept = snapshot()
            if entry is None:
                entry = Entry(tokens, self._clock())
                self._tree.put(tokens, entry)
            entry.snapshot = kept
            self._held.hold(kept)
        entry.keep_s = max(entry.keep_s, keep_s)
        self._write(entry, entry.snapshot)
        self._use(entry)
        return True

    def _write(self, entry: Entry, snapshot: Snapshot) -> None:
        if entry.file is not None and modified(entry.file) is None:  # another process removed it
            entry.file = None
        if not self._disk or entry.file is not None or id(snapshot) in self._queued:
            return
        self._missed.pop(entry, None)
        if self._disk.write(snapshot):
            self._queued[id(snapshot)] = snapshot
            self._held.hold(snapshot)
        else:
            self._missed[entry] = None

    def _make_room(self, own: int, blocks: Sequence[Block]) -> bool:
        """For a snapshot: the ones used longest ago leave memory, those with a time to go last; those on disk can come back.

        What is on its way stays. Where even that would not do, nobody leaves.
        """
        fixed = self._held.reserved + unshared_bytes(self._queued.values(), blocks)
        if fixed + own + sum(block.nbytes for block in blocks) > self._limit:
            return False
        while self._held.nbytes + self._held.added_by(own, blocks) > self._limit:
            now = self._clock()
            leaving = min(filter(self._can_leave, self._tree), key=lambda entry: (entry.kept_until > now, entry.order))
            self._leave_memory(leaving)
        return True

    def _can_leave(self, entry: Entry) -> bool:
        return entry.snapshot is not None and id(entry.snapshot) not in self._queued

    def _unreadable(self, fetch: Fetch, error: MoefluxError) -> None:
        """Only what is damaged is removed; a drive or a full memory may do better another time."""
        entry = fetch.entry
        if not is_missing(error):
            log.warning("a kept prefix of %d tokens is not used: %s", len(entry.tokens), error)
        if isinstance(error, SnapshotError):
            remove(fetch.path)
        if isinstance(error, SnapshotError | ReadError) and entry.file == fetch.path:
            entry.file = None

    def _settle(self) -> None:
        """Take note of what was written and removed, and of what is too old by now."""
        for written in self._disk.finished() if self._disk else ():
            self._held.release(self._queued.pop(id(written.snapshot)))
            entry = self._tree.get(written.snapshot.tokens)
            if entry is not None:
                entry.file = written.path if written.kept else entry.file
                self._touch(entry)
            elif written.kept:  # forgotten meanwhile
                remove(written.path)
            for gone in [other for other in self._tree if other.file in written.removed]:
                gone.file = None
                self._drop_if_gone(gone)
        self._write_missed()
        if self._limits.ttl_seconds is not None:
            self._expire(self._clock() - self._limits.ttl_seconds)

    def _write_missed(self) -> bool:
        """What was put while the disk was busy, if it is still in memory: the latest first. Whether anything was."""
        wrote = False
        while self._missed and self._disk and self._disk.has_room:
            entry, _ = self._missed.popitem()
            if entry.snapshot is not None and self._tree.get(entry.tokens) is entry:
                self._write(entry, entry.snapshot)
                wrote = True
        return wrote

    def _expire(self, oldest: float) -> None:
        for entry in [entry for entry in self._tree if entry.kept_until < oldest]:
            if entry.file is not None:  # another process may have used it since
                entry.used = max(entry.used, modified(entry.file) or 0.0)
            if entry.kept_until < oldest:
                self._forget(entry)

    def _use(self, entry: Entry) -> None:
        shorter = [other for length, other in self._tree.prefixes(entry.tokens) if other is not entry]
        for used in (entry, *reversed(shorter)):
            used.used, used.order = self._clock(), self._next()
            self._touch(used)

    def _touch(self, entry: Entry) -> None:
        """On disk the order of leaving is that of the files' times: a promised time counts as use to come."""
        if entry.file is not None:
            touch(entry.file, entry.keep_s)

    def _next(self) -> int:
        self._order += 1
        return self._order

    def _leave_memory(self, entry: Entry) -> None:
        if entry.snapshot is not None:
            self._held.release(entry.snapshot)
            entry.snapshot = None
        self._drop_if_gone(entry)

    def _forget(self, entry: Entry) -> None:
        if entry.file is not None:
            remove(entry.file)
            entry.file = None
        self._leave_memory(entry)
        if entry.fetches:  # its reader finds it forgotten
            self._tree.remove(entry.tokens)

    def _drop_if_gone(self, entry: Entry) -> None:
        if entry.snapshot is None and entry.file is None and not entry.fetches:
            self._tree.remove(entry.tokens)


def _ram_limit(engine: Engine, limits: Limits) -> int:
    """What the plan keeps for states; more would be memory that nobody planned."""
    planned = engine.config.prefix_bytes
    wanted = planned if limits.ram_bytes is None else limits.ram_bytes
    if wanted > planned:
        raise BudgetError(
            f"{format_bytes(wanted)} for kept states, but the plan of this engine has {format_bytes(planned)} for them",
            where="Limits.ram_bytes",
            hint=f"load with prefixes={wanted} or more, or allow less here",
        )
    return wanted
