"""Routes for texts and tokens: what scoring tools ask of a server so that they need no tokenizer of their own."""

from __future__ import annotations

from typing import Any

from fastapi import APIRouter
from pydantic import BaseModel, ConfigDict, Field

from moeflux.serve.documented import ERRORS
from moeflux.serve.errors import refuse
from moeflux.serve.openai.chat_types import ChatMessage
from moeflux.serve.openai.fields import Whole
from moeflux.serve.service import Service
from moeflux.session.prompt import Conversation
from moeflux.text.template import SPECIAL


class TokenizeRequest(BaseModel):
    """A text (`prompt`, or `content` as others call it), or a conversation."""

    model_config = ConfigDict(extra="ignore")

    prompt: str | None = None
    content: str | None = None
    messages: list[ChatMessage] | None = None
    tools: list[dict[str, Any]] | None = None
    add_special_tokens: bool = Field(default=True, description="Those that the model puts around a document.")


class Tokenized(BaseModel):
    tokens: list[int]
    count: int
    max_model_len: int


class DetokenizeRequest(BaseModel):
    model_config = ConfigDict(extra="ignore")

    tokens: list[Whole]


class Detokenized(BaseModel):
    prompt: str
    content: str


def token_routes(service: Service) -> APIRouter:
    router = APIRouter(responses=ERRORS)

    @router.post("/tokenize")
    async def tokenize(body: TokenizeRequest) -> Tokenized:
        model = service.model
        text = body.content if body.prompt is None else body.prompt
        if (text is None) == (body.messages is None):
            raise refuse("either a prompt or messages", "prompt")
        if body.messages is not None:
            messages = [message.model_dump(exclude_unset=True) for message in body.messages]
            ids = await service.encode(Conversation(messages, body.tools))
        elif body.add_special_tokens:
            ids = await service.encode(text or "")
        else:
            ids = await service.prepare(model.text.tokenizer.encode_rendered, text or "")
        return Tokenized(tokens=ids, count=len(ids), max_model_len=model.engine.plan.context)

    @router.post("/detokenize")
    async def detokenize(body: DetokenizeRequest) -> Detokenized:
        text = service.model.text
        if any(id >= text.n_ids for id in body.tokens):
            raise refuse(f"ids are below {text.n_ids}", "tokens")
        words = await service.prepare(text.tokenizer.decode, body.tokens)
        return Detokenized(prompt=words, content=words)

    @router.get("/tokenizer_info")
    async def tokenizer_info() -> dict[str, Any]:
        """What the model's tokenizer_config.json says, with special tokens as texts."""
        tokenizer = service.model.text.tokenizer
        special = {name: tokenizer.name_of(name) for name in SPECIAL}
        return {**tokenizer.config, **{name: text for name, text in special.items() if text is not None}}

    return router
