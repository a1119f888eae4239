"""A conversation as a given template takes it: what it refuses or ignores is said in another way, where it stands.

System messages at the beginning are one. One that comes later is a system turn where the template has such turns, else a
turn of the user. A template that knows no tools gets them as text.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cached_property
from typing import Any

from moeflux.core.errors import MoefluxError
from moeflux.text.framing import CallFrame
from moeflux.text.json_value import write_value
from moeflux.text.messages import Arguments

Message = dict[str, Any]
Render = Callable[[Sequence[Message], Sequence[Message] | None], str]

_EXAMPLE = ("name_of_the_function", Arguments({"an_argument": "its value"}, '{"an_argument": "its value"}'))


class Abilities:
    """What a template can show, found by trying."""

    def __init__(self, render: Render) -> None:
        self._render = render

    @cached_property
    def late_system(self) -> bool:
        """A system message stands where it was said."""
        asked = [_said("user", "first"), _said("system", "probed"), _said("user", "last")]
        text = self._try(asked)
        return 0 <= text.find("first") < text.find("probed") < text.find("last")

    @cached_property
    def tools(self) -> bool:
        tool = {"type": "function", "function": {"name": "probed", "description": "?", "parameters": {"type": "object"}}}
        return "probed" in self._try([_said("user", "?")], [tool])

    @cached_property
    def silence(self) -> str | None:
        """The content of a message that only calls tools: some templates fail at None, some show calls only where it is."""
        return next((content for content in ("", None) if self._shows_call(content)), "")

    @cached_property
    def calls(self) -> bool:
        return self._shows_call(self.silence)

    def _shows_call(self, content: str | None) -> bool:
        arguments = Arguments({"probed": "probed"}, '{"probed": "probed"}')
        call = {"id": "abcdefghi", "type": "function", "function": {"name": "probed", "arguments": arguments}}
        said = {"role": "assistant", "content": content, "tool_calls": [call]}
        return "probed" in self._try([_said("user", "?"), said])

    def _try(self, messages: Sequence[Message], tools: Sequence[Message] | None = None) -> str:
        try:
            return self._render(messages, tools)
        except MoefluxError:
            return ""


def fit(
    messages: Sequence[Message], tools: Sequence[Message] | None, can: Abilities, frame: Callable[[], CallFrame]
) -> tuple[list[Message], Sequence[Message] | None]:
    """Messages and tools as `read_messages` and `read_tools` give them. `frame`: how the model writes calls."""
    fitted = list(messages)
    if any("tool_calls" in m or m["role"] == "tool" for m in fitted) and not can.calls:
        fitted = [_spelled(m, frame()) for m in fitted]
    if tools and not can.tools:
        fitted, tools = _told(fitted, tools, frame()), None
    fitted = _one_system(fitted)
    late = any(m["role"] == "system" for m in fitted[1:])
    if late and not can.late_system:
        fitted = [*fitted[:1], *({**m, "role": "user"} if m["role"] == "system" else m for m in fitted[1:])]
    return [m if m["content"] else {**m, "content": can.silence if "tool_calls" in m else ""} for m in fitted], tools


def _one_system(messages: list[Message]) -> list[Message]:
    n = next((i for i, m in enumerate(messages) if m["role"] != "system"), len(messages))
    if n < 2:
        return messages
    first: Message = {**messages[0], "content": "\n\n".join(m["content"] for m in messages[:n] if m["content"])}
    return [first, *messages[n:]]


def _told(messages: list[Message], tools: Sequence[Message], frame: CallFrame) -> list[Message]:
    """Tools as text of the system's."""
    told = [
        "You can call functions. To call one, write this:",
        frame.write([_EXAMPLE]),
        "The functions, and schemas of their arguments:",
        *(write_value(tool["function"]) for tool in tools),
    ]
    n = next((i for i, m in enumerate(messages) if m["role"] != "system"), len(messages))
    return [*messages[:n], _said("system", "\n".join(told)), *messages[n:]]


def _spelled(message: Message, frame: CallFrame) -> Message:
    """Calls and results as plain text."""
    if message["role"] == "tool":
        return _said("user", f"<tool_response>\n{message['content'] or ''}\n</tool_response>")
    if "tool_calls" not in message:
        return message
    calls = frame.write([(call["function"]["name"], call["function"]["arguments"]) for call in message["tool_calls"]])
    rest = {key: value for key, value in message.items() if key != "tool_calls"}
    return {**rest, "content": f"{message['content']}\n{calls}" if message["content"] else calls}


def _said(role: str, content: str) -> Message:
    return {"role": role, "content": content}
