"""Places in a rendered conversation: signs are put into the texts, rendered with them, and then looked for.

Templates trim and move what they are given, so only a rendering says where something came to stand. The signs are code
points that are no characters. Where they change what a template does, nothing is found: places make prompts faster, never
other.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

MOST_PLACES = 28
END = "\ufdef"  # where an answer goes on
_FIRST = 0xFDD2
_ANY = re.compile("[\ufdd0-\ufdef]")
_SIGN = re.compile("[\ufdd2-\ufdee]")


@dataclass(frozen=True)
class Place:
    """`offset`: in the rendered text. `keep_s`: how long its caller wants its state kept at least; None: nobody asked."""

    offset: int
    keep_s: float | None


class Pen:
    """Writes signs, as many as there are, and finds them again."""

    def __init__(self) -> None:
        self._signs: dict[str, float | None] = {}

    def sign(self, keep_s: float | None) -> str:
        if len(self._signs) == MOST_PLACES:
            return ""
        sign = chr(_FIRST + len(self._signs))
        self._signs[sign] = keep_s
        return sign

    def at_end(self, text: str, keep_s: float | None) -> str:
        """Before the white space at the end: a template may trim it. A text of nothing else has no end."""
        body = text.rstrip()
        return body + self.sign(keep_s) + text[len(body) :] if body else text

    def at_start(self, text: str, keep_s: float | None) -> str:
        body = text.lstrip()
        return text[: len(text) - len(body)] + self.sign(keep_s) + body if body else text

    def find(self, signed: str, plain: str) -> list[Place]:
        """The places in the plain rendering, none where the signed one differs by more than its signs."""
        places, pieces, at, n = [], [], 0, 0
        for found in _SIGN.finditer(signed):
            pieces.append(signed[at : found.start()])
            n += found.start() - at
            at = found.end()
            if found[0] in self._signs:
                places.append(Place(n, self._signs[found[0]]))
        return places if "".join(pieces) + signed[at:] == plain else []


def without_signs(text: str) -> str:
    """What people write has none."""
    return _ANY.sub("", text) if _ANY.search(text) else text
