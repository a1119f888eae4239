"""Tool calls as models write them, read while they are written: the name as soon as it stands, arguments as they come.

Styles: JSON with a name and arguments (Qwen3), XML parameters (Qwen3-Coder, Qwen3.5), and a head with the name before JSON
arguments (DeepSeek, Kimi). Arguments always come out as JSON text; of one call, the pieces join to what its end says.
"""

from __future__ import annotations

import re
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from moeflux.core.characters import is_unicode
from moeflux.text.heads import HeadScanner, read_fenced, read_tagged
from moeflux.text.json_scan import JsonScanner
from moeflux.text.json_value import read_value, write_value
from moeflux.text.parameters import Begins, Ends, Grows, ParameterScanner, Step, is_text, typed_value

Style = Literal["tagged", "deepseek", "kimi"]
Schemas = Mapping[str, Mapping[str, Any]]  # parameters of a tool, by its name


@dataclass(frozen=True)
class ToolCall:
    name: str
    arguments: str  # JSON text
    complete: bool = True  # False: the model was cut off, or wrote something that is not JSON
    id: str | None = None  # where the model gives calls names of their own


@dataclass(frozen=True)
class CallStart:
    index: int
    name: str
    id: str | None = None  # where the model gives calls names of their own


@dataclass(frozen=True)
class CallDelta:
    """More of the arguments."""

    index: int
    text: str


@dataclass(frozen=True)
class CallEnd:
    index: int
    call: ToolCall


CallPart = CallStart | CallDelta | CallEnd


def schemas_of(tools: Sequence[Mapping[str, Any]] | None) -> Schemas:
    """From tool definitions as clients send them, in an envelope or bare."""
    functions = [tool.get("function", tool) for tool in tools or ()]
    keys = ("parameters", "input_schema")
    return {f["name"]: next((f[key] for key in keys if isinstance(f.get(key), Mapping)), {}) for f in functions}


class CallReader(ABC):
    """One call. `feed` takes what the model writes; `finish` says what it was, or nothing where it was no call at all."""

    def __init__(self, index: int) -> None:
        self._index = index
        self._written: list[str] = []  # all of it
        self._arguments: list[str] = []
        self._name: str | None = None
        self._id: str | None = None

    @property
    def text(self) -> str:
        return "".join(self._written)

    def feed(self, text: str) -> Iterator[CallPart]:
        if text:
            self._written.append(text)
            yield from self._read(text)

    @abstractmethod
    def _read(self, text: str) -> Iterator[CallPart]: ...

    def finish(self, closed: bool) -> Iterator[CallPart]:
        """`closed`: the model ended the call itself."""
        if self._name is not None:
            if closed and not self._arguments:
                yield from self._add("{}")
            arguments = "".join(self._arguments)
            yield CallEnd(self._index, ToolCall(self._name, arguments, closed and _is_object(arguments), self._id))

    def _start(self, name: str) -> Iterator[CallPart]:
        self._name = name
        yield CallStart(self._index, name, self._id)

    def _add(self, text: str) -> Iterator[CallPart]:
        if text:
            self._arguments.append(text)
            yield CallDelta(self._index, text)

    def _add_json(self, text: str, scanner: JsonScanner) -> Iterator[CallPart]:
        if not self._arguments:
            text = text.lstrip()
        if not scanner.done:
            yield from self._add(text[: scanner.take(text)])


class HeadedCall(CallReader):
    """DeepSeek's and Kimi's: a head, a separator token, then JSON; DeepSeek-V3 puts name and a code fence between."""

    def __init__(self, index: int, style: Style) -> None:
        super().__init__(index)
        self._style = style
        self._json = JsonScanner()
        self._head: HeadScanner | None = None
        self._separated = False

    def separate(self, marker: str) -> Iterator[CallPart]:
        """The token between head and body came. A second one is part of what is written."""
        if self._separated:
            yield from self.feed(marker)
            return
        self._separated = True
        head = self.text.strip()
        self._written.append(marker)
        if self._style == "kimi":
            self._id = head
            head = re.sub(r"^functions\.|:\d+$", "", head)
        elif head == "function":
            self._head = HeadScanner(read_fenced)
            return
        if head:
            yield from self._start(head)

    def _read(self, text: str) -> Iterator[CallPart]:
        if self._head is not None and not self._head.done:
            text = text[self._head.take(text) :]
            if self._head.head is not None:
                yield from self._start(self._head.head.name)
        if self._separated and self._name is not None:
            yield from self._add_json(text, self._json)


