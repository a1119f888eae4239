"""Whose turn it is: sequences that decode, or prompts. Time is shared, not tokens.

A prompt alone runs in the largest chunks. Beside others it runs in turns of a few seconds, long enough for its experts to be
read once for many tokens, and short enough that nobody waits long. After a turn, those that decode get as much time.
"""

from __future__ import annotations

from moeflux.runtime.batch import Kind

FIRST_TURN = 512  # tokens of prompts in a turn beside others, until it is known what they take
LEAST_TURN = 256
TURN_SECONDS = 8.0  # that a turn should take at most
DECODE_SHARE = 0.5  # of the time, where both wait
PATIENCE = 5.0  # seconds of a step that are given up for a newcomer while nobody knows what a step takes
LEAST_WAIT = 0.5  # seconds that a newcomer can always wait


class Turns:
    def __init__(self, chunk: int, turn_seconds: float = TURN_SECONDS) -> None:
        """`chunk`: tokens that one forward has scratch memory for."""
        self._chunk, self._seconds = chunk, turn_seconds
        self._turn = min(FIRST_TURN, chunk)
        self._owed = 0.0  # seconds that those who decode have coming
        self._rate: float | None = None  # tokens of prompts per second
        self._together = False

    def next(self, decoding: bool, prompts: bool, *, alone: bool) -> tuple[Kind, int]:
        """Who runs now, and how many tokens at most."""
        self._together = decoding and prompts
        if not self._together:
            self._owed = 0.0
        if decoding and (not prompts or self._owed > 0):
            return "decode", self._chunk
        return "prompt", self._chunk if alone else self._turn

    def ran(self, kind: Kind, n_tokens: int, seconds: float) -> None:
        """A step is over."""
        if kind == "decode":
            self._owed -= seconds
            return
        if self._together:
            self._owed = seconds * DECODE_SHARE / (1 - DECODE_SHARE)
        if n_tokens >= min(LEAST_TURN, self._chunk):
            self._rate = n_tokens / seconds
            self._fit(self._rate)

    def worth_stopping(self, n_tokens: int, elapsed: float) -> bool:
        """Whether a step of prompts should be given up for somebody who came: if more of it is to come than is lost."""
        if n_tokens <= self._turn:
            return False
        if self._rate is None:
            return elapsed < PATIENCE
        return n_tokens / self._rate - elapsed > max(elapsed, LEAST_WAIT)

    def _fit(self, rate: float) -> None:
        """Halved after a turn that would have been too long, doubled after one that was short."""
        if self._turn > self._seconds * rate:
            self._turn = max(min(LEAST_TURN, self._chunk), self._turn // 2)
        elif 2 * self._turn < self._seconds * rate:
            self._turn = min(self._chunk, self._turn * 2)
