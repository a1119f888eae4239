"""Answers on the wire: whole, or as server-sent events with a heartbeat. A client that goes away ends its work at once."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass
from typing import Any, Protocol

from fastapi import Request, Response
from pydantic import BaseModel

from moeflux.core.log import log
from moeflux.serve.answering import Answering, Told
from moeflux.serve.asks import Ask
from moeflux.serve.errors import Problem, problem_of
from moeflux.serve.service import Service
from moeflux.session.events import Failed

STREAM_HEADERS = ((b"content-type", b"text/event-stream; charset=utf-8"), (b"x-accel-buffering", b"no"))

Receive = Callable[[], Awaitable[Any]]
Send = Callable[[Any], Awaitable[None]]


@dataclass(frozen=True)
class Sse:
    """One event. `data` is JSON on one line."""

    data: str
    event: str | None = None

    def encode(self) -> bytes:
        name = f"event: {self.event}\n" if self.event else ""
        return f"{name}data: {self.data}\n\n".encode()


COMMENT = b": still here\n\n"


class Accumulator(Protocol):
    """One request's answers in one dialect. It sees every event, streamed or not; `whole` is what its pieces add up to."""

    def begin(self) -> list[Sse]:
        """As soon as the request was taken, before anything was computed."""

    def take(self, told: Told) -> list[Sse]:
        """Never a Failed."""

    def end(self) -> list[Sse]:
        """After the last answer."""

    def fail(self, problem: Problem) -> list[Sse]:
        """In place of the rest."""

    def beat(self) -> bytes:
        """Nothing happened for a while."""

    def whole(self) -> BaseModel:
        """After the last answer, without a stream."""


async def respond(request: Request, service: Service, asks: list[Ask], answer: Accumulator, stream: bool) -> Response:
    """Raises what can still be told with a status."""
    answering = await service.begin(asks, id_of(request), client_of(request))

    def end() -> None:
        service.end(answering)
        request.state.note.update(answering.track.summary)

    if stream:
        pieces = stream_of(answering, answer, service.settings.heartbeat, id_of(request))
        return EventStream(pieces, answering.cancel, end)
    watcher = asyncio.create_task(_watch(request.receive, answering.cancel))
    try:
        await gather(answering, answer)
    finally:
        watcher.cancel()
        end()
    return Response(answer.whole().model_dump_json(exclude_unset=True), media_type="application/json")


async def gather(answering: Answering, answer: Accumulator) -> None:
    """All events into the accumulator. Raises the error of one that failed."""
    answer.begin()
    async for told in answering.events():
        if told is not None and isinstance(told.event, Failed):
            raise told.event.error
        if told is not None:
            answer.take(told)
    answer.end()


async def stream_of(answering: Answering, answer: Accumulator, heartbeat_s: float, request_id: str) -> AsyncIterator[bytes]:
    """What a stream sends, piece by piece."""
    yield _joined(answer.begin())
    try:
        async for told in answering.events(heartbeat_s or None):
            if told is None:
                yield answer.beat()
            elif isinstance(told.event, Failed):
                raise told.event.error
            elif pieces := answer.take(told):
                yield _joined(pieces)
        yield _joined(answer.end())
    except Exception as error:
        problem = problem_of(error)
        level = log.error if problem.kind == "internal" else log.info
        level("request %s failed in its stream: %s", request_id, error, exc_info=problem.kind == "internal")
        yield _joined(answer.fail(problem))


class EventStream(Response):
    """Headers at once, then pieces as they come. `gone`: the client is. `end`: in any case, at the end."""

    def __init__(self, pieces: AsyncIterator[bytes], gone: Callable[[], None], end: Callable[[], None]) -> None:
        super().__init__(media_type="text/event-stream")
        self._pieces, self._gone, self._end = pieces, gone, end

    async def __call__(self, scope: Any, receive: Receive, send: Send) -> None:
        watcher = asyncio.create_task(_watch(receive, self._gone))
        try:
            await send({"type": "http.response.start", "status": 200, "headers": list(STREAM_HEADERS)})
            async for piece in self._pieces:
                if piece:
                    await send({"type": "http.response.body", "body": piece, "more_body": True})
            await send({"type": "http.response.body", "body": b"", "more_body": False})
        finally:
            watcher.cancel()
            self._end()


def id_of(request: Request) -> str:
    return str(request.state.id)


def client_of(request: Request) -> str:
    """Whose turn it is: see `serve/guard`."""
    return str(request.state.client)


async def _watch(receive: Receive, gone: Callable[[], None]) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
    gone()


def _joined(pieces: list[Sse]) -> bytes:
    return b"".join(piece.encode() for piece in pieces)
