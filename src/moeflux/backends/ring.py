"""A bounded queue of deferred expert dispatches: begun in order, completed in the same order, owned by one engine.

While a dispatch waits for its experts, the caller goes on: it can name the experts of later layers or begin the work of
another sequence. Depth 0 runs each dispatch where it is begun. The depth never changes a result: a dispatch is a function of
what it was given at `begin`.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor

from moeflux.backends.state import Array
from moeflux.core.errors import OptionError, RingFullError, StateError

Dispatch = Callable[[], Array]


class Ring:
    """One thread runs the dispatches, so they end in the order in which they began."""

    def __init__(self, depth: int = 0) -> None:
        if depth < 0:
            raise OptionError(f"the depth is {depth}, not zero or more", where="ring")
        self.depth = depth
        self._in_flight: deque[Future[Array]] = deque()
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="moeflux-ring") if depth else None

    def __len__(self) -> int:
        """Dispatches that were begun and not yet completed."""
        return len(self._in_flight)

    def begin(self, dispatch: Dispatch) -> None:
        """Refuses when `depth` dispatches (one, at depth 0) wait for their completion."""
        if len(self._in_flight) >= max(1, self.depth):
            hint = "complete the oldest one first, or open the engine with a deeper ring"
            raise RingFullError(f"{len(self._in_flight)} dispatches are in flight and the depth is {self.depth}", hint=hint)
        if self._thread is not None:
            self._in_flight.append(self._thread.submit(dispatch))
            return
        done: Future[Array] = Future()
        try:
            done.set_result(dispatch())
        except BaseException as error:
            done.set_exception(error)
        self._in_flight.append(done)

    def complete(self) -> Array:
        """The oldest dispatch's result, waited for; its error where it failed."""
        if not self._in_flight:
            raise StateError("no dispatch was begun")
        return self._in_flight.popleft().result()

    def discard(self) -> None:
        """Waits for everything in flight and forgets it, errors too."""
        while self._in_flight:
            self._in_flight.popleft().exception()

    def close(self) -> None:
        self.discard()
        if self._thread is not None:
            self._thread.shutdown()
