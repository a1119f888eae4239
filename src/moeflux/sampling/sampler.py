"""The sampler of one generation: processors, an allowed set, a draw, and what it all looked like in log-probabilities."""

from __future__ import annotations

import secrets
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from moeflux.sampling.choose import F32, choose, largest
from moeflux.sampling.params import SamplingParams
from moeflux.sampling.processors import Processors

Allowed = npt.NDArray[np.bool_]  # [vocabulary], at least one of them true
FEW = 4096  # allowed tokens that are worth picking out


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
        token = choose(changed, self.params, draw) if allowed is None else self._choose_allowed(changed, allowed, draw)
        self.note([token])
        return self._described(logits, token)

    def _choose_allowed(self, logits: F32, allowed: Allowed, draw: float) -> int:
        allowed = allowed[: self._vocab]
        if self.params.greedy and allowed[best := int(np.argmax(logits))]:
            return best
        if k := self.params.top_k:
            ids = largest(logits, min(4 * k + 64, len(logits)))  # most of them are allowed, most of the time
            ids = ids[allowed[ids]]
            if len(ids) >= k:
                return int(ids[choose(logits[ids], self.params, draw)])
        if np.count_nonzero(allowed) > FEW:
            return choose(np.where(allowed, logits, np.float32(-np.inf)), self.params, draw)
        ids = np.flatnonzero(allowed)
        return int(ids[choose(logits[ids], self.params, draw)])

    def note(self, tokens: Sequence[int]) -> None:
        """Tokens that came without a choice."""
        self._processors.note(tokens)

    def _described(self, logits: F32, token: int) -> Choice:
        n = self.params.logprobs
        if n is None:
            return Choice(token)
        peak = logits.max()
        total = float(peak) + float(np.log(np.exp(logits - peak).sum()))
        top = largest(logits, min(n, len(logits))) if n else np.empty(0, dtype=np.int64)
        ranked = sorted(((int(id), float(logits[id]) - total) for id in top), key=lambda pair: (-pair[1], pair[0]))
        return Choice(token, float(logits[token]) - total, tuple(ranked))
