"""What a person may ask of sampling, checked once and frozen."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, fields, replace
from reprlib import repr as shown
from typing import Any

from moeflux.core.errors import OptionError

MOST_LOGPROBS = 100
MOST_BIAS = 1000.0


@dataclass(frozen=True)
class SamplingParams:
    """By default greedy: the most likely token, the lowest id where several are.

    With a temperature: penalties and bias, then temperature, top_k, top_p, min_p, each among what the one before left.
    """

    temperature: float = 0.0
    top_k: int = 0  # 0: all
    top_p: float = 1.0
    min_p: float = 0.0  # share of the most likely token's probability that others need
    repetition_penalty: float = 1.0  # of tokens in the prompt or the answer: divides positive logits, multiplies others
    presence_penalty: float = 0.0  # subtracted from logits of tokens in the answer,
    frequency_penalty: float = 0.0  # and this for each time
    logit_bias: Mapping[int, float] = field(default_factory=dict)
    seed: int | None = None  # None: another one each time
    logprobs: int | None = None  # so many alternatives with their log-probabilities; 0: of the chosen token only

    def __post_init__(self) -> None:
        _check_number("temperature", self.temperature, 0, 100)
        _check_number("top_p", self.top_p, 0, 1, open_low=True)
        _check_number("min_p", self.min_p, 0, 1)
        _check_number("repetition_penalty", self.repetition_penalty, 0, 100, open_low=True)
        for name in ("presence_penalty", "frequency_penalty"):
            _check_number(name, getattr(self, name), -100, 100)
        _check_whole("top_k", self.top_k, 2**31)
        if self.seed is not None:
            _check_whole("seed", self.seed, 2**64 - 1)
        if self.logprobs is not None:
            _check_whole("logprobs", self.logprobs, MOST_LOGPROBS)
        if not isinstance(self.logit_bias, Mapping):
            raise OptionError(f"{shown(self.logit_bias)} is not a mapping of token ids", where="option 'logit_bias'")
        for token, bias in self.logit_bias.items():
            _check_whole("logit_bias", token, 2**31)
            _check_number("logit_bias", bias, -MOST_BIAS, MOST_BIAS)

    def changed(self, **changes: Any) -> SamplingParams:
        """With other values for some of them, named as a client names them."""
        known = [field.name for field in fields(self)]
        for name in changes:
            if name not in known:
                raise OptionError("there is no such way to sample", where=f"option {name!r}", hint=", ".join(known))
        return replace(self, **changes)

    @property
    def greedy(self) -> bool:
        return self.temperature == 0


def _check_number(name: str, value: Any, low: float, high: float, *, open_low: bool = False) -> None:
    good = isinstance(value, (int, float)) and not isinstance(value, bool) and low <= value <= high  # NaN is in no range
    if not good or (open_low and value == low):
        span = f"above {low}, at most {high}" if open_low else f"{low} to {high}"
        raise OptionError(f"{shown(value)} is not a value for it", where=f"option {name!r}", hint=span)


def _check_whole(name: str, value: Any, high: int) -> None:
    if isinstance(value, bool) or not isinstance(value, int) or not 0 <= value <= high:
        raise OptionError(f"{shown(value)} is not a whole number from 0 to {high}", where=f"option {name!r}")
