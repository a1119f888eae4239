"""A long text in pieces that are encoded one by one: encoding takes hundreds of bytes for each of a text.

A text is cut where the tokenizer itself parts it before it looks for tokens: so the pieces give the tokens of the whole.
"""

from __future__ import annotations

import unicodedata
from collections.abc import Callable, Iterator

PIECE = 32_768  # characters
WINDOW = 1024  # characters on each side of a place, by which the tokenizer says where it parts a text

Part = Callable[[str], list[int]]  # where the parts of a text begin


def cut(text: str, part: Part) -> Iterator[str]:
    """Pieces of about PIECE characters; longer where the tokenizer does not part the text."""
    start = 0
    while len(text) - start > 2 * PIECE:
        stop = _place(text, start + PIECE, part)
        yield text[start:stop]
        start = stop
    if start < len(text):
        yield text[start:]


def _place(text: str, at: int, part: Part) -> int:
    """The first good place from `at` on; the end where there is none."""
    while at + WINDOW < len(text):
        before = at - WINDOW
        edges = [before + begin for begin in part(text[before : at + WINDOW])]
        good = [edge for edge in edges if at - WINDOW // 2 <= edge < at + WINDOW // 2 and _stands_alone(text, edge)]
        if good:
            return next((edge for edge in good if text[edge - 1] == "\n"), good[0])
        at += WINDOW
    return len(text)


def _stands_alone(text: str, at: int) -> bool:
    """Whether what is before and behind are never one character."""
    return not unicodedata.combining(text[at]) and unicodedata.is_normalized("NFC", text[at - 1 : at + 1])
