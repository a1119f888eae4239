"""States on disk, read by a thread of their own beside the engine's steps."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass

from moeflux.core.errors import InternalError, MoefluxError
from moeflux.runtime.snapshot import Snapshot
from moeflux.session.entry import Fetch
from moeflux.session.prefixes import PrefixStore


@dataclass(frozen=True)
class Load:
    """One that is under way: the state of the first `length` tokens of a text."""

    fetch: Fetch
    length: int
    future: Future[Snapshot]

    @property
    def done(self) -> bool:
        return self.future.done()


class StateLoader:
    """Used by the thread that uses the prefix store."""

    def __init__(self, prefixes: PrefixStore | None, wake: Callable[[], object]) -> None:
        """`wake` is called when something has been read, by another thread."""
        self._prefixes, self._wake = prefixes, wake
        self._thread = ThreadPoolExecutor(1, "moeflux-states")

    def begin(self, ids: Sequence[int], known: int) -> Load | None:
        """Reads the best state of a text, if that is on disk only and longer than what is known; else None."""
        if self._prefixes is None:
            return None
        for length, entry in self._prefixes.candidates(ids, len(ids) - 1):
            if length <= known or entry.snapshot is not None:
                return None
            if fetch := self._prefixes.fetch(entry):
                future = self._thread.submit(fetch.read)
                future.add_done_callback(lambda _: self._wake())
                return Load(fetch, length, future)
        return None

    def finish(self, load: Load) -> Snapshot | None:
        """What was read, or None. To be called once for each."""
        assert self._prefixes is not None
        load.future.cancel()
        outcome: Snapshot | MoefluxError | None = None
        if not load.future.cancelled():
            error = load.future.exception()
            if error is None:
                outcome = load.future.result()
            else:
                outcome = error if isinstance(error, MoefluxError) else InternalError(repr(error))
        snapshot = self._prefixes.loaded(load.fetch, outcome)
        return None if snapshot is None else snapshot.cut(load.length)

    def close(self) -> None:
        self._thread.shutdown()
