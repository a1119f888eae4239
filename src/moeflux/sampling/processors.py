"""Changes to logits before a token is chosen: bias and penalties. They touch a few entries, so they cost little."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from moeflux.core.errors import OptionError
from moeflux.sampling.params import SamplingParams

F32 = npt.NDArray[np.float32]


class Processors:
    """Remembers what was said. Tokens of the prompt count for the repetition penalty only."""

    def __init__(self, params: SamplingParams, vocab: int, prompt: Sequence[int]) -> None:
        self._params = params
        self._bias_ids = np.fromiter(params.logit_bias.keys(), dtype=np.int64)
        self._bias = np.fromiter(params.logit_bias.values(), dtype=np.float32)
        if len(self._bias_ids) and self._bias_ids.max() >= vocab:
            raise OptionError(f"token {self._bias_ids.max()} of {vocab}", where="option 'logit_bias'")
        self._repeats = params.repetition_penalty != 1.0
        self._counts = params.presence_penalty != 0.0 or params.frequency_penalty != 0.0
        self._seen = _Tally(vocab) if self._repeats else None
        self._said = _Tally(vocab) if self._counts else None
        if self._seen:
            self._seen.add(prompt)

    def note(self, tokens: Sequence[int]) -> None:
        """These are part of the answer now."""
        for tally in (self._seen, self._said):
            if tally:
                tally.add(tokens)

    def apply(self, logits: F32) -> F32:
        """Changed logits, or the same array where there is nothing to change."""
        if not (len(self._bias) or self._repeats or self._counts):
            return logits
        logits = logits.copy()
        if self._seen:
            ids, penalty = self._seen.ids, np.float32(self._params.repetition_penalty)
            values = logits[ids]
            logits[ids] = np.where(values > 0, values / penalty, values * penalty)
        if self._said:
            ids = self._said.ids
            often = self._said.counts[ids] * np.float32(self._params.frequency_penalty)
            logits[ids] -= often + np.float32(self._params.presence_penalty)
        logits[self._bias_ids] += self._bias
        return logits


class _Tally:
    """Which tokens occurred, and how often."""

    def __init__(self, vocab: int) -> None:
        self.counts = np.zeros(vocab, dtype=np.float32)
        self._order = np.empty(1024, dtype=np.int64)
        self._n = 0

    @property
    def ids(self) -> npt.NDArray[np.int64]:
        return self._order[: self._n]

    def add(self, tokens: Sequence[int]) -> None:
        for token in tokens:
            if token >= len(self.counts):
                continue
            if self.counts[token] == 0:
                if self._n == len(self._order):
                    self._order = np.concatenate([self._order, np.empty_like(self._order)])
                self._order[self._n] = token
                self._n += 1
            self.counts[token] += 1
