"""Items of a response while they are written: thoughts, what is said, calls. Every change is an event."""

from __future__ import annotations

import secrets
from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import Any

from moeflux.text.blocks import seal
from moeflux.text.json_value import completed_members

Event = tuple[str, dict[str, Any]]  # its type, and its fields but for the number


class OutputItem(ABC):
    """One of them. `place`: in the output."""

    prefix = ""

    def __init__(self, place: int) -> None:
        self.place, self.id = place, f"{self.prefix}_{secrets.token_hex(12)}"
        self.closed = False
        self._texts: list[str] = []

    def open(self) -> list[Event]:
        return [("response.output_item.added", {"output_index": self.place, "item": self.item("in_progress")})]

    @abstractmethod
    def add(self, text: str, logprobs: list[dict[str, Any]]) -> list[Event]: ...

    def close(self, complete: bool = True) -> list[Event]:
        self.closed = True
        item = self.item("completed" if complete else "incomplete")
        return [*self._last(), ("response.output_item.done", {"output_index": self.place, "item": item})]

    @abstractmethod
    def item(self, status: str) -> dict[str, Any]: ...

    @abstractmethod
    def _last(self) -> list[Event]:
        """Events before it is done."""

    @property
    def _text(self) -> str:
        return "".join(self._texts)

    @property
    def _at(self) -> dict[str, Any]:
        return {"item_id": self.id, "output_index": self.place}


class MessageItem(OutputItem):
    prefix = "msg"

    def __init__(self, place: int) -> None:
        super().__init__(place)
        self._logprobs: list[dict[str, Any]] = []

    def open(self) -> list[Event]:
        part = {"type": "output_text", "text": "", "annotations": [], "logprobs": []}
        return [*super().open(), ("response.content_part.added", {**self._at, "content_index": 0, "part": part})]

    def add(self, text: str, logprobs: list[dict[str, Any]]) -> list[Event]:
        self._texts.append(text)
        self._logprobs += logprobs
        return [("response.output_text.delta", {**self._at, "content_index": 0, "delta": text, "logprobs": logprobs})]

    def _last(self) -> list[Event]:
        at = {**self._at, "content_index": 0}
        return [
            ("response.output_text.done", {**at, "text": self._text, "logprobs": self._logprobs}),
            ("response.content_part.done", {**at, "part": self._part()}),
        ]

    def _part(self) -> dict[str, Any]:
        return {"type": "output_text", "text": self._text, "annotations": [], "logprobs": self._logprobs}

    def item(self, status: str) -> dict[str, Any]:
        content = [] if status == "in_progress" else [self._part()]
        return {"id": self.id, "type": "message", "role": "assistant", "status": status, "content": content}


class ThoughtItem(OutputItem):
    prefix = "rs"

    def __init__(self, place: int, sealed: bool) -> None:
        """`sealed`: the client wants to send it back whole, whatever it shows of it."""
        super().__init__(place)
        self._sealed = sealed

    def open(self) -> list[Event]:
        part = {"type": "reasoning_text", "text": ""}
        return [*super().open(), ("response.content_part.added", {**self._at, "content_index": 0, "part": part})]

    def add(self, text: str, logprobs: list[dict[str, Any]]) -> list[Event]:
        self._texts.append(text)
        return [("response.reasoning_text.delta", {**self._at, "content_index": 0, "delta": text})]

    def _last(self) -> list[Event]:
        at = {**self._at, "content_index": 0}
        part = {"type": "reasoning_text", "text": self._text}
        return [
            ("response.reasoning_text.done", {**at, "text": self._text}),
            ("response.content_part.done", {**at, "part": part}),
        ]

    def item(self, status: str) -> dict[str, Any]:
        content = [] if status == "in_progress" else [{"type": "reasoning_text", "text": self._text}]
        item = {"id": self.id, "type": "reasoning", "summary": [], "content": content, "status": status}
        return {**item, "encrypted_content": seal(self._text)} if self._sealed and content else item


class CallItem(OutputItem):
    """A call of a function, or of a tool that takes a text: its text is told at the end, when it is known."""

    def __init__(self, place: int, tool: Mapping[str, Any], name: str, id: str | None) -> None:
        self.prefix = "ctc" if tool.get("type") == "custom" else "fc"
        super().__init__(place)
        self._is_text = tool.get("type") == "custom"
        self._name = {"name": tool.get("name", name)}
        if tool.get("namespace"):
            self._name["namespace"] = tool["namespace"]
        self._call_id = id or f"call_{secrets.token_hex(12)}"

    def add(self, text: str, logprobs: list[dict[str, Any]]) -> list[Event]:
        self._texts.append(text)
        if self._is_text:
            return []
        return [("response.function_call_arguments.delta", {**self._at, "delta": text})]

    def _last(self) -> list[Event]:
        if self._is_text:
            given = {"input": self._input}
            return [
                ("response.custom_tool_call_input.delta", {**self._at, "delta": self._input}),
                ("response.custom_tool_call_input.done", {**self._at, **given}),
            ]
        done = {**self._at, "name": self._name["name"], "arguments": self._text}
        return [("response.function_call_arguments.done", done)]

    @property
    def _input(self) -> str:
        return str(completed_members(self._text).get("input", ""))

    def item(self, status: str) -> dict[str, Any]:
        kind, key, value = (
            ("custom_tool_call", "input", self._input) if self._is_text else ("function_call", "arguments", self._text)
        )
        given = "" if status == "in_progress" else value
        return {"id": self.id, "type": kind, "status": status, "call_id": self._call_id, **self._name, key: given}
