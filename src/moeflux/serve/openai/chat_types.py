"""Chat completions as they go over the wire."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field

from moeflux.serve.openai.fields import Finish, SamplingFields, Usage, Whole

Effort = Literal["none", "minimal", "low", "medium", "high", "xhigh", "max"]


class ChatMessage(BaseModel):
    """`content`: a text, or parts of a text. An assistant's thoughts and calls may come back with it."""

    model_config = ConfigDict(extra="allow")

    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: str | list[dict[str, Any]] | None = None
    name: str | None = None
    tool_calls: list[dict[str, Any]] | None = None
    tool_call_id: str | None = None
    reasoning_content: str | None = None


class CacheOptions(BaseModel):
    model_config = ConfigDict(extra="ignore")

    ttl: str | None = Field(default=None, description="How long the state of the prompt is kept at least, like 30m.")


class ChatRequest(SamplingFields):
    messages: Annotated[list[ChatMessage], Field(min_length=1)]
    max_tokens: Whole | None = Field(default=None, description="0: run and keep the prompt, say nothing.")
    max_completion_tokens: Whole | None = None
    tools: list[dict[str, Any]] | None = None
    tool_choice: Literal["none", "auto", "required"] | dict[str, Any] | None = None
    parallel_tool_calls: bool | None = None
    response_format: dict[str, Any] | None = None
    logprobs: bool | None = None
    top_logprobs: Annotated[int | None, Field(ge=0, le=20)] = None
    reasoning_effort: Effort | None = None
    reasoning_budget: Whole | None = Field(default=None, description="Tokens; a thought that is longer is ended.")
    chat_template_kwargs: dict[str, Any] | None = None
    prompt_cache_options: CacheOptions | None = None
    continue_final_message: bool | None = Field(
        default=None, description="An assistant's message at the end always goes on; false is refused there."
    )
    modalities: list[str] | None = None
    functions: list[dict[str, Any]] | None = Field(default=None, description="Refused: use tools.")


class FunctionCall(BaseModel):
    name: str
    arguments: str


class ToolCall(BaseModel):
    id: str
    type: Literal["function"]
    function: FunctionCall


class Likely(BaseModel):
    token: str
    logprob: float
    bytes: list[int] | None


class TokenLogprob(Likely):
    top_logprobs: list[Likely]


class ChatLogprobs(BaseModel):
    content: list[TokenLogprob] | None
    refusal: list[TokenLogprob] | None


class AnswerMessage(BaseModel):
    role: Literal["assistant"]
    content: str | None
    refusal: str | None
    annotations: list[dict[str, Any]]
    reasoning_content: str | None = None
    tool_calls: list[ToolCall] | None = None


class ChatChoice(BaseModel):
    index: int
    message: AnswerMessage
    logprobs: ChatLogprobs | None
    finish_reason: Finish


class ChatCompletion(BaseModel):
    id: str
    object: Literal["chat.completion"]
    created: int
    model: str
    system_fingerprint: str
    service_tier: str | None
    choices: list[ChatChoice]
    usage: Usage


class Delta(BaseModel):
    role: Literal["assistant"] | None = None
    content: str | None = None
    reasoning_content: str | None = None
    tool_calls: list[dict[str, Any]] | None = None


class ChunkChoice(BaseModel):
    index: int
    delta: Delta
    logprobs: ChatLogprobs | None
    finish_reason: Finish | None


class PromptProgress(BaseModel):
    total: int
    cache: int
    processed: int
    time_ms: int


class ChatChunk(BaseModel):
    id: str
    object: Literal["chat.completion.chunk"]
    created: int
    model: str
    system_fingerprint: str
    choices: list[ChunkChoice]
    usage: Usage | None = None
    prompt_progress: PromptProgress | None = None
