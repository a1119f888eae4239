"""The checkpoint's own tokenizer: `tokenizer.json`, and what `tokenizer_config.json` says about special tokens.

Three ways in: `encode` (a document, with the tokens that the checkpoint puts around one), `encode_rendered` (a rendered chat
template, which brings its own), `encode_plain` (text in which no added token is recognised, whatever it spells).
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer as _Tokenizer
from tokenizers import decoders

from moeflux.core.allocator import release_freed
from moeflux.core.characters import check_characters
from moeflux.core.errors import FormatError, MissingTensorError
from moeflux.core.json_file import read_json
from moeflux.text.pieces import PIECE, cut


class Tokenizer:
    def __init__(self, tokenizer: _Tokenizer, config: Mapping[str, Any] | None = None) -> None:
        """`config`: the contents of tokenizer_config.json."""
        self._tokenizer = tokenizer
        self._n_bytes: dict[int, int] = {}
        self.config: Mapping[str, Any] = config or {}

    @classmethod
    def open(cls, folder: Path) -> Tokenizer:
        path, config = folder / "tokenizer.json", folder / "tokenizer_config.json"
        if not path.exists():
            raise MissingTensorError(
                "there is no tokenizer.json", where=str(folder), hint="pass token ids instead of text, or add the file"
            )
        try:
            tokenizer = _Tokenizer.from_file(str(path))
        except Exception as error:  # the library raises bare Exception
            raise FormatError(f"not a tokenizer: {error}", where=str(path)) from error
        tokenizer.no_padding()
        tokenizer.no_truncation()
        release_freed()  # opening takes twice what is kept
        return cls(tokenizer, read_json(config) if config.exists() else None)

    def encode(self, text: str) -> list[int]:
        """A document."""
        return [id for piece in self.encode_pieces(text) for id in piece]

    def encode_pieces(self, text: str) -> Iterator[list[int]]:
        """The tokens of `encode`, a piece of the text at a time: encoding takes hundreds of bytes for each of a text."""
        check_characters(text, "text")
        if len(text) <= 2 * PIECE or not self._can_be_cut:
            yield self._with_bos(list(self._tokenizer.encode(text).ids))
            return
        for i, piece in enumerate(cut(text, self._parts)):
            ids = list(self._tokenizer.encode(piece, add_special_tokens=False).ids)
            yield ids if i else self._with_bos(ids)

    def _cut(self, text: str) -> Iterator[str]:
        """A text that nothing is put around."""
        return cut(text, self._parts) if len(text) > 2 * PIECE and self._can_be_cut else iter((text,))

    @cached_property
    def _can_be_cut(self) -> bool:
        """Whether a document is nothing but its parts: no tokens around it, but for one that begins it."""
        return self.is_byte_level and self._tokenizer.pre_tokenizer is not None and not self._tokenizer.encode("").ids

    def _parts(self, text: str) -> list[int]:
        """Where the parts of a text begin, but for those in and beside an added token, which may take spaces along."""
        added = [match.span() for match in self._any_added.finditer(text)] if self.added else []
        begins = [begin for _, (begin, _) in self._tokenizer.pre_tokenizer.pre_tokenize_str(text)]
        return [at for at in begins if not any(start - 1 <= at <= stop + 1 for start, stop in added)]

    @cached_property
    def _any_added(self) -> re.Pattern[str]:
        longest_first = sorted(self.added, key=len, reverse=True)
        return re.compile("|".join(re.escape(content) for content in longest_first))

    def _with_bos(self, ids: list[int]) -> list[int]:
        bos = self.named_id("bos_token") if self.config.get("add_bos_token") is True else None
        return [bos, *ids] if bos is not None and ids[:1] != [bos] else ids

    def encode_rendered(self, text: str) -> list[int]:
        pieces = self._cut(check_characters(text, "text"))
        return [id for piece in pieces for id in self._tokenizer.encode(piece, add_special_tokens=False).ids]

    def encode_plain(self, text: str) -> list[int]:
        return [id for piece in self._cut(check_characters(text, "text")) for id in self._encode_plain(piece)]

    def _encode_plain(self, text: str) -> list[int]:
        inner = self._tokenizer
        normal = inner.normalizer.normalize_str(text) if inner.normalizer else text
        pieces = inner.pre_tokenizer.pre_tokenize_str(normal) if inner.pre_tokenizer else [(normal, None)]
        return [token.id for piece, _ in pieces for token in inner.model.tokenize(piece)]

    def decode(self, ids: Sequence[int]) -> str:
        return str(self._tokenizer.decode(list(ids), skip_special_tokens=False))

    def to_json(self) -> str:
        """All of it as tokenizer.json text."""
        return str(self._tokenizer.to_str())

    @cached_property
    def n_ids(self) -> int:
        """One more than the highest id that stands for something. A model's vocabulary is often padded beyond it."""
        size = self._tokenizer.get_vocab_size()
        found = id = 0
        while found < size and id <= 2 * size:  # asked one by one: the table of all takes as much as the tokenizer
            found += self._tokenizer.id_to_token(id) is not None
            id += 1
        return id if found == size else max(self._tokenizer.get_vocab().values(), default=-1) + 1

    @cached_property
    def added(self) -> Mapping[str, int]:
        """Tokens that stand outside of the model's merges, special or not: what they look like, and their ids."""
        return {token.content: id for id, token in self._tokenizer.get_added_tokens_decoder().items()}

    @cached_property
    def special(self) -> frozenset[int]:
        """Ids that are structure and never text."""
        return frozenset(id for id, token in self._tokenizer.get_added_tokens_decoder().items() if token.special)

    def id_of(self, content: str) -> int | None:
        found = self._tokenizer.token_to_id(content)
        return None if found is None else int(found)

    def name_of(self, name: str) -> str | None:
        """What `tokenizer_config.json` calls bos_token, eos_token and so on."""
        value = self.config.get(name)
        value = value.get("content") if isinstance(value, Mapping) else value
        return value if isinstance(value, str) else None

    def named_id(self, name: str) -> int | None:
        content = self.name_of(name)
        return None if content is None else self.id_of(content)

    @cached_property
    def is_byte_level(self) -> bool:
        """Whether every token is a string of bytes, whatever stands around it."""
        return isinstance(self._tokenizer.decoder, decoders.ByteLevel)

    def n_bytes(self, id: int) -> int:
        """That a token stands for; remembered, because prompts ask for many."""
        if (n := self._n_bytes.get(id)) is None:
            n = self._n_bytes[id] = len(self.piece(id))
        return n

    def piece(self, id: int) -> bytes:
        """The bytes that a token stands for; where tokens are not byte strings, those of its text on its own."""
        token = self._tokenizer.id_to_token(id)
        if token is None:
            return b""
        if not self.is_byte_level:
            return self.decode([id]).encode()
        try:
            return bytes(_BYTES[character] for character in token)
        except KeyError:  # an added token is spelled as it looks
            return str(token).encode()


def _byte_alphabet() -> dict[str, int]:
    """How byte-level tokenizers write bytes: printable ones as themselves, the others as characters from 256 on."""
    printable = [*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)]
    table = {chr(byte): byte for byte in printable}
    others = (byte for byte in range(256) if byte not in printable)
    table.update({chr(256 + i): byte for i, byte in enumerate(others)})
    return table


_BYTES = _byte_alphabet()
