"""How well a model foretells a text: the loss of every token but the first, in windows of the engine's context."""

from __future__ import annotations

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

LOGITS = 2**24  # values that are computed at a time: they are as many as the vocabulary for each token

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
    ids = tokenizer.encode(text)[: None if max_tokens is None else max_tokens + 1]
    if len(ids) < 2:
        raise InputError(f"a text of {len(ids)} tokens foretells nothing", hint="give a longer one")
    nats, window = 0.0, engine.plan.context
    for start in range(0, len(ids) - 1, window):
        nats += _window(engine, ids[start : start + window + 1])
        if progress:
            progress(min(start + window, len(ids) - 1), len(ids) - 1)
    n_characters = len(tokenizer.decode(ids)) - len(tokenizer.decode(ids[:1]))
    return Score(len(ids) - 1, max(1, n_characters), nats)


def _window(engine: Engine, ids: Sequence[int]) -> float:
    sequence, nats = engine.sequence(), 0.0
    step = max(1, min(engine.plan.chunk_tokens, LOGITS // engine.spec.vocab))
    for at in range(0, len(ids) - 1, step):
        chunk = ids[at : min(at + step, len(ids) - 1)]
        (logits,) = engine.forward(Segment(sequence, chunk, "all"))
        assert logits is not None
        nats += _loss(logits, ids[at + 1 : at + 1 + len(chunk)])
    return nats


def _loss(logits: npt.NDArray[np.float32], targets: Sequence[int]) -> float:
    peaks = logits.max(axis=1, keepdims=True)
    totals = np.log(np.exp(logits - peaks).sum(axis=1, dtype=np.float64)) + peaks[:, 0]
    return float((totals - logits[np.arange(len(targets)), list(targets)]).sum())
