"""`/v1/chat/completions`: what a request means for the worker, and its answers, streamed or whole."""

from __future__ import annotations

import json
import secrets
import time
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from pydantic import BaseModel

from moeflux.runtime.prefill import PrefillProgress
from moeflux.sampling.constraint import Grammar
from moeflux.serve.answering import Told
from moeflux.serve.asks import Ask
from moeflux.serve.errors import Problem, openai_body, refuse
from moeflux.serve.lifetimes import seconds_of, with_lifetimes
from moeflux.serve.openai.chat_types import ChatCompletion, ChatRequest
from moeflux.serve.openai.fields import grammar_of
from moeflux.serve.openai.usage import logprob_of, usage_of
from moeflux.serve.sse import COMMENT, Sse
from moeflux.session.events import Finish, Started, Token
from moeflux.session.handle import RequestOptions
from moeflux.session.model_text import ModelText
from moeflux.session.prompt import Conversation
from moeflux.text.calls import AUTO, ToolChoice
from moeflux.text.regions import Part, Text
from moeflux.text.tokenizer import Tokenizer
from moeflux.text.tools import CallDelta, CallEnd, CallStart

RESERVED = ("messages", "tools", "add_generation_prompt", "tokenize")  # what a template is given anyway


def asks_of(request: ChatRequest, text: ModelText) -> list[Ask]:
    request.check_known()
    if request.functions:
        raise refuse("functions are not supported: use tools", "functions")
    if set(request.modalities or ()) - {"text"}:
        raise refuse("only text can be answered", "modalities")
    if request.continue_final_message is False and request.messages[-1].role == "assistant":
        raise refuse("a message of the assistant at the end goes on", "continue_final_message")
    if request.top_logprobs and not request.logprobs:
        raise refuse("top_logprobs needs logprobs", "top_logprobs")
    dumped = [message.model_dump(exclude_unset=True) for message in request.messages]
    messages = [with_lifetimes(message, f"messages.{i}") for i, message in enumerate(dumped)]
    conversation = Conversation(messages, request.tools, variables_of(request), choice_of(request))
    sampling = request.sampling((request.top_logprobs or 0) if request.logprobs else None)
    most = request.max_tokens if request.max_completion_tokens is None else request.max_completion_tokens
    grammar = format_of(request.response_format) or grammar_of(request.structured_outputs)
    wanted = RequestOptions(most, request.stops, grammar, keep_s=keep_of(request), reasoning_budget=request.reasoning_budget)
    return [
        Ask(conversation, replace(wanted, sampling=sampling.for_answer(text, i)), beside=0 if i else None)
        for i in range(request.n or 1)
    ]


def keep_of(request: ChatRequest) -> float:
    """Seconds that the state of the prompt is kept at least."""
    options = request.prompt_cache_options
    return seconds_of(options.ttl, "prompt_cache_options.ttl") if options and options.ttl else 0.0


def variables_of(request: ChatRequest) -> dict[str, Any]:
    """For the template."""
    variables = dict(request.chat_template_kwargs or {})
    for name in RESERVED:
        if name in variables:
            raise refuse(f"{name!r} cannot be set for a template", "chat_template_kwargs")
    if request.reasoning_effort == "none":
        return {"enable_thinking": False, **variables}
    return {"reasoning_effort": request.reasoning_effort, **variables} if request.reasoning_effort else variables


def choice_of(request: ChatRequest) -> ToolChoice:
    known = {tool.get("function", tool).get("name") for tool in request.tools or () if isinstance(tool, dict)}
    parallel = request.parallel_tool_calls is not False
    match request.tool_choice:
        case None:
            return AUTO if parallel else ToolChoice(parallel=False)
        case ("none" | "auto" | "required") as mode:
            choice = ToolChoice(mode, (), parallel)
        case {"type": "function", "function": {"name": str(name)}}:
            choice = ToolChoice("required", (name,), False)
        case {"type": "allowed_tools", "allowed_tools": {"mode": ("auto" | "required") as mode, "tools": list(tools)}}:
            names = [tool.get("function", tool).get("name") for tool in tools if isinstance(tool, dict)]
            choice = ToolChoice(mode, tuple(str(name) for name in names), parallel)
        case _:
            raise refuse("this is no choice of tools", "tool_choice")
    if choice.mode == "required" and not known:
        raise refuse("there are no tools to choose from", "tool_choice")
    if unknown := [name for name in choice.names if name not in known]:
        raise refuse(f"there is no tool {unknown[0]!r}", "tool_choice")
    return choice


def format_of(wanted: dict[str, Any] | None) -> Grammar | None:
    match wanted:
        case None | {"type": "text"}:
            return None
        case {"type": "json_object"}:
            return Grammar.schema({"type": "object"})
        case {"type": "json_schema", "json_schema": {"schema": dict(schema)}}:
            return Grammar.schema(schema)
    raise refuse("it is one of text, json_object and json_schema with a schema", "response_format")


