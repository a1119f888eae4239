"""What a request for a message means for the worker."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from moeflux.sampling.constraint import Grammar
from moeflux.serve.anthropic.types import CountRequest, MessagesRequest, Tool
from moeflux.serve.asks import Ask
from moeflux.serve.errors import refuse
from moeflux.serve.sampling import Sampling
from moeflux.session.handle import RequestOptions
from moeflux.session.model_text import ModelText
from moeflux.session.prompt import Conversation
from moeflux.text.blocks import read_blocks
from moeflux.text.calls import AUTO, ToolChoice

SECONDS = {"5m": 300.0, "1h": 3600.0}
MOST_MARKS = 4
HOSTED = ("web_search", "web_fetch", "code_execution", "tool_search_tool", "mcp_toolset")  # that a provider runs itself

Marked = tuple[str, dict[str, Any]]  # where, and what has a cache_control


def ask_of(request: MessagesRequest, text: ModelText) -> Ask:
    for i, stop in enumerate(request.stop_sequences or ()):
        if not stop.strip():
            raise refuse("each stop sequence must contain non-whitespace", f"stop_sequences.{i}")
    conversation = conversation_of(request)
    thinking, config = request.thinking, request.output_config
    budget = thinking.budget_tokens if thinking and thinking.type == "enabled" else None
    grammar = Grammar.schema(config.format.schema_) if config and config.format else None
    sampling = Sampling(request.temperature, request.top_p, request.top_k).for_model(text)
    options = RequestOptions(
        request.max_tokens, tuple(request.stop_sequences or ()), grammar, sampling, reasoning_budget=budget
    )
    return Ask(conversation, options)


def conversation_of(request: CountRequest) -> Conversation:
    tools = [tool.model_dump(exclude_unset=True) for tool in request.tools or () if not _is_hosted(tool)]
    messages = [message.model_dump() for message in request.messages]
    system = [dict(block) for block in request.system] if isinstance(request.system, list) else request.system
    check_marks(request, tools, messages)
    for _, item in _marked(tools, system, messages):
        item["keep_s"] = SECONDS[(item["cache_control"] or {}).get("ttl") or "5m"]
    read = read_blocks(system, messages, tools)
    if request.cache_control is not None:
        read.messages[-1]["keep_s"] = SECONDS[request.cache_control.ttl or "5m"]
    last = read.messages[-1]
    if last["role"] == "assistant" and any(part["text"] != part["text"].rstrip() for part in last["content"][-1:]):
        raise refuse("final assistant content cannot end with trailing whitespace", "messages")
    return Conversation(read.messages, read.tools or None, _variables(request), _choice(request), tuple(read.loaded))


def check_marks(request: CountRequest, tools: list[dict[str, Any]], messages: list[dict[str, Any]]) -> None:
    """At most four, and no longer time behind a shorter one."""
    marked = list(_marked(tools, request.system, messages))
    n = len(marked) + (request.cache_control is not None)
    if n > MOST_MARKS:
        raise refuse(f"A maximum of {MOST_MARKS} blocks with cache_control may be provided. Found {n}.", "cache_control")
    for i, tool in enumerate(tools):
        if tool.get("defer_loading") and tool.get("cache_control"):
            raise refuse("a deferred tool cannot have cache_control", f"tools.{i}.cache_control")
    short = False
    own = [("", {"cache_control": request.cache_control.model_dump()})] if request.cache_control else []
    for where, item in (*marked, *own):
        ttl = (item["cache_control"] or {}).get("ttl") or "5m"
        if ttl not in SECONDS:
            raise refuse("it is 5m or 1h", f"{where}.cache_control.ttl")
        if ttl == "1h" and short:
            raise refuse(
                "a ttl='1h' cache_control block must not come after a ttl='5m' cache_control block. Note that blocks are "
                "processed in the following order: `tools`, `system`, `messages`.",
                f"{where}.cache_control.ttl".lstrip("."),
            )
        short = short or ttl == "5m"


def asks_an_hour(request: CountRequest) -> bool:
    """Whether some mark is for an hour, so that what is kept counts as that."""
    tools = [tool.model_dump(exclude_unset=True) for tool in request.tools or ()]
    marked = _marked(tools, request.system, [message.model_dump() for message in request.messages])
    own = request.cache_control is not None and request.cache_control.ttl == "1h"
    return own or any(item["cache_control"].get("ttl") == "1h" for _, item in marked)


def _marked(tools: list[dict[str, Any]], system: Any, messages: list[dict[str, Any]]) -> Iterator[Marked]:
    """In the order in which a prompt has them."""
    lists = [("tools", tools), ("system", system if isinstance(system, list) else [])]
    for i, message in enumerate(messages):
        content = message["content"] if isinstance(message["content"], list) else []
        lists.append((f"messages.{i}.content", content))
        for j, block in enumerate(content):
            inner = block.get("content")
            if block.get("type") == "tool_result" and isinstance(inner, list):
                lists.append((f"messages.{i}.content.{j}.content", [part for part in inner if isinstance(part, dict)]))
    for where, items in lists:
        for i, item in enumerate(items):
            if item.get("cache_control") is not None:
                if not isinstance(item["cache_control"], dict):
                    raise refuse("this is no cache_control", f"{where}.{i}.cache_control")
                yield f"{where}.{i}", item


def _is_hosted(tool: Tool) -> bool:
    """A tool that somebody else would run for the model: there is nobody here."""
    return bool(tool.type) and str(tool.type).startswith(HOSTED)


def _variables(request: CountRequest) -> dict[str, Any]:
    """For the template: thoughts come where they are asked for."""
    thinking = request.thinking is not None and request.thinking.type != "disabled"
    effort = request.output_config.effort if request.output_config else None
    return {"enable_thinking": thinking, **({"reasoning_effort": effort} if effort else {})}


def _choice(request: CountRequest) -> ToolChoice:
    choice = request.tool_choice
    if choice is None:
        return AUTO
    parallel = not choice.disable_parallel_tool_use
    match choice.type:
        case "auto" | "none":
            return ToolChoice(choice.type, (), parallel)
        case "any":
            return ToolChoice("required", (), parallel)
        case "tool":
            if not choice.name:
                raise refuse("a name is needed", "tool_choice.name")
            return ToolChoice("required", (choice.name,), parallel)
