"""The checkpoint's own tokenizer (`tokenizer.json`), and decoding that never shows half a character."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from tokenizers import Tokenizer as _Tokenizer

from moeflux.core.errors import FormatError, MissingTensorError

REPLACEMENT = "\ufffd"  # what an unfinished UTF-8 sequence decodes to


class Tokenizer:
    def __init__(self, tokenizer: _Tokenizer) -> None:
        self._tokenizer = tokenizer

    @classmethod
    def open(cls, folder: Path) -> Tokenizer:
        path = folder / "tokenizer.json"
        if not path.exists():
            raise MissingTensorError(
                "there is no tokenizer.json", where=str(folder), hint="pass token ids instead of text, or add the file"
            )
        try:
            return cls(_Tokenizer.from_file(str(path)))
        except Exception as error:  # the library raises bare Exception
            raise FormatError(f"not a tokenizer: {error}", where=str(path)) from error

    def encode(self, text: str) -> list[int]:
        return list(self._tokenizer.encode(text).ids)

    def decode(self, ids: Sequence[int]) -> str:
        return str(self._tokenizer.decode(list(ids), skip_special_tokens=False))


class Detokenizer:
    """Text of a growing list of tokens, given out as soon as it is certain.

    A token is decoded together with the ones before it since the last certain point, because what it stands for can
    depend on them; text that ends in the middle of a character waits.
    """

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._ids: list[int] = []
        self._from = 0  # where the window starts
        self._given = 0  # tokens of it whose text was given out

    def add(self, token: int) -> str:
        self._ids.append(token)
        before, now = self._window()
        if now.endswith(REPLACEMENT) or len(now) <= len(before):
            return ""
        self._from, self._given = self._given, len(self._ids)
        return now[len(before) :]

    def finish(self) -> str:
        """What is left, unfinished characters included."""
        before, now = self._window()
        self._from = self._given = len(self._ids)
        return now[len(before) :]

    def _window(self) -> tuple[str, str]:
        decode = self._tokenizer.decode
        return decode(self._ids[self._from : self._given]), decode(self._ids[self._from :])
