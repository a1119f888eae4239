"""What a prefix store knows of one state, what it may take, and how a state is read from its file beside other work."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import numpy as np

from moeflux.core.errors import BudgetError, OptionError, SnapshotError
from moeflux.core.units import format_bytes
from moeflux.runtime.engine import Engine
from moeflux.runtime.saving import load_snapshot
from moeflux.runtime.snapshot import Snapshot, Tokens


@dataclass(frozen=True)
class Limits:
    """Bytes in memory and on disk; seconds after which what was not used is gone.

    `ram_bytes`: at most what the engine was loaded with (`prefixes=`); None: all of that. `disk_bytes`: of all states
    in the folder, of any model and process; None: the smaller of 10 GiB and a tenth of what is free when the store is
    opened.
    """

    ram_bytes: int | None = None
    disk_bytes: int | None = None
    ttl_seconds: float | None = None

    def __post_init__(self) -> None:
        for name in ("ram_bytes", "disk_bytes", "ttl_seconds"):
            value = getattr(self, name)
            if value is not None and not value >= 0:
                raise OptionError(f"{value!r} is not a limit", where=f"Limits.{name}", hint="0 or more, or None")


@dataclass(eq=False)
class Entry:
    """A state in memory (`snapshot`), on disk (`file`), on its way from there (`fetches`), or several of these."""

    tokens: Tokens
    used: float
    order: int = 0  # of use, among all entries
    snapshot: Snapshot | None = None
    file: Path | None = None
    fetches: int = 0
    keep_s: float = 0.0  # from its latest use on, as long as there is room for it

    @property
    def kept_until(self) -> float:
        return self.used + self.keep_s


class Fetch:
    """A state that is to be read; the store has reserved its bytes. See PrefixStore.fetch."""

    def __init__(self, engine: Engine, entry: Entry, path: Path, n_bytes: int) -> None:
        self.entry, self.path, self.n_bytes = entry, path, n_bytes
        self._engine, self._identity = engine, engine.identity

    def read(self) -> Snapshot:
        """In any thread. Raises a typed error where the file is gone, damaged, or not what it was."""
        try:
            states, vocab = self._engine.new_states(), self._engine.spec.vocab
            snapshot, _ = load_snapshot(self.path, states, self._identity, vocab, self._check_length)
        except MemoryError:
            raise BudgetError(f"no memory for a state of {format_bytes(self.n_bytes)}", where=str(self.path)) from None
        if not np.array_equal(snapshot.tokens, self.entry.tokens):
            raise self._changed()
        return snapshot

    def _check_length(self, n: int) -> None:
        """More tokens than were listed would take more memory than was reserved."""
        if n != len(self.entry.tokens):
            raise self._changed()

    def _changed(self) -> SnapshotError:
        return SnapshotError("is no longer the state that was listed under this name", where=str(self.path))
