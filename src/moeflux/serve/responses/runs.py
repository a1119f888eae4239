"""Responses that outlive their connection: they run on, and any connection reads their events from any number on."""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from moeflux.core.log import log
from moeflux.serve.answering import Answering
from moeflux.serve.errors import problem_of, refuse
from moeflux.serve.responses.answer import ResponsesAnswer
from moeflux.serve.responses.types import ResponseObject
from moeflux.serve.sse import Sse
from moeflux.session.events import Failed

MOST_KEPT = 64


@dataclass(eq=False)
class Run:
    """`items`: what came in, so that another response can follow this one. Belongs to the loop."""

    answer: ResponsesAnswer
    items: Sequence[Mapping[str, Any]]
    answering: Answering | None = None
    events: list[Sse] = field(default_factory=list)  # the number of each is its place
    done: bool = False
    _changed: asyncio.Event = field(default_factory=asyncio.Event)
    _task: asyncio.Task[None] | None = None
    _ended: Callable[[Answering], object] = lambda _: None

    def start(self, answering: Answering, ended: Callable[[Answering], object]) -> None:
        """`ended` is told when it is over."""
        self.answering, self._ended = answering, ended
        self._put(self.answer.begin())
        self._task = asyncio.get_running_loop().create_task(self._go())

    def cancel(self) -> None:
        if not self.done and self.answering is not None:
            self.answering.cancel()

    async def wait(self) -> None:
        if self._task is not None:
            await asyncio.shield(self._task)

    def whole(self) -> ResponseObject:
        return self.answer.whole()

    async def read(self, after: int, heartbeat_s: float | None) -> AsyncIterator[bytes]:
        """Events with higher numbers, as they come. Heartbeats are comments: they are nobody's but this reader's."""
        at = after + 1
        while True:
            if at < len(self.events):
                new, at = self.events[at:], len(self.events)
                yield b"".join(event.encode() for event in new)
                continue
            if self.done:
                return
            changed = self._changed
            try:
                await asyncio.wait_for(changed.wait(), heartbeat_s)
            except TimeoutError:
                yield b": still here\n\n"

    async def _go(self) -> None:
        assert self.answering is not None
        try:
            async for told in self.answering.events(None):
                if told is not None and isinstance(told.event, Failed):
                    raise told.event.error
                if told is not None:
                    self._put(self.answer.take(told))
            self._put(self.answer.end())
        except Exception as error:
            problem = problem_of(error)
            log.info("response %s failed: %s", self.answer.id, error, exc_info=problem.kind == "internal")
            self._put(self.answer.fail(problem))
        finally:
            self.done = True
            self._ended(self.answering)
            self._wake()

    def _put(self, events: list[Sse]) -> None:
        self.events += events
        self._wake()

    def _wake(self) -> None:
        self._changed.set()
        self._changed = asyncio.Event()


class Runs:
    """By the ids of their responses. Those that nothing runs for go when there are many, the oldest first."""

    def __init__(self) -> None:
        self._runs: OrderedDict[str, Run] = OrderedDict()

    def add(self, run: Run) -> None:
        self._runs[run.answer.id] = run
        leaving = [id for id, one in self._runs.items() if one.done or one.answering is None]
        for id in leaving[: max(0, len(self._runs) - MOST_KEPT)]:
            del self._runs[id]

    def get(self, id: str) -> Run:
        if id not in self._runs:
            raise refuse(f"Response with id {id!r} not found.", "response_id", kind="unknown", code="not_found")
        return self._runs[id]

    def before(self, id: str | None) -> Sequence[Mapping[str, Any]]:
        """All items up to the end of this response."""
        if id is None:
            return ()
        run = self._runs.get(id)
        if run is None or not run.answer.over:
            text = f"Previous response with id {id!r} not found."
            raise refuse(text, "previous_response_id", code="previous_response_not_found")
        return (*run.items, *run.answer.output)

    def remove(self, id: str) -> Run | None:
        return self._runs.pop(id, None)
