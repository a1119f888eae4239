"""Stop sequences in a stream of text: found wherever the text was cut, and never shown, not even in part."""

from __future__ import annotations

from collections.abc import Sequence

from moeflux.core.errors import InputError


def held_back(text: str, wanted: Sequence[str]) -> int:
    """How many characters at the end of `text` could be the beginning of a wanted string."""
    most = min(len(text), max((len(word) for word in wanted), default=1) - 1)
    return next((n for n in range(most, 0, -1) if any(word.startswith(text[-n:]) for word in wanted)), 0)


class Stops:
    """What ends first ends the text; of those that end together, the longest."""

    def __init__(self, stops: Sequence[str]) -> None:
        for stop in stops:
            if not isinstance(stop, str) or not stop.strip():
                raise InputError(f"{stop!r} cannot be a stop sequence", hint="it needs a character that is not white space")
        self._stops = tuple(stops)
        self._held = ""
        self.found: str | None = None

    def add(self, text: str) -> str:
        """What of the text so far can be shown. After a stop was found, nothing."""
        if self.found is not None or not self._stops:
            return text if not self._stops else ""
        text = self._held + text
        ends = [(start + len(stop), start, stop) for stop in self._stops if (start := text.find(stop)) >= 0]
        if ends:
            _, start, self.found = min(ends)
            self._held = ""
            return text[:start]
        n = held_back(text, self._stops)
        self._held = text[len(text) - n :]
        return text[: len(text) - n]

    def finish(self) -> str:
        """What was held back and turned out to be no stop sequence."""
        held, self._held = self._held, ""
        return held


def read_stops(value: object) -> tuple[str, ...]:
    """Stop sequences as callers give them: one string or several."""
    if isinstance(value, str):
        return (value,)
    if not isinstance(value, Sequence):
        raise InputError(f"{value!r} are no stop sequences", where="option 'stop'", hint="give a string or a list of them")
    return tuple(value)
