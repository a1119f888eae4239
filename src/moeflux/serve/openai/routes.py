"""OpenAI's routes."""

from __future__ import annotations

from fastapi import APIRouter, Request, Response

from moeflux.serve.documented import ERRORS, answers
from moeflux.serve.errors import refuse
from moeflux.serve.openai import chat, completions
from moeflux.serve.openai.chat_types import ChatChunk, ChatCompletion, ChatRequest
from moeflux.serve.openai.completion_types import Completion, CompletionRequest
from moeflux.serve.openai.models import ModelCard, ModelList, model_card, model_list
from moeflux.serve.service import Service
from moeflux.serve.sse import respond


def openai_routes(service: Service) -> APIRouter:
    router = APIRouter(responses=ERRORS)

    @router.post("/v1/chat/completions", responses=answers(ChatCompletion, ChatChunk), response_model=None)
    async def create_chat_completion(body: ChatRequest, request: Request) -> Response:
        """Answer a conversation."""
        service.check_model(body.model)
        text = service.model.text
        asks = chat.asks_of(body, text)
        answer = chat.ChatAnswer(body, text.tokenizer, service.settings.alias, service.fingerprint)
        return await respond(request, service, asks, answer, bool(body.stream))

    @router.post("/v1/completions", responses=answers(Completion, Completion), response_model=None)
    async def create_completion(body: CompletionRequest, request: Request) -> Response:
        """Continue texts or token ids; with echo and logprobs, score them."""
        service.check_model(body.model)
        text = service.model.text
        asks = completions.asks_of(body, text)
        answer = completions.CompletionAnswer(body, text.tokenizer, service.settings.alias, service.fingerprint)
        return await respond(request, service, asks, answer, bool(body.stream))

    @router.get("/v1/models")
    async def list_models() -> ModelList:
        return model_list(service)

    @router.get("/v1/models/{model:path}")
    async def retrieve_model(model: str) -> ModelCard:
        card = model_card(service)
        if model != card.id:
            raise refuse(f"there is no model {model!r} here", "model", kind="unknown", code="model_not_found")
        return card

    return router
