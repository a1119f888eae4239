"""Who may use an engine now: one run at a time, in the process that opened it, until it is closed.

No call stands between taking the lock and noting that somebody is inside: there a signal's handler could raise, and the note
would be wrong for ever.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from threading import RLock
from typing import TypeVar

from moeflux.core.errors import ClosedError, StateError

T = TypeVar("T")


class Gate:
    """Threads wait for each other here. A run begun from inside of another one is refused: it would wait for itself."""

    def __init__(self) -> None:
        self._lock = RLock()
        self._process = os.getpid()
        self._inside = self._closed = False
        self._let_go: Callable[[], None] | None = None

    @property
    def here(self) -> bool:
        """False in a child of fork(), which has none of the engine's threads."""
        return os.getpid() == self._process

    def check(self) -> None:
        """Raises where the engine cannot be used at all."""
        if not self.here:
            raise StateError(
                f"the engine was opened in process {self._process} and this is process {os.getpid()}: a child of fork() has "
                "none of its threads",
                hint="load the model again in this process",
            )
        if self._closed:
            raise ClosedError("the engine is closed")

    def run(self, work: Callable[[], T]) -> T:
        """`work`, alone. Another thread's run is waited for."""
        self.check()
        with self._lock:
            if self._inside:
                raise StateError(
                    "a forward was called from inside of a forward of the same engine",
                    hint="call it after that one has ended, or from another thread",
                )
            self._inside = True
            try:
                self.check()
                return work()
            finally:
                self._inside = False
                self._finish()

    def close(self, interrupt: Callable[[], None], let_go: Callable[[], None]) -> None:
        """No run begins from now on; `interrupt` makes the one that is running end soon; then `let_go` is called, once.

        Waits for that, unless it is called from inside of the run itself.
        """
        self._let_go = let_go
        self._closed = True
        interrupt()
        with self._lock:
            if not self._inside:
                self._finish()

    def _finish(self) -> None:
        if self._closed and self._let_go is not None:
            let_go, self._let_go = self._let_go, None
            let_go()