class ChatAnswer:
    """Every change is a delta of a choice: it is sent, and added to what the whole answer will be."""

    def __init__(self, request: ChatRequest, tokenizer: Tokenizer, model: str, fingerprint: str) -> None:
        self._tokenizer = tokenizer
        options = request.stream_options
        self._usage_wanted = bool(options and options.include_usage)
        self._progress_wanted, self._logprobs_wanted = bool(request.return_progress), bool(request.logprobs)
        self._head = {"id": f"chatcmpl-{secrets.token_hex(12)}", "created": int(time.time()), "model": model,
                      "system_fingerprint": fingerprint}  # fmt: skip
        self._choices = [_Choice(i) for i in range(request.n or 1)]
        self._progress: dict[str, int] | None = None
        self._cached = 0

    def begin(self) -> list[Sse]:
        return [self._chunk(choice, {"role": "assistant", "content": ""}) for choice in self._choices]

    def take(self, told: Told) -> list[Sse]:
        choice = self._choices[told.index]
        match told.event:
            case Started(cached):
                self._cached = cached
            case PrefillProgress() as progress:
                return self._told_progress(progress) if told.index == 0 else []
            case Token() as token:
                if self._logprobs_wanted and not token.reasoning:
                    choice.waiting.append(logprob_of(self._tokenizer, token))
                return self._deltas(choice, token.parts)
            case Finish() as finish:
                pieces = self._deltas(choice, finish.parts)
                choice.finish(finish)
                return [*pieces, self._chunk(choice, {})]
        return []

    def end(self) -> list[Sse]:
        done = [Sse("[DONE]")]
        return [self._sse([], usage=self._usage()), *done] if self._usage_wanted else done

    def fail(self, problem: Problem) -> list[Sse]:
        return [Sse(json.dumps(openai_body(problem)))]

    def beat(self) -> bytes:
        """A chunk that adds nothing, because clients that count the time between events do not see comments."""
        if self._progress:
            return self._sse([], prompt_progress=self._progress).encode()
        choice = next((choice for choice in self._choices if choice.end is None), None)
        return COMMENT if choice is None else self._chunk(choice, {}).encode()

    def whole(self) -> BaseModel:
        choices = [choice.whole(self._logprobs_wanted) for choice in self._choices]
        head = {**self._head, "object": "chat.completion", "service_tier": "default"}
        return ChatCompletion.model_validate({**head, "choices": choices, "usage": self._usage()})

    def _usage(self) -> dict[str, Any]:
        return usage_of([(0, choice.end.usage) for choice in self._choices if choice.end is not None])

    def _told_progress(self, now: PrefillProgress) -> list[Sse]:
        cached = self._cached
        if not self._progress_wanted:
            return []
        self._progress = {"total": cached + now.total, "cache": cached, "processed": cached + now.done,
                          "time_ms": int(1000 * now.seconds)}  # fmt: skip
        return [self._sse([], prompt_progress=self._progress)]

    def _deltas(self, choice: _Choice, parts: Sequence[Part]) -> list[Sse]:
        self._progress = None
        return [self._chunk(choice, delta) for part in parts if (delta := choice.delta_of(part))]

    def _chunk(self, choice: _Choice, delta: dict[str, Any]) -> Sse:
        choice.add(delta)
        logprobs = {"content": choice.take_logprobs(), "refusal": None} if choice.waiting else None
        reason = choice.reason if choice.end is not None else None
        return self._sse([{"index": choice.index, "delta": delta, "logprobs": logprobs, "finish_reason": reason}])

    def _sse(self, choices: list[dict[str, Any]], **more: Any) -> Sse:
        if self._usage_wanted:
            more = {"usage": None, **more}
        chunk = {**self._head, "object": "chat.completion.chunk", "choices": choices, **more}
        return Sse(json.dumps(chunk, ensure_ascii=False))


class _Choice:
    """What the deltas of one answer add up to."""

    def __init__(self, index: int) -> None:
        self.index = index
        self.waiting: list[dict[str, Any]] = []  # log-probabilities of tokens that are not shown yet
        self.end: Finish | None = None
        self.reason: str | None = None
        self._texts: dict[str, list[str]] = {"content": [], "reasoning_content": []}
        self._calls: list[dict[str, Any]] = []
        self._called = False
        self._logprobs: list[dict[str, Any]] = []

    def delta_of(self, part: Part) -> dict[str, Any] | None:
        match part:
            case Text(text, region):
                return {"content" if region == "text" else "reasoning_content": text}
            case CallStart(index=index, name=name):
                id = getattr(part, "id", None) or f"call_{secrets.token_hex(12)}"
                call = {"id": id, "type": "function", "function": {"name": name, "arguments": ""}}
                return {"tool_calls": [{"index": index, **call}]}
            case CallDelta(index, text):
                return {"tool_calls": [{"index": index, "function": {"arguments": text}}]}
            case CallEnd(_, call):
                self._called = self._called or call.complete
        return None

    def add(self, delta: dict[str, Any]) -> None:
        for name, texts in self._texts.items():
            if delta.get(name):
                texts.append(delta[name])
        for call in delta.get("tool_calls", ()):
            if "id" in call:
                self._calls.append({"id": call["id"], "type": "function", "function": dict(call["function"])})
            else:
                self._calls[call["index"]]["function"]["arguments"] += call["function"]["arguments"]

    def take_logprobs(self) -> list[dict[str, Any]]:
        now, self.waiting = self.waiting, []
        self._logprobs += now
        return now

    def finish(self, finish: Finish) -> None:
        self.end = finish
        cut = finish.reason in ("length", "context")
        self.reason = "length" if cut else "tool_calls" if self._called else "stop"

    def whole(self, logprobs: bool) -> dict[str, Any]:
        content, thoughts = ("".join(texts) for texts in self._texts.values())
        message: dict[str, Any] = {"role": "assistant", "content": content or (None if self._calls else ""),
                                   "refusal": None, "annotations": []}  # fmt: skip
        if thoughts:
            message["reasoning_content"] = thoughts
        if self._calls:
            message["tool_calls"] = self._calls
        listed = {"content": self._logprobs, "refusal": None} if logprobs else None
        return {"index": self.index, "message": message, "logprobs": listed, "finish_reason": self.reason or "stop"}
