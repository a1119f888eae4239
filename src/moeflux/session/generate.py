"""Text from a prompt, token by token. Greedy: the most likely token, the lowest id where several are."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from moeflux.core.errors import InputError
from moeflux.core.json_file import read_json
from moeflux.models.fields import Fields
from moeflux.runtime.batch import Segment, check_tokens
from moeflux.runtime.engine import Engine
from moeflux.text.detokenize import Detokenizer
from moeflux.text.tokenizer import Tokenizer


@dataclass(frozen=True)
class Token:
    """One generated token and the text that became certain with it (none within a character)."""

    id: int
    text: str


def generate(engine: Engine, prompt: str | Sequence[int], max_tokens: int) -> Iterator[Token]:
    """Ends after `max_tokens` or at an end-of-text token, which is not given out. Arguments are checked at once."""
    if isinstance(max_tokens, bool) or not isinstance(max_tokens, int) or max_tokens < 1:
        raise InputError(f"max_tokens is {max_tokens!r}, not a positive whole number")
    folder = engine.config.model
    has_text = isinstance(prompt, str) or (folder / "tokenizer.json").exists()
    tokenizer = Tokenizer.open(folder) if has_text else None
    if isinstance(prompt, str):
        assert tokenizer is not None
        ids = tokenizer.encode(prompt)
    else:
        ids = list(prompt)
    check_tokens(ids, engine.spec.vocab)
    return _generate(engine, ids, max_tokens, tokenizer, end_tokens(engine))


def end_tokens(engine: Engine) -> frozenset[int]:
    """Every id that ends a text: config.json's and generation_config.json's."""
    path = engine.config.model / "generation_config.json"
    more = Fields(read_json(path)).ints("eos_token_id", high=engine.spec.vocab) if path.exists() else ()
    return frozenset((*engine.spec.eos, *more))


def _generate(
    engine: Engine, ids: list[int], max_tokens: int, tokenizer: Tokenizer | None, ends: frozenset[int]
) -> Iterator[Token]:
    sequence = engine.sequence()
    detokenizer = Detokenizer(tokenizer) if tokenizer else None
    chunk = engine.plan.chunk_tokens
    for start in range(0, len(ids) - chunk, chunk):
        engine.forward(Segment(sequence, ids[start : start + chunk], "none"))
    pending: list[int] = ids[len(sequence) :]
    for step in range(max_tokens):
        (logits,) = engine.forward(Segment(sequence, pending))
        assert logits is not None
        token = int(np.argmax(logits[0]))
        if token in ends:
            break
        text = detokenizer.add(token) if detokenizer else ""
        if detokenizer and step == max_tokens - 1:
            text += detokenizer.finish()
        yield Token(token, text)
        pending = [token]