class TaggedCall(CallReader):
    """Qwen's, between <tool_call> tags: JSON or XML, whichever it begins with."""

    def __init__(self, index: int, schemas: Schemas) -> None:
        super().__init__(index)
        self._schemas = schemas
        self._json = JsonScanner()
        self._head = HeadScanner(read_tagged)
        self._xml: _XmlArguments | None = None

    def _read(self, text: str) -> Iterator[CallPart]:
        if not self._head.done:
            text = text[self._head.take(text) :]
            if (head := self._head.head) is not None:
                yield from self._start(head.name)
                if head.body == "xml":
                    text = text.removeprefix(">")
                    self._xml = _XmlArguments(self._schemas.get(head.name, {}).get("properties"))
        if self._xml is not None:
            yield from self._add("".join(self._xml.feed(text)))
        elif self._head.head is not None:
            yield from self._add_json(text, self._json)

    def finish(self, closed: bool) -> Iterator[CallPart]:
        if self._head.head is None:
            yield from self._whole()
        elif self._xml is not None and closed:
            yield from self._add("".join(self._xml.finish()))
        yield from super().finish(closed)

    def _whole(self) -> Iterator[CallPart]:
        """JSON with its members in another order."""
        try:
            value = read_value(self.text)
            name, arguments = value["name"], value.get("arguments", value.get("parameters", {}))
        except (ValueError, TypeError, KeyError):
            return
        if isinstance(name, str) and name.strip() and is_unicode(name):
            yield from self._start(name.strip())
            written = arguments if isinstance(arguments, str) else write_value(arguments)
            yield from self._add(written if is_unicode(written) else write_value(written))


class _XmlArguments:
    """Parameters as JSON text, while they are written. What is no string waits for its end, which says what it is.

    Of two parameters with one name, the first counts.
    """

    def __init__(self, properties: Any) -> None:
        """`properties`: of the tool's schema."""
        self._known: Mapping[str, Any] = properties if isinstance(properties, Mapping) else {}
        self._scanner = ParameterScanner()
        self._names: set[str] = set()
        self._name: str | None = None  # of the one that is being written
        self._waiting: list[str] | None = None

    def feed(self, text: str) -> Iterator[str]:
        for step in self._scanner.feed(text):
            yield from self._written(step)

    def finish(self) -> Iterator[str]:
        for step in self._scanner.finish():
            yield from self._written(step)
        yield "}" if self._names else "{}"

    def _written(self, step: Step) -> Iterator[str]:
        match step:
            case Begins(name):
                yield from self._begin(name)
            case Grows(text) if self._waiting is not None:
                self._waiting.append(text)
            case Grows(text) if self._name is not None:
                yield write_value(text)[1:-1]
            case Ends() if self._name is not None:
                yield from self._end(self._name)

    def _begin(self, name: str) -> Iterator[str]:
        self._name, self._waiting = (None if name in self._names else name), None
        if self._name is None:
            return
        if is_text(self._known.get(name)):
            yield self._key(name) + '"'
        else:
            self._waiting = []

    def _end(self, name: str) -> Iterator[str]:
        if self._waiting is None:
            yield '"'
        else:
            yield self._key(name) + write_value(typed_value("".join(self._waiting), self._known.get(name)))
        self._name = self._waiting = None

    def _key(self, name: str) -> str:
        between = ", " if self._names else "{"
        self._names.add(name)
        return f"{between}{write_value(name)}: "


def _is_object(text: str) -> bool:
    try:
        return isinstance(read_value(text), dict)
    except ValueError:
        return False
