"""Tool calls as models write them, read while they are written: the name as soon as it stands, arguments as they come.

Styles: JSON with a name and arguments (Qwen3), XML parameters (Qwen3-Coder, Qwen3.5), and a head with the name before JSON
arguments (DeepSeek, Kimi). Arguments always come out as JSON text; of one call, the pieces join to what its end says.
"""

from __future__ import annotations

import json
import re
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from moeflux.text.json_scan import JsonScanner

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
    """One call. `feed` takes what the model writes; `finish` says what it was, or None where it was no call at all."""

    def __init__(self, index: int) -> None:
        self._index = index
        self._text = ""  # all of it
        self._name: str | None = None
        self._arguments = ""
        self._id: str | None = None

    @property
    def text(self) -> str:
        return self._text

    def feed(self, text: str) -> Iterator[CallPart]:
        self._text += text
        yield from self._read(text)

    @abstractmethod
    def _read(self, text: str) -> Iterator[CallPart]: ...

    def finish(self, closed: bool) -> Iterator[CallPart]:
        """`closed`: the model ended the call itself."""
        if self._name is not None:
            if closed and not self._arguments:
                yield from self._add("{}")
            complete = closed and _is_object(self._arguments)
            yield CallEnd(self._index, ToolCall(self._name, self._arguments, complete, self._id))

    def _start(self, name: str) -> Iterator[CallPart]:
        self._name = name
        yield CallStart(self._index, name)

    def _add(self, text: str) -> Iterator[CallPart]:
        if text:
            self._arguments += text
            yield CallDelta(self._index, text)


class HeadedCall(CallReader):
    """DeepSeek's and Kimi's: a head, a separator token, then JSON; DeepSeek-V3 puts name and a code fence between."""

    _FENCED = re.compile(r"\s*([^\n]*?)\s*\n\s*```(?:json)?\s*(?=[{\[])")

    def __init__(self, index: int, style: Style) -> None:
        super().__init__(index)
        self._style = style
        self._scanner: JsonScanner | None = None
        self._pending = ""

    def separate(self) -> Iterator[CallPart]:
        """The token between head and body came."""
        head, self._pending = self._text.strip(), ""
        if self._style == "kimi":
            self._id = head
            yield from self._start(re.sub(r"^functions\.|:\d+$", "", head))
        elif head != "function":
            yield from self._start(head)
        self._scanner = JsonScanner()

    def _read(self, text: str) -> Iterator[CallPart]:
        if self._scanner is None:
            return
        self._pending += text
        if self._name is None:
            found = self._FENCED.match(self._pending)
            if found is None:
                return
            self._pending = self._pending[found.end() :]
            yield from self._start(found[1])
        text, self._pending = self._pending, ""
        if not self._arguments:
            text = text.lstrip()
        yield from self._add(text[: self._scanner.take(text)])


class TaggedCall(CallReader):
    """Qwen's, between <tool_call> tags: JSON or XML, whichever it begins with."""

    _HEAD = re.compile(r'\s*\{\s*"name"\s*:\s*("(?:[^"\\]|\\.)*")\s*,\s*"(?:arguments|parameters)"\s*:\s*(?=[{])')
    _FUNCTION = re.compile(r"\s*<function=([^>\n]+)>")
    _PARAMETER = re.compile(
        r"<parameter=([^>\n]+)>\n?(.*?)\n?(?:</parameter>(?=\s*(?:<parameter=|</function>|$))|(?=<parameter=|</function>|$))",
        re.DOTALL,
    )

    def __init__(self, index: int, schemas: Schemas) -> None:
        super().__init__(index)
        self._schemas = schemas
        self._scanner: JsonScanner | None = None
        self._body_at = 0  # where XML parameters begin

    def _read(self, text: str) -> Iterator[CallPart]:
        if self._scanner is not None:
            yield from self._add(text[: self._scanner.take(text)])
        elif self._name is not None:
            return
        elif found := self._HEAD.match(self._text):
            self._scanner = JsonScanner()
            yield from self._start(json.loads(found[1], strict=False))
            rest = self._text[found.end() :]
            yield from self._add(rest[: self._scanner.take(rest)])
        elif found := self._FUNCTION.match(self._text):
            self._body_at = found.end()
            yield from self._start(found[1].strip())

    def finish(self, closed: bool) -> Iterator[CallPart]:
        if self._name is None:
            yield from self._whole()
        elif self._scanner is None:
            body = self._text[self._body_at :]
            if not closed:  # a value that was cut off is no value
                body = body[: body.rfind("</parameter>") + len("</parameter>")] if "</parameter>" in body else ""
            yield from self._add(self._parameters(body))
        yield from super().finish(closed)

    def _whole(self) -> Iterator[CallPart]:
        """JSON with its members in another order."""
        try:
            value = json.loads(self._text)
            name, arguments = value["name"], value.get("arguments", value.get("parameters", {}))
        except (ValueError, TypeError, KeyError):
            return
        if isinstance(name, str):
            yield from self._start(name)
            yield from self._add(arguments if isinstance(arguments, str) else json.dumps(arguments, ensure_ascii=False))

    def _parameters(self, body: str) -> str:
        assert self._name is not None
        properties = self._schemas.get(self._name, {}).get("properties", {})
        values = {
            name.strip(): typed_value(text, properties.get(name.strip())) for name, text in self._PARAMETER.findall(body)
        }
        return json.dumps(values, ensure_ascii=False)


def typed_value(text: str, schema: Any) -> Any:
    """What a parameter written as bare text stands for: a string, unless its schema says otherwise and the text agrees."""
    kinds = schema.get("type", ()) if isinstance(schema, Mapping) else "string"
    if kinds == "string" or (isinstance(schema, Mapping) and _has_strings(schema.get("enum"))):
        return text
    word = text.strip()
    if word.lower() in ("true", "false", "null", "none"):
        word = {"none": "null"}.get(word.lower(), word.lower())
    try:
        value = json.loads(word)
    except ValueError:
        return text
    return text if "string" in kinds and not isinstance(value, (dict, list)) and value is not None else value


def _has_strings(enum: Any) -> bool:
    return isinstance(enum, list) and any(isinstance(item, str) for item in enum)


def _is_object(text: str) -> bool:
    try:
        return isinstance(json.loads(text), dict)
    except ValueError:
        return False
