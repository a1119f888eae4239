"""Anthropic's routes."""

from __future__ import annotations

from typing import Any

from fastapi import APIRouter, Request, Response

from moeflux.serve.anthropic.answer import Answered, MessagesAnswer
from moeflux.serve.anthropic.asks import ask_of, conversation_of
from moeflux.serve.anthropic.types import (
    AnthropicError,
    CountRequest,
    Message,
    MessageEvent,
    MessagesRequest,
    TokenCount,
)
from moeflux.serve.documented import ERRORS, answers
from moeflux.serve.errors import OVERLOADED
from moeflux.serve.service import Service
from moeflux.serve.sse import id_of, respond
from moeflux.session.diagnosis import Ledger

_ERRORS: dict[int | str, dict[str, Any]] = {
    (OVERLOADED if status == 429 else status): {**said, "model": AnthropicError} for status, said in ERRORS.items()
}


def anthropic_routes(service: Service) -> APIRouter:
    router, ledger = APIRouter(responses=_ERRORS), Ledger()

    @router.post("/v1/messages", responses=answers(Message, MessageEvent), response_model=None)
    async def messages(body: MessagesRequest, request: Request) -> Response:
        """Answer a conversation with a message."""
        service.check_model(body.model)
        ask = ask_of(body, service.model.text)
        whose = Answered(service.settings.alias, ask.prompt, ledger, id_of(request))  # type: ignore[arg-type]
        return await respond(request, service, [ask], MessagesAnswer(body, whose), bool(body.stream))

    @router.post("/v1/messages/count_tokens", response_model=TokenCount)
    async def count_tokens(body: CountRequest) -> TokenCount:
        """Tokens that the prompt of such a request would have."""
        service.check_model(body.model)
        return TokenCount(input_tokens=await service.count_tokens(conversation_of(body)))

    return router
