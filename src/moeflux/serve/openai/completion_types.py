"""Completions as they go over the wire."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BaseModel, Field

from moeflux.serve.openai.fields import SamplingFields, Usage, Whole

MOST_PROMPTS = 1024

Prompt = str | Annotated[list[Whole], Field(min_length=1)] | list[str] | list[Annotated[list[Whole], Field(min_length=1)]]


class CompletionRequest(SamplingFields):
    prompt: Prompt = Field(description="A text, token ids, or several of either.")
    max_tokens: Whole | None = Field(default=16, description="0: with echo, only the prompt.")
    echo: bool | None = None
    logprobs: Annotated[int | None, Field(ge=0, le=20)] = None
    suffix: str | None = Field(default=None, description="Refused: the families here do not fill in.")
    best_of: Annotated[int | None, Field(ge=1)] = Field(default=None, description="Refused where it is more than n.")
    return_token_ids: bool | None = None


class CompletionLogprobs(BaseModel):
    tokens: list[str]
    token_logprobs: list[float | None]
    top_logprobs: list[dict[str, float] | None] | None
    text_offset: list[int]


class CompletionChoice(BaseModel):
    index: int
    text: str
    logprobs: CompletionLogprobs | None
    finish_reason: Literal["stop", "length"] | None
    token_ids: list[int] | None = None
    prompt_token_ids: list[int] | None = None


class Completion(BaseModel):
    """A whole answer, or one piece of a stream."""

    id: str
    object: Literal["text_completion"]
    created: int
    model: str
    system_fingerprint: str
    choices: list[CompletionChoice]
    usage: Usage | None = None
    prompt_progress: dict[str, Any] | None = None
