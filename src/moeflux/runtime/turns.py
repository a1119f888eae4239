"""Whose turn it is: sequences that decode, or prompts. Time is shared, not tokens.

A prompt alone runs in the largest chunks. Beside others it runs in turns, and after a turn those that decode get as much
time. A turn should take a few seconds, so that nobody waits long. But whatever its size, it reads most of the experts that
are not in memory (a sweep): it must have enough tokens to compute for about as long as that takes, or the drive's time is
wasted.
"""

from __future__ import annotations

from math import ceil

from moeflux.runtime.batch import Kind

FIRST_TURN = 512  # tokens of prompts in a turn beside others, until it is known what they take,
FIRST_SWEEP = 6.0  # for so many seconds of reading; more where it takes longer
LEAST_TURN = 256
TURN_SECONDS = 8.0  # that a turn should take, about
DECODE_SHARE = 0.5  # of the time, where both wait
PATIENCE = 5.0  # seconds of a step that are given up for a newcomer while nobody knows what a step takes
LEAST_WAIT = 0.5  # seconds that a newcomer can always wait


class Turns:
    def __init__(self, chunk: int, sweep_s: float = 0.0) -> None:
        """`chunk`: tokens that one forward has scratch memory for. `sweep_s`: reading all experts that are not in memory."""
        self._chunk, self._sweep = chunk, sweep_s
        self._turn = min(chunk, FIRST_TURN * max(1, ceil(sweep_s / FIRST_SWEEP)))
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
        if n_tokens == self._turn:
            self._fit(seconds)

    def worth_stopping(self, n_tokens: int, elapsed: float) -> bool:
        """Whether a step of prompts should be given up for somebody who came: if more of it is to come than is lost."""
        if n_tokens <= self._turn:
            return False
        if self._rate is None:
            return elapsed < PATIENCE
        return n_tokens / self._rate - elapsed > max(elapsed, LEAST_WAIT)

    def _fit(self, seconds: float) -> None:
        """Twice as many tokens after a turn that was short, or that mostly read; half as many after a long one."""
        if seconds < max(TURN_SECONDS / 2, 1.15 * self._sweep):
            self._turn = min(self._chunk, self._turn * 2)
        elif seconds > max(1.5 * TURN_SECONDS, 3 * self._sweep):
            self._turn = max(min(LEAST_TURN, self._chunk), self._turn // 2)
