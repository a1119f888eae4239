"""The sampler of one generation: processors, an allowed set, a draw, and what it all looked like in log-probabilities."""

from __future__ import annotations

import secrets
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from moeflux.sampling.choose import F32, Allowed, Ids, choose, largest, log_total
from moeflux.sampling.params import SamplingParams
from moeflux.sampling.processors import Processors


@dataclass(frozen=True)
class Choice:
    token: int
    logprob: float | None = None  # natural, of the model's own distribution: before penalties, temperature and constraint
    top: tuple[tuple[int, float], ...] = ()  # the most likely tokens with theirs


class Sampler:
    """The same seed, logits and allowed sets give the same tokens."""

    def __init__(self, params: SamplingParams, vocab: int, prompt: Sequence[int] = ()) -> None:
        """`vocab`: ids from there on stand for nothing and are never chosen."""
        self.params = params
        self.seed = secrets.randbits(32) if params.seed is None else params.seed
        self._vocab = vocab
        self._random = np.random.default_rng(self.seed)
        self._processors = Processors(params, vocab, prompt)

    def sample(self, logits: F32, allowed: Allowed | None = None) -> Choice:
        """Chooses and remembers."""
        logits = logits[: self._vocab]
        changed = self._processors.apply(logits)
        draw = 0.0 if self.params.greedy else float(self._random.random())
        n = self.params.logprobs
        top = largest(logits, min(n, len(logits))) if n else None
        known = top if changed is logits else None
        token = choose(changed, self.params, draw, None if allowed is None else allowed[: self._vocab], known)
        self.note([token])
        return Choice(token) if n is None else describe(logits, token, n, top)

    def note(self, tokens: Sequence[int]) -> None:
        """Tokens that came without a choice."""
        self._processors.note(tokens)


def describe(logits: F32, token: int, n: int, top: Ids | None = None) -> Choice:
    """A token and the `n` most likely ones with their log-probabilities. `top`: where those are, if that is known."""
    if n and top is None:
        top = largest(logits, min(n, len(logits)))
    total = log_total(logits)
    ids = () if top is None else top.tolist()
    ranked = sorted(((id, float(logits[id]) - total) for id in ids), key=lambda pair: (-pair[1], pair[0]))
    return Choice(token, float(logits[token]) - total, tuple(ranked))
