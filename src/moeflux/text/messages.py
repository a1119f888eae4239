"""A conversation and its tools as clients send them, checked and brought to the one form that templates take.

Messages: `role`, `content` as text, and where they are given `name`, `tool_calls`, `tool_call_id`, `reasoning_content`.
Tools: `{"type": "function", "function": {"name", "description", "parameters"}}`. Other keys are left out.

A text is the same as a list of it. Arguments of calls are values: however a client set them apart, they come out in one way.
`keep_s` on a part of a text, on a message or on a tool asks that what ends there is kept for so many seconds.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from reprlib import repr as shown
from typing import Any

from moeflux.core.errors import InputError
from moeflux.text.json_value import read_value, write_value
from moeflux.text.pen import Pen, without_signs
from moeflux.text.plain_data import PlainReader
from moeflux.text.tools import ToolCall

ROLES = {"system": "system", "developer": "system", "user": "user", "assistant": "assistant", "tool": "tool"}
TEXTS = ("text", "input_text", "output_text")  # kinds of parts
REASONING = ("reasoning_content", "thinking", "reasoning")  # names under which a message's thoughts come


class Arguments(dict[str, Any]):
    """Of a tool call: an object for templates that walk it, and as JSON text for those that print it."""

    __slots__ = ("_written",)

    def __init__(self, value: Mapping[str, Any], written: str) -> None:
        super().__init__(value)
        self._written = written

    def __str__(self) -> str:
        return self._written

    def __add__(self, other: str) -> str:
        return self._written + other

    def __radd__(self, other: str) -> str:
        return other + self._written


def read_messages(value: object, pen: Pen | None = None) -> list[dict[str, Any]]:
    """`pen`: signs the places that are asked for, and where the first message behind the system's begins."""
    reader = PlainReader()
    messages = reader.sequence(value, "messages")
    if not messages:
        raise InputError("there are no messages")
    read = [_Message(reader, f"message {i}", message, pen).read() for i, message in enumerate(messages)]
    if pen is not None:
        first = next((m for m in read if m["role"] != "system"), None)
        if first is not None and first["content"]:
            first["content"] = pen.at_start(first["content"], None)
    return read


def read_tools(value: object, pen: Pen | None = None) -> list[dict[str, Any]] | None:
    """In their envelope or bare. None where there are none."""
    if value is None:
        return None
    reader = PlainReader()
    tools = [_read_tool(reader, f"tool {i}", tool, pen) for i, tool in enumerate(reader.sequence(value, "tools"))]
    return tools or None


def write_answer(text: str, reasoning: str, calls: Sequence[ToolCall]) -> dict[str, Any]:
    """What an assistant said, as its message. Calls that are not complete were never made."""
    message: dict[str, Any] = {"role": "assistant", "content": text}
    if reasoning:
        message["reasoning_content"] = reasoning
    made = [_written_call(call) for call in calls if call.complete]
    return {**message, "tool_calls": made} if made else message


def _written_call(call: ToolCall) -> dict[str, Any]:
    name = {} if call.id is None else {"id": call.id}
    return {**name, "type": "function", "function": {"name": call.name, "arguments": call.arguments}}


