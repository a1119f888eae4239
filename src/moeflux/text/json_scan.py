"""Where a JSON value ends in a stream of text, found without understanding more of it than that."""

from __future__ import annotations


class JsonScanner:
    """Of one value."""

    def __init__(self) -> None:
        self._depth = 0
        self._in_string = self._escaped = self._begun = False
        self.done = False

    def take(self, text: str) -> int:
        """How many characters of the text still belong to the value."""
        for i, character in enumerate(text):
            if self.done or self._ends_before(character):
                self.done = True
                return i
            self._step(character)
        return len(text)

    def _ends_before(self, character: str) -> bool:
        """A number or a word ends where something else begins."""
        return self._begun and not self._in_string and self._depth == 0 and character in ",}] \t\r\n"

    def _step(self, character: str) -> None:
        self._begun = self._begun or not character.isspace()
        if self._in_string:
            closes = character == '"' and not self._escaped
            self._escaped = character == "\\" and not self._escaped
            self._in_string = not closes
            self.done = closes and self._depth == 0
        elif character == '"':
            self._in_string = True
        elif character in "{[":
            self._depth += 1
        elif character in "}]":
            self._depth -= 1
            self.done = self._depth <= 0
