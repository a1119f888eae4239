"""What a request for a response means for the worker."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from moeflux.sampling.constraint import Grammar
from moeflux.serve.asks import Ask
from moeflux.serve.errors import refuse
from moeflux.serve.lifetimes import seconds_of, with_lifetimes
from moeflux.serve.responses.types import ResponsesRequest
from moeflux.serve.sampling import Sampling
from moeflux.session.handle import RequestOptions
from moeflux.session.model_text import ModelText
from moeflux.session.prompt import Conversation
from moeflux.text.calls import ToolChoice
from moeflux.text.items import full_name, read_items

LOGPROBS = "message.output_text.logprobs"
SEALED = "reasoning.encrypted_content"
ANY_TEXT = {"type": "object", "properties": {"input": {"type": "string"}}, "required": ["input"]}

Items = Sequence[Mapping[str, Any]]


def ask_of(request: ResponsesRequest, text: ModelText, before: Items = ()) -> Ask:
    """`before`: items of the response that this one follows."""
    conversation = conversation_of(request, before)
    options = request.prompt_cache_options
    most = 0 if options and options.prewarm else request.max_output_tokens
    logprobs = (request.top_logprobs or 0) if request.top_logprobs or LOGPROBS in (request.include or ()) else None
    sampling = Sampling(
        request.temperature,
        request.top_p,
        presence_penalty=request.presence_penalty,
        frequency_penalty=request.frequency_penalty,
        logprobs=logprobs,
    )
    keep = seconds_of(options.ttl, "prompt_cache_options.ttl") if options and options.ttl else 0.0
    return Ask(conversation, RequestOptions(most, (), grammar_of(request), sampling.for_model(text), keep_s=keep))


def conversation_of(request: ResponsesRequest, before: Items = ()) -> Conversation:
    items = [*before, *input_items(request)]
    messages = read_items([with_lifetimes(item, f"input.{i}") for i, item in enumerate(items)])
    if request.instructions:
        messages.insert(0, {"role": "system", "content": request.instructions})
    return Conversation(messages, functions_of(request.tools) or None, _variables(request), _choice(request))


def input_items(request: ResponsesRequest) -> list[dict[str, Any]]:
    if isinstance(request.input, str):
        return [{"type": "message", "role": "user", "content": request.input}]
    return request.input


def functions_of(tools: Items | None) -> list[dict[str, Any]]:
    """Tools that the client runs, under their full names. Those that a provider would run are not offered."""
    functions: list[dict[str, Any]] = []
    for i, tool in enumerate(tools or ()):
        match tool.get("type"):
            case "function" | "custom":
                functions.append(_function(tool))
            case "namespace":
                inner = tool.get("tools")
                if not isinstance(inner, list) or not all(isinstance(one, dict) for one in inner):
                    raise refuse("a namespace needs tools", f"tools.{i}.tools")
                kinds = ("function", "custom")
                functions += [_function({**one, "namespace": tool.get("name")}) for one in inner if one.get("type") in kinds]
    return functions


def _function(tool: Mapping[str, Any]) -> dict[str, Any]:
    parameters = ANY_TEXT if tool.get("type") == "custom" else tool.get("parameters") or {"type": "object"}
    function = {"name": full_name(tool), "parameters": parameters}
    if tool.get("description") is not None:
        function["description"] = tool["description"]
    return {"type": "function", "function": function}


def names_of(tools: Items | None) -> dict[str, dict[str, Any]]:
    """By its full name: the tool as the client gave it, with the name of its namespace."""
    found: dict[str, dict[str, Any]] = {}
    for tool in tools or ():
        inner = tool.get("tools") if tool.get("type") == "namespace" else None
        for one in [{**t, "namespace": tool.get("name")} for t in inner] if isinstance(inner, list) else [tool]:
            found[full_name(one)] = dict(one)
    return found


def grammar_of(request: ResponsesRequest) -> Grammar | None:
    match request.text.format if request.text else None:
        case None | {"type": "text"}:
            return None
        case {"type": "json_object"}:
            return Grammar.schema({"type": "object"})
        case {"type": "json_schema", "schema": dict(schema)}:
            return Grammar.schema(schema)
    raise refuse("it is one of text, json_object and json_schema with a schema", "text.format")


def _variables(request: ResponsesRequest) -> dict[str, Any]:
    effort = request.reasoning.effort if request.reasoning else None
    if effort == "none":
        return {"enable_thinking": False}
    return {"reasoning_effort": effort} if effort else {}


def _choice(request: ResponsesRequest) -> ToolChoice:
    parallel = request.parallel_tool_calls is not False
    match request.tool_choice:
        case None:
            return ToolChoice(parallel=parallel)
        case ("none" | "auto" | "required") as mode:
            return ToolChoice(mode, (), parallel)
        case {"type": "function" | "custom", "name": str()} as named:
            return ToolChoice("required", (full_name(named),), False)
        case {"type": "allowed_tools", "mode": ("auto" | "required") as mode, "tools": list(tools)}:
            return ToolChoice(mode, tuple(full_name(tool) for tool in tools if isinstance(tool, dict)), parallel)
    raise refuse("this is no choice of tools", "tool_choice")
