"""Conversations in content blocks, brought to the one form of `text/messages`.

What changes between two requests of one conversation and says nothing is left out here, so that prompts begin alike: the
header that a client counts its bills with, whether a text comes as a list of one, where in the list a tool stands that was
loaded on the way.
"""

from __future__ import annotations

from base64 import urlsafe_b64decode, urlsafe_b64encode
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from reprlib import repr as shown
from typing import Any

from moeflux.core.errors import InputError
from moeflux.text.json_value import write_value

BILLING = "x-anthropic-billing-header:"  # of a block that changes with every request
BETWEEN = "\n\n"  # blocks of one text
_SEAL = "mf1."
_ROLES = ("user", "assistant", "system")

Block = Mapping[str, Any]


@dataclass
class Canonical:
    """`loaded`: deferred tools that some message has brought."""

    messages: list[dict[str, Any]] = field(default_factory=list)
    tools: list[dict[str, Any]] = field(default_factory=list)
    loaded: list[dict[str, Any]] = field(default_factory=list)


def seal(thought: str) -> str:
    """A thought as a signature that brings it back."""
    return _SEAL + urlsafe_b64encode(thought.encode()).decode()


def unseal(signature: object) -> str | None:
    """None: not one of ours."""
    if not isinstance(signature, str) or not signature.startswith(_SEAL):
        return None
    try:
        return urlsafe_b64decode(signature.removeprefix(_SEAL)).decode()
    except ValueError:
        return None


def read_blocks(system: object, messages: Sequence[Mapping[str, Any]], tools: Sequence[Mapping[str, Any]]) -> Canonical:
    """`keep_s` on any block becomes that of the part or message that it is. Errors say where."""
    read = Canonical()
    known = {str(tool.get("name")): tool for tool in tools}
    read.tools = [_tool(tool) for tool in tools if not tool.get("defer_loading")]
    if parts := _system(system):
        read.messages.append({"role": "system", "content": parts})
    reader = _Reader(read, {name: tool for name, tool in known.items() if tool.get("defer_loading")})
    for i, message in enumerate(messages):
        reader.read(message, f"messages.{i}")
    if not read.messages or all(message["role"] == "system" for message in read.messages):
        raise InputError("at least one message is required", where="messages")
    return read


def _system(system: object) -> list[dict[str, Any]]:
    blocks = [{"type": "text", "text": system}] if isinstance(system, str) else list(_blocks(system, "system"))
    texts = [block for block in blocks if not str(block.get("text", "")).startswith(BILLING)]
    return _joined([_text(block, f"system.{i}") for i, block in enumerate(texts)])


def _blocks(value: object, where: str) -> Sequence[Block]:
    if value is None:
        return ()
    if not isinstance(value, (list, tuple)) or not all(isinstance(block, Mapping) for block in value):
        raise InputError(f"{shown(value)} is neither a text nor a list of blocks", where=where)
    return value


def _text(block: Block, where: str) -> dict[str, Any]:
    if block.get("type", "text") != "text" or not isinstance(block.get("text"), str):
        raise InputError(f"{shown(block.get('type'))} is a kind of block that is not read here", where=where)
    return _kept({"type": "text", "text": block["text"]}, block)


def _kept(item: dict[str, Any], block: Block) -> dict[str, Any]:
    return item if block.get("keep_s") is None else {**item, "keep_s": block["keep_s"]}


def _joined(parts: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """With an empty line between them."""
    parts = [part for part in parts if part["text"]]
    return [{**part, "text": BETWEEN + part["text"]} if i else part for i, part in enumerate(parts)]


def _tool(tool: Block) -> dict[str, Any]:
    function = {"name": tool.get("name"), "parameters": tool.get("input_schema") or {"type": "object"}}
    if tool.get("description") is not None:
        function["description"] = tool["description"]
    return _kept({"type": "function", "function": function}, tool)


class _Reader:
    """Messages in order. Results of tools are messages of their own; what a user says beside them comes where it stands."""

    def __init__(self, read: Canonical, deferred: Mapping[str, Block]) -> None:
        self._read, self._deferred = read, deferred
        self._loaded: set[str] = set()

    def read(self, message: Mapping[str, Any], where: str) -> None:
        role, content = message.get("role"), message.get("content")
        if role not in _ROLES:
            raise InputError(f"there is no role {shown(role)}", where=f"{where}.role", hint=", ".join(_ROLES))
        blocks = [{"type": "text", "text": content}] if isinstance(content, str) else _blocks(content, f"{where}.content")
        placed = [(block, f"{where}.content.{i}") for i, block in enumerate(blocks)]
        if role == "assistant":
            self._assistant(placed)
        else:
            self._user(role, placed)

    def _user(self, role: str, placed: list[tuple[Block, str]]) -> None:
        texts: list[dict[str, Any]] = []

        def said() -> None:
            if parts := _joined(texts):
                self._read.messages.append({"role": role, "content": parts})
            texts.clear()

        for block, where in placed:
            if block.get("type") == "tool_result":
                said()
                self._read.messages.append(self._result(block, where))
            else:
                texts.append(self._said(block, where))
        said()

    def _said(self, block: Block, where: str) -> dict[str, Any]:
        source = block.get("source")
        if block.get("type") == "document" and isinstance(source, Mapping) and source.get("type") == "text":
            return _kept({"type": "text", "text": str(source.get("data", ""))}, block)
        return _text(block, where)

    def _result(self, block: Block, where: str) -> dict[str, Any]:
        content = block.get("content")
        inner = [{"type": "text", "text": content}] if isinstance(content, str) else _blocks(content, f"{where}.content")
        parts = [self._result_part(part, f"{where}.content.{i}") for i, part in enumerate(inner)]
        if block.get("is_error"):
            parts.insert(0, {"type": "text", "text": "Error:"})
        made = {"role": "tool", "tool_call_id": str(block.get("tool_use_id", "")), "content": _joined(parts)}
        return _kept(made, block)

    def _result_part(self, part: Block, where: str) -> dict[str, Any]:
        if part.get("type") != "tool_reference":
            return self._said(part, where)
        name = str(part.get("tool_name"))
        tool = self._deferred.get(name)
        if tool is None:
            raise InputError(f"there is no deferred tool {shown(name)}", where=where)
        definition = _tool({key: value for key, value in tool.items() if key != "keep_s"})
        if name not in self._loaded:
            self._loaded.add(name)
            self._read.loaded.append(definition)
        return {"type": "text", "text": f"This tool can be called now: {write_value(definition)}"}

    def _assistant(self, placed: list[tuple[Block, str]]) -> None:
        texts, thoughts, calls = list[dict[str, Any]](), list[str](), list[dict[str, Any]]()
        message: dict[str, Any] = {"role": "assistant"}
        for block, where in placed:
            match block.get("type"):
                case "thinking":
                    thoughts.append(str(block.get("thinking") or unseal(block.get("signature")) or ""))
                case "redacted_thinking":
                    thoughts.append(unseal(block.get("data")) or "")
                case "tool_use":
                    function = {"name": block.get("name"), "arguments": block.get("input") or {}}
                    calls.append({"id": str(block.get("id", "")), "type": "function", "function": function})
                    message = _kept(message, block)
                case _:
                    texts.append(_text(block, where))
        if thought := BETWEEN.join(filter(None, thoughts)):
            message["reasoning_content"] = thought
        if calls:
            message["tool_calls"] = calls
        self._read.messages.append({**message, "content": texts})
