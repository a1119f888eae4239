"""Conversations as lists of items, brought to the one form of `text/messages`.

An assistant's turn comes as several items: thoughts, what it said, its calls. They are one message again here.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from reprlib import repr as shown
from typing import Any

from moeflux.core.errors import InputError
from moeflux.text.blocks import unseal
from moeflux.text.messages import TEXTS

Item = Mapping[str, Any]
CALLS = {"function_call": "arguments", "custom_tool_call": "input"}
RESULTS = ("function_call_output", "custom_tool_call_output")
SPACED = "__"  # between the names of a tool's namespace and its own


def full_name(item: Item) -> str:
    """Of a tool or call, with its namespace."""
    space, name = item.get("namespace"), str(item.get("name", ""))
    return f"{space}{SPACED}{name}" if space else name


def read_items(items: Sequence[Item]) -> list[dict[str, Any]]:
    """Errors say where."""
    reader = _Reader()
    for i, item in enumerate(items):
        reader.read(item, f"input.{i}")
    return reader.messages


class _Reader:
    def __init__(self) -> None:
        self.messages: list[dict[str, Any]] = []
        self._turn: dict[str, Any] | None = None  # the assistant's that is being read

    def read(self, item: Item, where: str) -> None:
        kind = item.get("type") or "message"
        if kind == "reasoning":
            self._assistant("reasoning_content", "content", "tool_calls")["reasoning_content"] = _thought(item)
        elif kind in CALLS:
            self._call(item, str(kind))
        elif kind in RESULTS:
            self._say({"role": "tool", "tool_call_id": str(item.get("call_id", "")), "content": _output(item, where)})
        elif kind == "message" and item.get("role") == "assistant":
            self._assistant("content", "tool_calls")["content"] = _parts(item.get("content"), where)
        elif kind == "message":
            self._say({"role": item.get("role"), "content": _parts(item.get("content"), where)})
        else:
            raise InputError(f"{shown(kind)} is a kind of item that is not read here", where=where)

    def _say(self, message: dict[str, Any]) -> None:
        self._turn = None
        self.messages.append(message)

    def _assistant(self, *taken: str) -> dict[str, Any]:
        """The turn that goes on, or a new one where it has one of these already."""
        if self._turn is None or any(name in self._turn for name in taken):
            self._turn = {"role": "assistant"}
            self.messages.append(self._turn)
        return self._turn

    def _call(self, item: Item, kind: str) -> None:
        given = item.get(CALLS[kind])
        arguments = {"input": given} if kind == "custom_tool_call" else given
        function = {"name": full_name(item), "arguments": arguments}
        turn = self._assistant()
        turn.setdefault("tool_calls", []).append(
            {"id": str(item.get("call_id", "")), "type": "function", "function": function}
        )


def _parts(content: object, where: str) -> object:
    if not isinstance(content, (list, tuple)):
        return content
    return [_part(part, f"{where}.content.{i}") for i, part in enumerate(content)]


def _part(part: object, where: str) -> dict[str, Any]:
    if isinstance(part, Mapping) and part.get("type") == "refusal":
        return {"type": "text", "text": part.get("refusal")}
    if not isinstance(part, Mapping) or part.get("type") not in TEXTS:
        kind = part.get("type") if isinstance(part, Mapping) else part
        raise InputError(f"{shown(kind)} is a kind of content that is not read here", where=where, hint="text")
    kept = {} if part.get("keep_s") is None else {"keep_s": part["keep_s"]}
    return {"type": "text", "text": part.get("text"), **kept}


def _output(item: Item, where: str) -> object:
    output = item.get("output")
    return _parts(output, where) if isinstance(output, (list, tuple)) else "" if output is None else output


def _thought(item: Item) -> str:
    """As it was shown, or sealed in what came with it."""
    content = item.get("content")
    parts = content if isinstance(content, (list, tuple)) else ()
    texts = [str(part.get("text", "")) for part in parts if isinstance(part, Mapping)]
    return "\n\n".join(filter(None, texts)) or unseal(item.get("encrypted_content")) or ""
