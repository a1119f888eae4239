"""Messages as they go over the wire. Fields that are not here are left out: clients send many that change nothing."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field

Whole = Annotated[int, Field(ge=0, le=2**31 - 1)]


class Lenient(BaseModel):
    model_config = ConfigDict(extra="ignore")


class CacheControl(Lenient):
    type: Literal["ephemeral"] = "ephemeral"
    ttl: Literal["5m", "1h"] | None = None


class InputMessage(Lenient):
    """`content`: a text, or a list of blocks."""

    role: Literal["user", "assistant", "system"]
    content: str | list[dict[str, Any]]


class Tool(BaseModel):
    """One of the client's, with a schema of what it takes. Tools that a provider would run are not offered to the model."""

    model_config = ConfigDict(extra="allow")

    name: Annotated[str, Field(min_length=1, max_length=256)]
    type: str | None = None
    description: str | None = None
    input_schema: dict[str, Any] | None = None
    cache_control: CacheControl | None = None
    defer_loading: bool | None = None


class Choice(Lenient):
    type: Literal["auto", "any", "tool", "none"]
    name: str | None = None
    disable_parallel_tool_use: bool | None = None


class Thinking(Lenient):
    type: Literal["enabled", "disabled", "adaptive", "between_tools"]
    budget_tokens: Whole | None = None
    display: str | None = None


class OutputFormat(Lenient):
    type: Literal["json_schema"]
    schema_: Annotated[dict[str, Any], Field(alias="schema")]


class OutputConfig(Lenient):
    effort: str | None = None
    format: OutputFormat | None = None


class Diagnostics(Lenient):
    previous_message_id: str | None = None


class CountRequest(Lenient):
    model: Annotated[str, Field(max_length=256)]
    messages: Annotated[list[InputMessage], Field(min_length=1)]
    system: str | list[dict[str, Any]] | None = None
    tools: list[Tool] | None = None
    tool_choice: Choice | None = None
    thinking: Thinking | None = None
    output_config: OutputConfig | None = None
    cache_control: CacheControl | None = None


class MessagesRequest(CountRequest):
    max_tokens: Whole = Field(description="0: run and keep the prompt, say nothing.")
    stream: bool | None = None
    stop_sequences: list[str] | None = None
    temperature: Annotated[float | None, Field(ge=0, le=100)] = None
    top_p: Annotated[float | None, Field(ge=0, le=1)] = None
    top_k: Annotated[int | None, Field(ge=-1, le=2**31 - 1)] = None
    diagnostics: Diagnostics | None = None


class CacheCreation(BaseModel):
    ephemeral_5m_input_tokens: int
    ephemeral_1h_input_tokens: int


class OutputDetails(BaseModel):
    thinking_tokens: int


class MessageUsage(BaseModel):
    input_tokens: int
    output_tokens: int
    cache_creation_input_tokens: int
    cache_read_input_tokens: int
    cache_creation: CacheCreation
    output_tokens_details: OutputDetails
    server_tool_use: None = None
    service_tier: str | None = None
    inference_geo: str | None = None
    speed: str | None = None


StopReason = Literal["end_turn", "max_tokens", "stop_sequence", "tool_use", "model_context_window_exceeded"]


class Message(BaseModel):
    id: str
    type: Literal["message"]
    role: Literal["assistant"]
    model: str
    content: list[dict[str, Any]]
    stop_reason: StopReason | None
    stop_sequence: str | None
    stop_details: None = None
    container: None = None
    usage: MessageUsage
    diagnostics: dict[str, Any] | None = None


class MessageEvent(BaseModel):
    """message_start, content_block_start, …_delta, …_stop, message_delta, message_stop, ping, error."""

    type: str


class TokenCount(BaseModel):
    input_tokens: int


class AnthropicErrorDetail(BaseModel):
    type: str
    message: str


class AnthropicError(BaseModel):
    type: Literal["error"]
    error: AnthropicErrorDetail
    request_id: str
