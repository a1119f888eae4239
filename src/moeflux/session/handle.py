"""A request as its caller sees it, and as the worker keeps it. Every handle ends with exactly one `Finish` or `Failed`."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from queue import SimpleQueue
from threading import Event as Signal
from threading import Lock
from typing import Any

from moeflux.core.errors import OptionError
from moeflux.core.log import log
from moeflux.sampling.constraint import Grammar
from moeflux.sampling.params import MOST_LOGPROBS
from moeflux.session.events import Event, Failed, Finish, Token

Listen = Callable[[Event], object]  # called by the worker's thread, so it must not wait


@dataclass(frozen=True)
class RequestOptions:
    """How to answer. `sampling`: changes to the checkpoint's own way (temperature, top_k, seed, …)."""

    max_tokens: int | None = None  # None: until the context is full; 0: the prompt is run and kept, and nothing is said
    stop: str | Sequence[str] = ()
    grammar: Grammar | None = None
    sampling: Mapping[str, Any] = field(default_factory=dict)
    breakpoints: tuple[int, ...] = ()  # positions of the prompt where the caller wants to start again
    keep_s: float = 0.0  # how long the state of the prompt is to be kept at least
    reasoning_budget: int | None = None  # tokens; a thought that is longer is ended
    score: int | None = None  # the prompt's own tokens too, with so many alternatives: all of it is run, and nothing kept
    priority: int = 0  # higher comes first
    client: str = ""  # of one priority, clients take turns: who asks often does not keep others waiting
    deadline_s: float | None = None  # from now; what is not done then ends with a DeadlineError

    def __post_init__(self) -> None:
        n = self.reasoning_budget
        if n is not None and (isinstance(n, bool) or not isinstance(n, int) or n < 0):
            raise OptionError(f"{n!r} is not a number of tokens", where="option 'reasoning_budget'")
        for name in ("priority", "deadline_s", "keep_s"):
            value = getattr(self, name)
            if value is not None and (isinstance(value, bool) or not isinstance(value, (int, float)) or value != value):
                raise OptionError(f"{value!r} is not a number", where=f"option {name!r}")
        n = self.score
        if n is not None and (isinstance(n, bool) or not isinstance(n, int) or not 0 <= n <= MOST_LOGPROBS):
            raise OptionError(f"{n!r} is not a whole number from 0 to {MOST_LOGPROBS}", where="option 'score'")


class Handle:
    """Iterate over `events`, or give the worker a callback. `cancel` and all the rest from any thread."""

    def __init__(self, cancel: Callable[[], None], place: Callable[[], int | None], listen: Listen | None) -> None:
        self._cancel, self._place = cancel, place
        self._queue: SimpleQueue[Event] | None = None if listen else SimpleQueue()
        self._listen: Listen = listen or self._queue.put  # type: ignore[union-attr]
        self._lock, self._ended = Lock(), Signal()
        self.result_event: Finish | Failed | None = None

    def cancel(self) -> None:
        """It ends with the layer of the prompt, or the step, that is being computed; at once where it waits."""
        self._cancel()

    @property
    def done(self) -> bool:
        return self._ended.is_set()

    @property
    def place(self) -> int | None:
        """How many come before it; None where it runs or is over."""
        return self._place()

    def events(self) -> Iterator[Event]:
        """All of them, once, by one thread; the last is a Finish or a Failed."""
        if self._queue is None:
            raise OptionError("events go to the callback that was given", where="option 'listen'")
        while True:
            event = self._queue.get()
            yield event
            if isinstance(event, (Finish, Failed)):
                return

    def tokens(self) -> Iterator[Token]:
        """As they come; raises the error where it fails. Then `result` says how it ended."""
        for event in self.events():
            if isinstance(event, Token):
                yield event
            elif isinstance(event, Failed):
                raise event.error

    def result(self, seconds: float | None = None) -> Finish:
        """Waits for the end. Raises the error of a request that failed, and TimeoutError where it takes longer."""
        if not self._ended.wait(seconds):
            raise TimeoutError(f"the request was not done within {seconds} s")
        assert self.result_event is not None
        if isinstance(self.result_event, Failed):
            raise self.result_event.error
        return self.result_event

    # For the worker.

    def tell(self, event: Event) -> None:
        """In order. After the last event nothing is told any more."""
        is_last = isinstance(event, (Finish, Failed))
        with self._lock:
            if self._ended.is_set() or self.result_event is not None:
                return
            if isinstance(event, (Finish, Failed)):
                self.result_event = event
        try:
            self._listen(event)
        except Exception:
            if not is_last:
                raise
            log.exception("a callback failed on the last event of a request")
        finally:
            if is_last:
                self._ended.set()
                self._let_go()

    def _let_go(self) -> None:
        """Of the request and its caller: both may hold this, and large states would live until somebody looks for cycles."""
        self._cancel, self._place, self._listen = _nothing, _nothing, _ignore


def _nothing() -> None:
    pass


def _ignore(event: Event) -> None:
    pass
