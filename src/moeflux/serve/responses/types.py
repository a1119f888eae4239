"""Responses as they go over the wire. Fields that are not here are left out: clients send many that change nothing."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field

Whole = Annotated[int, Field(ge=0, le=2**31 - 1)]


class Lenient(BaseModel):
    model_config = ConfigDict(extra="ignore")


class Reasoning(Lenient):
    effort: Literal["none", "minimal", "low", "medium", "high", "xhigh", "max"] | None = None
    summary: str | None = None


class TextConfig(Lenient):
    format: dict[str, Any] | None = None
    verbosity: str | None = None


class CacheOptions(Lenient):
    mode: str | None = None
    ttl: str | None = None
    prewarm: bool | None = Field(default=None, description="Run and keep the prompt, say nothing.")
    comparison_response_id: str | None = None


class ResponsesRequest(Lenient):
    model: Annotated[str, Field(max_length=256)]
    input: str | list[dict[str, Any]]
    instructions: str | None = None
    max_output_tokens: Whole | None = None
    max_tool_calls: int | None = None
    tools: list[dict[str, Any]] | None = None
    tool_choice: Literal["none", "auto", "required"] | dict[str, Any] | None = None
    parallel_tool_calls: bool | None = None
    reasoning: Reasoning | None = None
    text: TextConfig | None = None
    temperature: Annotated[float | None, Field(ge=0, le=100)] = None
    top_p: Annotated[float | None, Field(ge=0, le=1)] = None
    top_logprobs: Annotated[int | None, Field(ge=0, le=20)] = None
    presence_penalty: Annotated[float | None, Field(ge=-100, le=100)] = None
    frequency_penalty: Annotated[float | None, Field(ge=-100, le=100)] = None
    stream: bool | None = None
    background: bool | None = None
    store: bool | None = None
    include: list[str] | None = None
    metadata: dict[str, Any] | None = None
    previous_response_id: str | None = None
    prompt_cache_key: str | None = None
    prompt_cache_options: CacheOptions | None = None
    safety_identifier: str | None = None
    truncation: str | None = None
    user: str | None = None


class InputDetails(BaseModel):
    cached_tokens: int
    cache_write_tokens: int


class OutputDetails(BaseModel):
    reasoning_tokens: int


class ResponseUsage(BaseModel):
    input_tokens: int
    input_tokens_details: InputDetails
    output_tokens: int
    output_tokens_details: OutputDetails
    total_tokens: int


Status = Literal["queued", "in_progress", "completed", "incomplete", "failed", "cancelled"]


class ResponseObject(BaseModel):
    id: str
    object: Literal["response"]
    created_at: int
    completed_at: int | None
    status: Status
    background: bool
    error: dict[str, Any] | None
    incomplete_details: dict[str, Any] | None
    instructions: str | None
    max_output_tokens: int | None
    max_tool_calls: int | None
    model: str
    output: list[dict[str, Any]]
    parallel_tool_calls: bool
    previous_response_id: str | None
    prompt_cache_key: str | None
    prompt_cache_diagnostics: dict[str, Any] | None = None
    reasoning: dict[str, Any]
    safety_identifier: str | None
    service_tier: str | None
    store: bool
    temperature: float | None
    top_p: float | None
    top_logprobs: int
    presence_penalty: float
    frequency_penalty: float
    text: dict[str, Any]
    tool_choice: Any
    tools: list[dict[str, Any]]
    truncation: str
    usage: ResponseUsage | None
    user: str | None
    metadata: dict[str, Any]


class ResponseEvent(BaseModel):
    """response.created, response.in_progress, response.output_item.added, … with their numbers."""

    type: str
    sequence_number: int


class Deleted(BaseModel):
    id: str
    object: Literal["response"]
    deleted: bool
