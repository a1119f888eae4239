"""How tool calls begin, read character by character: each is looked at once, however the text was cut.

A head is a generator. It is sent characters and returns what it found, or None where this is no head. The character with
which it returns is the first one behind the head.
"""

from __future__ import annotations

from collections.abc import Callable, Generator
from dataclasses import dataclass
from typing import Literal

from moeflux.core.characters import is_unicode
from moeflux.text.json_value import read_value


@dataclass(frozen=True)
class Head:
    name: str
    body: Literal["json", "xml"] = "json"


Reading = Generator[None, str, Head | None]
_Step = Generator[None, str, str]  # returns the character behind what it took


class HeadScanner:
    """Feeds a head. `done`: it was found, as `head`, or never will be."""

    def __init__(self, head: Callable[[], Reading]) -> None:
        self._reading = head()
        next(self._reading)
        self.head: Head | None = None
        self.done = False

    def take(self, text: str) -> int:
        """How many characters of the text still belong to the head."""
        for i, character in enumerate(text):
            try:
                self._reading.send(character)
            except StopIteration as end:
                self.head, self.done = end.value, True
                return i
        return len(text)


def read_fenced() -> Reading:
    """DeepSeek-V3: a name on a line, then JSON in a code fence."""
    name, character = [], (yield from _skip_space((yield)))
    while character != "\n":
        name.append(character)
        character = yield
    character = yield from _skip_space(character)
    for wanted in "```":
        if character != wanted:
            return None
        character = yield
    if character == "j" and (character := (yield from _take("json", character))) == "":
        return None
    character = yield from _skip_space(character)
    return _named("".join(name)) if character in "{[" else None


def read_tagged() -> Reading:
    """Qwen: `{"name": …, "arguments": {`, or `<function=…>` with the last character left to skip."""
    character = yield from _skip_space((yield))
    return (yield from _json_head(character)) if character == "{" else (yield from _xml_head(character))


def _json_head(character: str) -> Reading:
    name = ""
    for wanted in ("{", '"name"', ":", "", ",", '"arguments"', ":"):
        character = yield from _skip_space(character)
        if wanted:
            others = ('"parameters"',) if wanted == '"arguments"' else ()
            character = yield from _take(wanted, character, *others)
        else:
            name, character = yield from _string(character)
        if not character:
            return None
    character = yield from _skip_space(character)
    return _named(name) if character == "{" else None


def _xml_head(character: str) -> Reading:
    character = yield from _take("<function=", character)
    name = []
    while character not in ("", ">", "\n"):
        name.append(character)
        character = yield
    return _named("".join(name), "xml") if character == ">" else None


def _skip_space(character: str) -> _Step:
    while character.isspace():
        character = yield
    return character


def _take(word: str, character: str, *others: str) -> _Step:
    """One of these words, which begin alike and of which none begins another. Returns "" where something else stands."""
    words: tuple[str, ...] = (word, *others)
    at = 0
    while words := tuple(word for word in words if word[at] == character):
        at += 1
        character = yield
        if any(len(word) == at for word in words):
            return character
    return ""


def _string(character: str) -> Generator[None, str, tuple[str, str]]:
    """A JSON string's value, and the character behind it: "" where it is none."""
    written, escaped = [character], False
    if character != '"':
        return "", ""
    while True:
        character = yield
        written.append(character)
        if character == '"' and not escaped:
            break
        escaped = character == "\\" and not escaped
    try:
        value = read_value("".join(written).replace("\n", "\\n").replace("\t", "\\t"))
    except ValueError:
        return "", ""
    return str(value), (yield)


def _named(name: str, body: Literal["json", "xml"] = "json") -> Head | None:
    name = name.strip()
    return Head(name, body) if name and is_unicode(name) else None
