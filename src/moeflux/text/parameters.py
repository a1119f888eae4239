"""Arguments that models write as XML: `<parameter=name>` and a bare text, which the tool's schema gives a type.

Read character by character, so that a text can be shown while it is written; each character is looked at once.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Literal

from moeflux.text.json_value import read_value

_OPEN, _CLOSE, _OVER = "<parameter=", "</parameter>", "</function>"
_BOUNDS = (_OPEN, _CLOSE, _OVER)
_FOLLOWING = (_OPEN, _OVER)  # what may stand behind an end tag


@dataclass(frozen=True)
class Begins:
    name: str


@dataclass(frozen=True)
class Grows:
    text: str


@dataclass(frozen=True)
class Ends:
    pass


Step = Begins | Grows | Ends


class ParameterScanner:
    """Names and texts as they come. An end tag counts only where something follows that ends a text too."""

    def __init__(self) -> None:
        self._state: Literal["outside", "name", "text", "behind"] = "outside"
        self._bound = ""  # could become one of the bounds
        self._name: list[str] = []
        self._space: list[str] = []  # behind an end tag that may be one
        self._first = False  # the next character is a text's first
        self._line_end = False  # held back: the last one of a text is framing
        self._out: list[str] = []

    def feed(self, text: str) -> Iterator[Step]:
        for character in text:
            yield from self._take(character)
        yield from self._grown()

    def finish(self) -> Iterator[Step]:
        """Nothing more comes: that ends a text too."""
        if self._state == "text":
            self._write(self._bound)
        elif self._state == "behind" and self._bound:
            self._write(_CLOSE + "".join(self._space) + self._bound)
        if self._state in ("text", "behind"):
            yield from self._end()
        self._state, self._bound = "outside", ""

    def _take(self, character: str) -> Iterator[Step]:
        match self._state:
            case "outside":
                if self._match(character, (_OPEN,)) == _OPEN:
                    self._begin_name()
            case "name":
                yield from self._take_name(character)
            case "text":
                yield from self._take_text(character)
            case "behind":
                yield from self._take_behind(character)

    def _begin_name(self) -> None:
        self._state, self._bound, self._name = "name", "", []

    def _take_name(self, character: str) -> Iterator[Step]:
        if character not in ">\n":
            self._name.append(character)
        elif character == ">" and self._name:
            yield Begins("".join(self._name).strip())
            self._state, self._first, self._line_end = "text", True, False
        else:
            self._state = "outside"

    def _take_text(self, character: str) -> Iterator[Step]:
        if self._first and character == "\n":
            self._first = False
            return
        self._first = False
        held = self._bound
        bound = self._match(character, _BOUNDS)
        if not self._bound or (held and len(self._bound) <= len(held)):  # what was held is no bound
            self._write(held + ("" if self._bound else character))
        if bound == _CLOSE:
            self._state, self._bound, self._space = "behind", "", []
        elif bound is not None:
            yield from self._end()
            self._go_on(bound)

    def _take_behind(self, character: str) -> Iterator[Step]:
        if not self._bound and character.isspace():
            self._space.append(character)
            return
        begun = self._bound + character
        if begun in _FOLLOWING:
            yield from self._end()
            self._go_on(begun)
        elif any(word.startswith(begun) for word in _FOLLOWING):
            self._bound = begun
        else:  # it was no end, and what was held may be another bound
            self._write(_CLOSE + "".join(self._space))
            self._state, self._bound = "text", ""
            for again in begun:
                yield from self._take(again)

    def _match(self, character: str, words: tuple[str, ...]) -> str | None:
        """The bound that is complete with this character. All begin with "<", which is nowhere else in them."""
        begun = self._bound + character
        if not any(word.startswith(begun) for word in words):
            begun = character if character == "<" else ""
        self._bound = begun
        return begun if begun in words else None

    def _go_on(self, bound: str) -> None:
        self._state, self._bound = "outside", ""
        if bound == _OPEN:
            self._begin_name()

    def _write(self, text: str) -> None:
        for character in text:
            if self._line_end:
                self._out.append("\n")
            self._line_end = character == "\n"
            if not self._line_end:
                self._out.append(character)

    def _grown(self) -> Iterator[Step]:
        if self._out:
            yield Grows("".join(self._out))
            self._out.clear()

    def _end(self) -> Iterator[Step]:
        yield from self._grown()
        self._line_end = False
        yield Ends()


def find_parameters(body: str) -> Iterator[tuple[str, str]]:
    """Names and texts of a whole."""
    scanner, name, texts = ParameterScanner(), "", list[str]()
    for step in (*scanner.feed(body), *scanner.finish()):
        match step:
            case Begins():
                name, texts = step.name, []
            case Grows():
                texts.append(step.text)
            case Ends():
                yield name, "".join(texts)


def is_text(schema: Any) -> bool:
    """Whether a parameter is a string, whatever it looks like. One that no schema names is."""
    if not isinstance(schema, Mapping):
        return True
    return schema.get("type", ()) == "string" or _has_strings(schema.get("enum"))


def may_be_text(schema: Any) -> bool:
    """Whether a string would fit: then it is written bare."""
    if is_text(schema):
        return True
    kinds = schema.get("type")
    return "string" in kinds if isinstance(kinds, (list, tuple)) else kinds is None and "enum" not in schema


def typed_value(text: str, schema: Any) -> Any:
    """What a parameter written as bare text stands for: a string, unless its schema says otherwise and the text agrees."""
    if is_text(schema):
        return text
    kinds, word = schema.get("type", ()), text.strip()
    if word.lower() in ("true", "false", "null", "none"):
        word = {"none": "null"}.get(word.lower(), word.lower())
    try:
        value = read_value(word)
    except ValueError:
        return text
    strings = isinstance(kinds, (str, list, tuple)) and "string" in kinds
    return text if strings and not isinstance(value, (dict, list)) and value is not None else value


def _has_strings(enum: Any) -> bool:
    return isinstance(enum, list) and any(isinstance(item, str) for item in enum)
