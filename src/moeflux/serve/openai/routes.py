"""OpenAI's routes."""

from __future__ import annotations

from fastapi import APIRouter, Request, Response

from moeflux.serve.documented import ERRORS, answers
from moeflux.serve.openai.chat import ChatAnswer, asks_of
from moeflux.serve.openai.chat_types import ChatChunk, ChatCompletion, ChatRequest
from moeflux.serve.service import Service
from moeflux.serve.sse import respond


def openai_routes(service: Service) -> APIRouter:
    router = APIRouter(responses=ERRORS)

    @router.post("/v1/chat/completions", responses=answers(ChatCompletion, ChatChunk), response_model=None)
    async def chat_completions(body: ChatRequest, request: Request) -> Response:
        """Answer a conversation."""
        service.check_model(body.model)
        text = service.model.text
        answer = ChatAnswer(body, text.tokenizer, service.settings.alias, service.fingerprint)
        return await respond(request, service, asks_of(body, text), answer, bool(body.stream))

    return router
