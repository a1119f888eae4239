"""How well a model foretells a text: the loss of every token but the first, in windows of the engine's context."""

from __future__ import annotations

from array import array
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from math import exp, log
from typing import Any

import numpy as np
import numpy.typing as npt

from moeflux.core.errors import InputError
from moeflux.runtime.batch import Segment
from moeflux.runtime.engine import Engine
from moeflux.text.tokenizer import Tokenizer

F32 = npt.NDArray[np.float32]
Progress = Callable[[int, int], None]  # tokens done, of so many


@dataclass(frozen=True)
class Score:
    n_tokens: int  # that were foretold
    n_characters: int
    nats: float

    @property
    def nats_per_token(self) -> float:
        return self.nats / self.n_tokens

    @property
    def bits_per_character(self) -> float:
        return self.nats / log(2) / self.n_characters

    @property
    def perplexity(self) -> float:
        return exp(self.nats_per_token)

    def as_dict(self) -> dict[str, Any]:
        derived = ("nats_per_token", "bits_per_character", "perplexity")
        return {**asdict(self), **{name: getattr(self, name) for name in derived}}


def evaluate(
    engine: Engine, tokenizer: Tokenizer, text: str, max_tokens: int | None = None, progress: Progress | None = None
) -> Score:
    """Each window begins with the last token of the one before, so that every token but the first is foretold once."""
    ids, n_characters = _encode(tokenizer, text, max_tokens)
    if len(ids) < 2:
        raise InputError(f"a text of {len(ids)} tokens foretells nothing", hint="give a longer one")
    nats, window = 0.0, engine.plan.context
    for start in range(0, len(ids) - 1, window):
        nats += _window(engine, ids[start : start + window + 1])
        if progress:
            progress(min(start + window, len(ids) - 1), len(ids) - 1)
    return Score(len(ids) - 1, max(1, n_characters), nats)


def _encode(tokenizer: Tokenizer, text: str, max_tokens: int | None) -> tuple[array[int], int]:
    """Tokens in four bytes each, a piece of the text at a time; and the characters that all but the first stand for."""
    ids, n_characters = array("i"), 0
    most = len(text) + 1 if max_tokens is None else max_tokens + 1
    for piece in tokenizer.encode_pieces(text):
        piece = piece[: most - len(ids)]
        n_characters += len(tokenizer.decode(piece)) - (0 if ids else len(tokenizer.decode(piece[:1])))
        ids.extend(piece)
        if len(ids) == most:
            break
    return ids, n_characters


def _window(engine: Engine, ids: Sequence[int]) -> float:
    sequence, losses = engine.sequence(), list[float]()
    step = engine.plan.chunk_tokens
    for at in range(0, len(ids) - 1, step):
        chunk, targets = ids[at : min(at + step, len(ids) - 1)], ids[at + 1 : at + 1 + step]

        def take(first: int, logits: F32, targets: Sequence[int] = targets) -> None:
            losses.extend(_loss(row, target) for row, target in zip(logits, targets[first:], strict=False))

        engine.forward(Segment(sequence, chunk, "all", take=take))
    return sum(losses)


def _loss(logits: F32, target: int) -> float:
    """Of one token; row by row, because every step makes a copy."""
    peak = logits.max()
    return float(np.log(np.exp(logits - peak).sum(dtype=np.float64)) + peak - logits[target])
