"""Stop sequences in a stream of text: found wherever the text was cut, and never shown, not even in part."""

from __future__ import annotations

from collections.abc import Sequence
from reprlib import repr as shown

from moeflux.core.characters import check_characters
from moeflux.core.errors import InputError

MOST_STOPS = 64
MOST_CHARACTERS = 4096  # of one


def read_stops(value: object) -> tuple[str, ...]:
    """As clients send them: one text, several, or none. White space such as a line's end is a stop like any other."""
    stops = (value,) if isinstance(value, str) else () if value is None else value
    if not isinstance(stops, (list, tuple)):
        raise InputError(f"{shown(value)} is no list of texts", where="option 'stop'")
    if len(stops) > MOST_STOPS:
        raise InputError(f"{len(stops)} stop sequences, the limit is {MOST_STOPS}", where="option 'stop'")
    for stop in stops:
        if not isinstance(stop, str) or not 0 < len(stop) <= MOST_CHARACTERS:
            hint = f"it is a text of 1 to {MOST_CHARACTERS} characters"
            raise InputError(f"{shown(stop)} cannot be a stop sequence", where="option 'stop'", hint=hint)
        check_characters(stop, "option 'stop'")
    return tuple(dict.fromkeys(stops))


class Stops:
    """What ends first ends the text; of those that end together, the longest. Each character is looked at once."""

    def __init__(self, stops: str | Sequence[str] | None = ()) -> None:
        self._words = [_Word(stop) for stop in read_stops(stops)]
        self._held = ""
        self.found: str | None = None

    def add(self, text: str) -> str:
        """What of the text so far can be shown. After a stop was found, nothing."""
        if self.found is not None or not self._words:
            return text if not self._words else ""
        if not self._held and not any(word.text[0] in text for word in self._words):
            return text
        for i, character in enumerate(text):
            ended = [word.text for word in self._words if word.take(character)]
            if ended:
                self.found = max(ended, key=len)
                text, self._held = self._held + text[: i + 1], ""
                return text[: len(text) - len(self.found)]
        text, n = self._held + text, max(word.matched for word in self._words)
        self._held = text[len(text) - n :]
        return text[: len(text) - n]

    def finish(self) -> str:
        """What was held back and turned out to be no stop sequence. What comes now is another text."""
        held, self._held = self._held, ""
        for word in self._words:
            word.matched = 0
        return held


class _Word:
    """How much of one stop sequence the text ends with."""

    def __init__(self, text: str) -> None:
        self.text = text
        self.matched = 0
        self._shorter = [0]  # how much is matched still where, after so many characters, the next one differs
        for character in text[1:]:
            n = self._next(self._shorter[-1], character)
            self._shorter.append(n)

    def take(self, character: str) -> bool:
        """Whether this character ends it."""
        n = self.matched
        if n == len(self.text):
            n = self._shorter[n - 1]
        self.matched = self._next(n, character)
        return self.matched == len(self.text)

    def _next(self, n: int, character: str) -> int:
        while n and self.text[n] != character:
            n = self._shorter[n - 1]
        return n + (self.text[n] == character)
