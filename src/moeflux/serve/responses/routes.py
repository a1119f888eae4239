"""Routes of Responses."""

from __future__ import annotations

from typing import Annotated

from fastapi import APIRouter, Query, Request, Response
from fastapi.responses import JSONResponse

from moeflux.serve.documented import ERRORS, answers
from moeflux.serve.errors import refuse
from moeflux.serve.responses.answer import Answered, ResponsesAnswer
from moeflux.serve.responses.asks import ask_of, input_items
from moeflux.serve.responses.runs import Run, Runs
from moeflux.serve.responses.types import Deleted, ResponseEvent, ResponseObject, ResponsesRequest
from moeflux.serve.service import Service
from moeflux.serve.sse import EventStream, client_of, id_of, respond
from moeflux.session.diagnosis import Ledger


def responses_routes(service: Service) -> APIRouter:
    router, ledger, runs = APIRouter(responses=ERRORS), Ledger(), Runs()

    def streamed(run: Run, after: int) -> EventStream:
        return EventStream(run.read(after, service.settings.heartbeat or None), _nothing, _nothing)

    @router.post("/v1/responses", responses=answers(ResponseObject, ResponseEvent), response_model=None)
    async def create(body: ResponsesRequest, request: Request) -> Response:
        """Answer with a response."""
        service.check_model(body.model)
        text, earlier = service.model.text, runs.before(body.previous_response_id)
        ask = ask_of(body, text, earlier)
        whose = Answered(service.settings.alias, ask.prompt, ledger, text.tokenizer, text.defaults)  # type: ignore[arg-type]
        run = Run(ResponsesAnswer(body, whose), [*earlier, *input_items(body)])
        if body.background:
            run.start(await service.begin([ask], id_of(request), client_of(request)), service.end)
            runs.add(run)
            return streamed(run, -1) if body.stream else _told(run.whole())
        if body.store is not False:
            runs.add(run)
        return await respond(request, service, [ask], run.answer, bool(body.stream))

    @router.post("/v1/responses/compact", include_in_schema=False)
    async def compact() -> Response:
        raise refuse("conversations are not compacted here", kind="unknown")

    @router.get("/v1/responses/{response_id}", responses=answers(ResponseObject, ResponseEvent), response_model=None)
    async def retrieve(
        response_id: str, stream: bool = False, starting_after: Annotated[int, Query(ge=-1, le=2**31)] = -1
    ) -> Response:
        """A response as it is now, or its events from a number on."""
        run = runs.get(response_id)
        return streamed(run, starting_after) if stream else _told(run.whole())

    @router.post("/v1/responses/{response_id}/cancel", responses={200: {"model": ResponseObject}}, response_model=None)
    async def cancel(response_id: str) -> Response:
        """End a response that runs in the background."""
        run = runs.get(response_id)
        run.cancel()
        await run.wait()
        return _told(run.whole())

    @router.delete("/v1/responses/{response_id}", response_model=Deleted)
    async def delete(response_id: str) -> Deleted:
        """Forget a response."""
        runs.get(response_id).cancel()
        runs.remove(response_id)
        return Deleted(id=response_id, object="response", deleted=True)

    return router


def _nothing() -> None:
    """A reader that goes away ends nothing."""


def _told(response: ResponseObject) -> Response:
    return JSONResponse(response.model_dump(exclude_unset=True))
