"""What a model may write as tool calls, as a grammar in its own syntax: names of tools, arguments that fit their schemas.

The grammar is Lark's text; schemas of arguments stand beside it under the names that it refers to (`@name`).
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from reprlib import repr as shown
from typing import Any, Literal

from moeflux.core.errors import InputError
from moeflux.text.framing import CallFrame, XmlFrame
from moeflux.text.parameters import may_be_text
from moeflux.text.tools import Schemas

_DIGITS = re.compile(r":0(?=<)")  # the number that Kimi gives a call


@dataclass(frozen=True)
class ToolChoice:
    """`auto`: as the model likes. `none`: no calls, though the tools stay in the prompt. `required`: at least one.

    `names`: only these tools; none: all of them. `parallel`: whether several calls may come in one answer.
    """

    mode: Literal["auto", "none", "required"] = "auto"
    names: tuple[str, ...] = ()
    parallel: bool = True

    def pick(self, schemas: Schemas) -> Schemas:
        """The tools that may be called; an error where the choice cannot be met."""
        for name in self.names:
            if name not in schemas:
                raise InputError(f"there is no tool {shown(name)}", where="tool_choice", hint=", ".join(schemas) or None)
        if self.mode == "required" and not schemas:
            raise InputError("a call is required, but there are no tools", where="tool_choice", hint="give tools")
        if self.mode == "none":
            return {}
        return {name: schema for name, schema in schemas.items() if not self.names or name in self.names}


AUTO = ToolChoice()


@dataclass(frozen=True)
class CallGrammar:
    lark: str
    schemas: Mapping[str, str]  # JSON text by name


class CallGrammars:
    """Of one model's syntax."""

    def __init__(self, frame: CallFrame, added: Mapping[str, int]) -> None:
        """`added`: tokens that are not made of bytes; where the frame has one, the token itself must come."""
        self.frame, self._added = frame, added
        self._tokens = re.compile("|".join(map(re.escape, sorted(added, key=len, reverse=True))) or "(?!)")

    @property
    def opener(self) -> int | None:
        """The token that begins calls, if it is one."""
        found = self._tokens.match(self.frame.begin)
        return self._added[found[0]] if found else None

    def forced(self, schemas: Schemas, parallel: bool) -> CallGrammar:
        """An answer that is calls: one, or one and more."""
        f = self.frame
        more = f" ({self._lark(f.between)} body)*" if parallel else ""
        return self._grammar(f"start: /\\n{{0,2}}/ {self._lark(f.begin)} body{more} {self._lark(f.end)}", schemas)

    def opened(self, schemas: Schemas, parallel: bool) -> CallGrammar:
        """What follows the token that begins calls, to the end of the last one that belongs to it."""
        f = self.frame
        begin = self._tokens.sub("", f.begin, count=1)
        opens_again = self._opening in f.between  # then the next call is begun anew
        more = "" if opens_again or not parallel else f" ({self._lark(f.between)} body)*"
        return self._grammar(f"start: {self._lark(begin)} body{more} {self._lark(f.end)}", schemas)

    @property
    def _opening(self) -> str:
        found = self._tokens.match(self.frame.begin)
        return found[0] if found else self.frame.begin

    def _grammar(self, start: str, schemas: Schemas) -> CallGrammar:
        rules, named = [start], dict[str, str]()
        bodies = []
        for i, (name, schema) in enumerate(schemas.items()):
            xml = self.frame.xml
            if xml is None:
                named[f"arguments_{i}"] = json.dumps(_an_object(schema))
                arguments = f"@arguments_{i}"
            else:
                arguments = self._xml_arguments(xml, i, schema, rules, named)
            bodies.append(f"{_quoted(name)} {self._lark(self.frame.middle)} {arguments}")
        rules.append("body: " + "\n    | ".join(bodies))
        if self.frame.xml is not None:
            rules.append(f"text[suffix={_quoted(self.frame.xml.close)}]: /(?s:.*)/")
        return CallGrammar("\n".join(rules) + "\n", named)

    def _xml_arguments(
        self, xml: XmlFrame, tool: int, schema: Mapping[str, Any], rules: list[str], named: dict[str, str]
    ) -> str:
        """In the order of the schema; a tool that names none takes any."""
        properties = schema.get("properties")
        if not isinstance(properties, Mapping):
            return f"({_quoted(xml.open)} /[^>\\n]+/ {_quoted(xml.middle)} text)*"
        required = schema.get("required")
        needed = set(required) if isinstance(required, (list, tuple)) else set()
        shared = {key: schema[key] for key in ("$defs", "definitions") if key in schema}
        parts = []
        for i, (name, inner) in enumerate(properties.items()):
            value = "text"
            if not may_be_text(inner):
                named[f"value_{tool}_{i}"] = json.dumps({**inner, **shared})
                value = f"@value_{tool}_{i} {_quoted(xml.close)}"
            elif words := _words(inner):
                value = f"({' | '.join(_quoted(word) for word in words)}) {_quoted(xml.close)}"
            rules.append(f"parameter_{tool}_{i}: {_quoted(xml.open + str(name) + xml.middle)} {value}")
            parts.append(f"parameter_{tool}_{i}" + ("" if name in needed else "?"))
        return " ".join(parts) or '""'

    def _lark(self, text: str) -> str:
        """A text in which some words are tokens."""
        pieces, at = [], 0
        for found in self._tokens.finditer(text):
            pieces += self._literal(text[at : found.start()], found[0])
            pieces.append(f"<[{self._added[found[0]]}]>")
            at = found.end()
        pieces += self._literal(text[at:], "")
        return " ".join(pieces) or '""'

    def _literal(self, text: str, behind: str) -> list[str]:
        if _DIGITS.search(text + behind) and text.endswith(":0"):
            return [_quoted(text[:-1]), "/[0-9]{1,4}/"]
        return [_quoted(text)] if text else []


def _an_object(schema: Mapping[str, Any]) -> Mapping[str, Any]:
    """Arguments are an object, whatever a schema leaves open; what it does not name is not made up."""
    if schema.get("type") == "object" and "properties" in schema and "additionalProperties" not in schema:
        return {**schema, "additionalProperties": False}
    return schema if schema.get("type") == "object" else {**schema, "type": "object"}


def _words(schema: Any) -> list[str]:
    enum = schema.get("enum") if isinstance(schema, Mapping) else None
    return [word for word in enum if isinstance(word, str) and word] if isinstance(enum, list) else []


def _quoted(text: str) -> str:
    """As Lark reads it."""
    return json.dumps(text, ensure_ascii=False)
