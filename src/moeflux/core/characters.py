"""Text that is Unicode: a Python string can hold halves of surrogate pairs, which no tokenizer and no file takes."""

from __future__ import annotations

from moeflux.core.errors import InputError


def check_characters(text: str, where: str | None = None) -> str:
    """The same text. What came as bytes that are no UTF-8, or as broken JSON escapes, is refused."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        code = ord(text[error.start])
        what = f"character {error.start} is half of a pair (U+{code:04X}) and stands for nothing"
        raise InputError(what, where=where, hint="send valid UTF-8; in JSON, both halves of a \\u pair") from None
    return text


def is_unicode(text: str) -> bool:
    try:
        check_characters(text)
    except InputError:
        return False
    return True
