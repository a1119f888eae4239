"""The tokens of a prompt, each with the log-probability that the model gave it."""

from __future__ import annotations

from collections.abc import Sequence

from moeflux.sampling.choose import F32
from moeflux.sampling.sampler import describe
from moeflux.session.events import Scored, Token


class PromptScores:
    """Handed logits by position, in any order, and again where a step was run again."""

    def __init__(self, ids: Sequence[int], n_top: int, n_ids: int) -> None:
        """`n_top`: alternatives with each. `n_ids`: from there on ids stand for nothing."""
        self._ids, self._n_top, self._n_ids = tuple(ids), n_top, n_ids
        self._tokens: dict[int, Token] = {0: Token(self._ids[0])}

    def take(self, first: int, rows: F32) -> None:
        """The logits after the tokens from `first` on."""
        for at, row in enumerate(rows, first + 1):
            choice = describe(row[: self._n_ids], self._ids[at], self._n_top)
            self._tokens[at] = Token(choice.token, (), choice.logprob, choice.top)

    @property
    def scored(self) -> Scored:
        return Scored(tuple(self._tokens[at] for at in range(len(self._ids))))
