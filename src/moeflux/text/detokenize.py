"""Text of a growing list of tokens, given out as soon as it is certain: never half a character, nothing lost."""

from __future__ import annotations

import codecs

from moeflux.text.tokenizer import Tokenizer

REPLACEMENT = "\ufffd"  # what an unfinished UTF-8 sequence decodes to
MOST_PENDING = 32  # tokens; no character has so many


class Detokenizer:
    """`add` and `finish` together give what the tokenizer makes of all ids at once."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._way: _Bytes | _Window = _Bytes(tokenizer) if tokenizer.is_byte_level else _Window(tokenizer)

    def add(self, token: int) -> str:
        """What became certain with this token."""
        return self._way.add(token)

    def finish(self) -> str:
        """What is left, unfinished characters included. Then it starts anew."""
        return self._way.finish()

    @property
    def whole(self) -> bool:
        """Whether no character is unfinished."""
        return self._way.whole


class _Bytes:
    """Where tokens are byte strings."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._piece = tokenizer.piece
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")

    def add(self, token: int) -> str:
        return self._decoder.decode(self._piece(token))

    def finish(self) -> str:
        text = self._decoder.decode(b"", final=True)
        self._decoder.reset()
        return text

    @property
    def whole(self) -> bool:
        return not self._decoder.getstate()[0]


class _Window:
    """Where what a token stands for can depend on the ones before it: decoded together since the last certain point."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._ids: list[int] = []
        self._given = 0  # tokens of them whose text was given out

    def add(self, token: int) -> str:
        self._ids.append(token)
        before, now = self._window()
        if len(self._ids) - self._given > MOST_PENDING:  # bytes that will never be a character
            return self.finish()
        if now.endswith(REPLACEMENT) or len(now) <= len(before):
            return ""
        self._ids = self._ids[self._given :]
        self._given = len(self._ids)
        return now[len(before) :]

    def finish(self) -> str:
        before, now = self._window()
        self._ids, self._given = [], 0
        return now[len(before) :]

    @property
    def whole(self) -> bool:
        return self._given == len(self._ids)

    def _window(self) -> tuple[str, str]:
        return self._tokenizer.decode(self._ids[: self._given]), self._tokenizer.decode(self._ids)
