"""Token streams for measuring, and how local the routing was that came of them: measured, never assumed.

`uniform` draws any token alike, so every expert is as likely as any other: the worst case for a cache. `local` stays with a
topic of the synthetic checkpoint (bench/synthetic.py) for `1 / (1 - STAY)` tokens in the mean, then jumps to any other. It
models a text whose tokens share some of their experts with the token before. To other checkpoints topics mean nothing.
"""

from __future__ import annotations

from typing import Any, Literal, get_args

import numpy as np
import numpy.typing as npt

from moeflux.bench.synthetic import TOPIC_TOKENS
from moeflux.core.errors import OptionError

Routing = Literal["uniform", "local"]
STAY = 0.95
SEED = 0


class TokenStream:
    """The same kind, vocabulary and seed give the same tokens."""

    def __init__(self, kind: str, vocab: int, seed: int = SEED, topics: int | None = None) -> None:
        """`topics`: a seed of their own; streams that have it in common go through the same topics in step."""
        if kind not in get_args(Routing):
            hint = f"one of: {', '.join(get_args(Routing))}"
            raise OptionError(f"unknown routing {kind!r}", where="option 'routing'", hint=hint)
        self.kind = kind
        self._vocab = vocab
        self._random = np.random.default_rng(seed)
        self._topics = self._random if topics is None else np.random.default_rng(topics)
        self._topic: int | None = None

    def take(self, n: int) -> list[int]:
        if self.kind == "uniform":
            return [int(token) for token in self._random.integers(0, self._vocab, n)]
        return [self._local() for _ in range(n)]

    def _local(self) -> int:
        if self._topic is None or self._topics.random() > STAY:
            self._topic = int(self._topics.integers(0, self._vocab)) // TOPIC_TOKENS * TOPIC_TOKENS
        return int(self._random.integers(self._topic, min(self._topic + TOPIC_TOKENS, self._vocab)))


def overlap(earlier: npt.NDArray[Any], later: npt.NDArray[Any]) -> float:
    """Of two tokens' experts, [L, K] each: the share of the later one's that the earlier one had in the same layer."""
    return float((later[:, :, None] == earlier[:, None, :]).any(axis=2).mean())
