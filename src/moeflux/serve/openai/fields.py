"""Fields that chat completions and completions share, and what they mean for the worker."""

from __future__ import annotations

import json
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field

from moeflux.sampling.constraint import Grammar
from moeflux.serve.errors import refuse
from moeflux.serve.sampling import Sampling

MOST_CHOICES = 64

Whole = Annotated[int, Field(ge=0, le=2**31 - 1)]


class StreamOptions(BaseModel):
    model_config = ConfigDict(extra="ignore")

    include_usage: bool | None = None


class StructuredOutputs(BaseModel):
    """One of them."""

    model_config = ConfigDict(extra="ignore", populate_by_name=True)

    schema_: dict[str, Any] | str | None = Field(default=None, alias="json")
    regex: str | None = None
    choice: list[str] | None = None
    grammar: str | None = Field(default=None, description="In Lark's notation.")


class SamplingFields(BaseModel):
    """How tokens are chosen. What is left out is as the model itself wants it."""

    model_config = ConfigDict(extra="ignore")

    model: Annotated[str, Field(max_length=256, description="Any name is taken, unless the server is strict about it.")]
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    temperature: Annotated[float | None, Field(ge=0, le=100)] = None
    top_p: Annotated[float | None, Field(ge=0, le=1)] = None
    top_k: Annotated[int | None, Field(ge=-1, le=2**31 - 1)] = None
    min_p: Annotated[float | None, Field(ge=0, le=1)] = None
    repetition_penalty: Annotated[float | None, Field(gt=0, le=100)] = None
    presence_penalty: Annotated[float | None, Field(ge=-100, le=100)] = None
    frequency_penalty: Annotated[float | None, Field(ge=-100, le=100)] = None
    logit_bias: dict[Whole, Annotated[float, Field(ge=-1000, le=1000)]] | None = None
    seed: Annotated[int | None, Field(ge=-(2**63), le=2**64 - 1)] = None
    n: Annotated[int | None, Field(ge=1, le=MOST_CHOICES)] = None
    stop: str | list[str] | None = None
    structured_outputs: StructuredOutputs | None = None
    return_progress: bool | None = Field(default=None, description="Streamed: say how far the prompt is.")
    ignore_eos: bool | None = Field(default=None, description="Refused where true.")
    min_tokens: Whole | None = Field(default=None, description="Refused where above 0.")
    stop_token_ids: list[int] | None = Field(default=None, description="Refused where there are any.")

    def sampling(self, logprobs: int | None) -> Sampling:
        names = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty", "presence_penalty", "frequency_penalty",
                 "seed", "logit_bias")  # fmt: skip
        return Sampling(**{name: getattr(self, name) for name in names}, logprobs=logprobs)

    def check_known(self) -> None:
        """What would change the answer and is not done is refused, never left out."""
        for name in ("ignore_eos", "min_tokens", "stop_token_ids"):
            if getattr(self, name):
                raise refuse(f"{name} is not supported", name)

    @property
    def stops(self) -> tuple[str, ...]:
        stop = self.stop
        return (stop,) if isinstance(stop, str) else tuple(stop or ())


def grammar_of(wanted: StructuredOutputs | None) -> Grammar | None:
    if wanted is None:
        return None
    found = [name for name in ("schema_", "regex", "choice", "grammar") if getattr(wanted, name) is not None]
    if len(found) != 1:
        raise refuse("exactly one of json, regex, choice and grammar is needed", "structured_outputs")
    if wanted.schema_ is not None:
        return Grammar.schema(wanted.schema_)
    if wanted.regex is not None:
        return Grammar.regex(wanted.regex)
    if wanted.choice is not None:
        return _one_of(wanted.choice)
    return Grammar.lark(wanted.grammar or "")


def _one_of(words: list[str]) -> Grammar:
    """Exactly one of these texts."""
    if not words or not all(words):
        raise refuse("choice needs texts that are not empty", "structured_outputs")
    return Grammar.lark("start: " + " | ".join(_quoted(word) for word in words))


def _quoted(word: str) -> str:
    """As a string of Lark."""
    return json.dumps(word, ensure_ascii=False)


Finish = Literal["stop", "length", "tool_calls", "content_filter", "function_call"]


class CachedTokens(BaseModel):
    cached_tokens: int
    cache_write_tokens: int
    audio_tokens: int = 0


class CompletionTokens(BaseModel):
    reasoning_tokens: int
    audio_tokens: int = 0
    accepted_prediction_tokens: int = 0
    rejected_prediction_tokens: int = 0


class Usage(BaseModel):
    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: CachedTokens
    completion_tokens_details: CompletionTokens
