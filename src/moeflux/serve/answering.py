"""The answers that one HTTP request waits for: events of the worker's thread, taken by the loop.

The worker's thread never waits for the loop. Whatever happened between two turns of the loop crosses with one wake-up.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncIterator, Callable, Sequence
from concurrent.futures import Executor
from contextlib import suppress
from dataclasses import dataclass
from functools import partial

from moeflux.core.errors import MoefluxError, OverloadError
from moeflux.serve.asks import Ask
from moeflux.serve.track import RequestTrack
from moeflux.session.events import Event, Failed, Finish, Token
from moeflux.session.handle import Handle, Listen, RequestOptions
from moeflux.session.work import AnyPrompt

AGAIN_S = 0.2  # until a later prompt of one request, refused because the line is full, is sent again

Submit = Callable[[AnyPrompt, RequestOptions, Listen], Handle]


@dataclass(frozen=True)
class Told:
    """Something happened to the answer in place `index` of what was asked."""

    index: int
    event: Event


class Mailbox:
    """From any thread to the loop that made it."""

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._items: deque[Told] = deque()
        self._waiter: asyncio.Future[bool] | None = None  # True: something came
        self._woken = False

    def put(self, told: Told) -> None:
        self._items.append(told)
        if not self._woken:
            self._woken = True
            with suppress(RuntimeError):  # the loop is closed: nobody listens any more
                self._loop.call_soon_threadsafe(self._wake, True)

    async def take(self, seconds: float | None) -> Told | None:
        """The next one; None where nothing came within so many seconds."""
        while not self._items:
            self._waiter = self._loop.create_future()
            self._woken = False
            if self._items:  # came before it was noted that somebody waits
                break
            timer = None if seconds is None else self._loop.call_later(seconds, self._wake, False)
            try:
                if not await self._waiter:
                    return None
            finally:
                if timer is not None:
                    timer.cancel()
        return self._items.popleft()

    def _wake(self, came: bool) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(came)


class Answering:
    """Submits what was asked, no more than `window` at once, and gives events in order until every answer has ended."""

    def __init__(self, asks: Sequence[Ask], track: RequestTrack, submit: Submit, threads: Executor, window: int) -> None:
        self._asks, self._submit, self._threads, self._window = asks, submit, threads, window
        self.track = track
        self._mail = Mailbox()
        self._handles: dict[int, Handle] = {}
        self._prompted: set[int] = set()  # whose prompt was run
        self._open = 0
        self._next = deque(range(len(asks)))
        self._cancelled = False

    async def begin(self) -> None:
        """The first is submitted: raises what is the client's mistake, and OverloadError where too many wait."""
        await self._start(self._next.popleft())

    async def events(self, heartbeat_s: float | None = None) -> AsyncIterator[Told | None]:
        """None: nothing happened for so long. Ends after the last answer, or after the first that failed."""
        while self._open or self._next:
            await self._start_more()
            told = await self._mail.take(self._patience(heartbeat_s))
            if told is not None:
                self._note(told)
                yield told
                if isinstance(told.event, Failed):
                    self.cancel()
                    return
            elif not self._next or self._open:
                yield None

    def cancel(self) -> None:
        """Nobody wants any of it any more."""
        self._cancelled = True
        self._next.clear()
        for handle in self._handles.values():
            if not handle.done:
                handle.cancel()

    def _note(self, told: Told) -> None:
        self.track.note(told.index, told.event)
        if isinstance(told.event, (Token, Finish, Failed)):
            self._prompted.add(told.index)
        if isinstance(told.event, (Finish, Failed)):
            self._open -= 1

    def _patience(self, heartbeat_s: float | None) -> float | None:
        waits = bool(self._next) and not self._open
        return AGAIN_S if waits else heartbeat_s

    async def _start_more(self) -> None:
        while self._next and self._open < self._window and not self._cancelled:
            index = self._next[0]
            beside = self._asks[index].beside
            if beside is not None and beside not in self._prompted:
                return
            self._next.popleft()
            try:
                await self._start(index)
            except OverloadError:  # the request was taken, so it waits for its other prompts
                if not self._cancelled:
                    self._next.appendleft(index)
                return
            except MoefluxError as error:
                self._open += 1
                self._mail.put(Told(index, Failed(error)))
                return

    async def _start(self, index: int) -> None:
        ask = self._asks[index]
        call = partial(self._submit, ask.prompt, ask.options, lambda event: self._mail.put(Told(index, event)))
        handle = await asyncio.get_running_loop().run_in_executor(self._threads, call)
        self._open += 1
        self._handles[index] = handle
        if self._cancelled:
            handle.cancel()