class _Message:
    def __init__(self, reader: PlainReader, where: str, message: object, pen: Pen | None) -> None:
        self._reader, self._where, self._pen = reader, where, pen
        self._given = reader.mapping(message, where)

    def read(self) -> dict[str, Any]:
        role = self._given.get("role")
        if not isinstance(role, str) or role not in ROLES:
            raise InputError(f"there is no role {shown(role)}", where=self._where, hint=", ".join(ROLES))
        more = {name: self._text(name) for name in ("name", "tool_call_id") if self._given.get(name) is not None}
        if role == "assistant":
            more |= self._thoughts() | self._calls()
        needed = not ("tool_calls" in more or "reasoning_content" in more)
        return {"role": ROLES[role], "content": self._signed(self._content(needed), self._given), **more}

    def _signed(self, text: str | None, given: Mapping[Any, Any]) -> str | None:
        keep = _keep_s(given, self._where)
        if self._pen is None or text is None:
            return text
        return text if keep is None else self._pen.at_end(text, keep)

    def _read_text(self, value: object, where: str) -> str:
        text = self._reader.text(value, where)
        return text if self._pen is None else without_signs(text)

    def _text(self, name: str) -> str:
        return self._reader.text(self._given[name], f"{self._where}: {name}")

    def _content(self, needed: bool) -> str | None:
        content = self._given.get("content")
        if isinstance(content, str):
            return self._read_text(content, self._where)
        if content is None and not needed:
            return None
        if not isinstance(content, (list, tuple)):
            raise InputError(f"its content is {shown(content)}, neither a text nor a list of parts", where=self._where)
        return "".join(self._part(part, f"{self._where}, part {i}") for i, part in enumerate(content))

    def _part(self, part: object, where: str) -> str:
        given = self._reader.mapping(part, where)
        if given.get("type") not in TEXTS:
            raise InputError(
                f"{shown(given.get('type'))} is a kind of content that is not read here", where=where, hint="text"
            )
        return self._signed(self._read_text(given.get("text"), where), given) or ""

    def _thoughts(self) -> dict[str, str]:
        name = next((name for name in REASONING if self._given.get(name) is not None), None)
        return {} if name is None else {"reasoning_content": self._text(name)}

    def _calls(self) -> dict[str, Any]:
        if self._given.get("tool_calls") is None:
            return {}
        calls = self._reader.sequence(self._given["tool_calls"], f"{self._where}: tool_calls")
        read = [self._call(call, f"{self._where}, tool call {i}") for i, call in enumerate(calls)]
        return {"tool_calls": read} if read else {}

    def _call(self, call: object, where: str) -> dict[str, Any]:
        given = self._reader.mapping(call, where)
        function = _function(self._reader, given, where)
        name = _name(self._reader, function, where)
        id = {} if given.get("id") is None else {"id": self._reader.text(given["id"], where)}
        return {**id, "type": "function", "function": {"name": name, "arguments": self._arguments(function, where)}}

    def _arguments(self, function: Mapping[Any, Any], where: str) -> Arguments:
        given, where = function.get("arguments"), f"{where}: arguments"
        if isinstance(given, Arguments):
            return given
        if given is None or (isinstance(given, str) and not given.strip()):
            given = {}
        written = self._reader.text(given, where) if isinstance(given, str) else None
        try:
            value = self._reader.value(given if written is None else read_value(written), where)
        except ValueError as error:
            raise InputError(f"{shown(written)} is not JSON: {error}", where=where) from None
        self._reader.mapping(value, where)
        return Arguments(value, write_value(value))


def _read_tool(reader: PlainReader, where: str, tool: object, pen: Pen | None) -> dict[str, Any]:
    given = reader.mapping(tool, where)
    function, keep = _function(reader, given, where), _keep_s(given, where)
    read: dict[str, Any] = {"name": _name(reader, function, where)}
    if function.get("description") is not None:
        text = reader.text(function["description"], f"{where}: description")
        read["description"] = text if pen is None or keep is None else pen.at_end(without_signs(text), keep)
    parameters = next((function[key] for key in ("parameters", "input_schema") if function.get(key) is not None), None)
    if parameters is not None:
        where = f"{where}: parameters"
        read["parameters"] = reader.value(reader.mapping(parameters, where), where)
    return {"type": "function", "function": read}


def _keep_s(given: Mapping[Any, Any], where: str) -> float | None:
    keep = given.get("keep_s")
    if keep is not None and (isinstance(keep, bool) or not isinstance(keep, (int, float)) or not 0 <= keep < math.inf):
        raise InputError(f"{shown(keep)} is no number of seconds", where=f"{where}: keep_s")
    return keep


def _function(reader: PlainReader, given: Mapping[Any, Any], where: str) -> Mapping[Any, Any]:
    """Out of its envelope."""
    kind = given.get("type", "function")
    if kind != "function":
        raise InputError(f"{shown(kind)} is a kind of tool that is not known here", where=where, hint="function")
    return reader.mapping(given["function"], f"{where}: function") if "function" in given else given


def _name(reader: PlainReader, function: Mapping[Any, Any], where: str) -> str:
    name = reader.text(function.get("name"), f"{where}: name")
    if not name.strip():
        raise InputError("its name is empty", where=where)
    return name
