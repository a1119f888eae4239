"""Many sequences through one engine: each step is one `forward` over the next tokens of those that have some.

Sequences that decode one token at a time go in every step. Prompts take turns, a chunk each; while somebody decodes, a step
takes so few tokens of prompts that it stays near the time allowed. How work is cut never changes a result.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable
from collections.abc import Sequence as Seq
from dataclasses import dataclass, field
from threading import Condition

import numpy as np
import numpy.typing as npt

from moeflux.core.errors import CancelledError, MoefluxError, StateError
from moeflux.runtime.batch import Segment, check_tokens
from moeflux.runtime.engine import Engine
from moeflux.runtime.sequence import Sequence

F32 = npt.NDArray[np.float32]
Next = Callable[[F32], int | None]  # from logits [vocab]: the token to go on with, or None to end
Reached = Callable[[int], object]

LEAST_CHUNK = 16  # of prompts, while somebody decodes
STEP_SECONDS = 0.25  # that a step with prompts should take at most, while somebody decodes


@dataclass(eq=False)
class Request:
    """Tokens for a sequence, then one token after the other as `choose` says. Made by `Batcher.submit`.

    `stops`: positions where no chunk goes across and `reached` is called, ascending.
    """

    sequence: Sequence | None
    pending: list[int]
    choose: Next
    stops: deque[int] = field(default_factory=deque)
    reached: Reached | None = None
    error: BaseException | None = None
    done: bool = False

    @property
    def decoding(self) -> bool:
        return len(self.pending) == 1

    def take(self, most: int) -> list[int]:
        """The next tokens to run, up to a stop."""
        assert self.sequence is not None
        if self.stops:
            most = min(most, self.stops[0] - len(self.sequence))
        return self.pending[:most]


class Batcher:
    """`submit` and `cancel` may be called from any thread, `step` from one."""

    def __init__(self, engine: Engine, step_seconds: float = STEP_SECONDS) -> None:
        self._engine, self._allowed = engine, step_seconds
        self._max = engine.config.sequences  # at once: more have no memory in the plan, and wait
        self._waiting: deque[Request] = deque()
        self._running: list[Request] = []  # whose turn it is first, first
        self._changed = Condition()
        self._chunk = LEAST_CHUNK  # of prompts while somebody decodes; follows what steps take

    def submit(
        self,
        sequence: Sequence,
        tokens: Seq[int],
        choose: Next,
        stops: Seq[int] = (),
        reached: Reached | None = None,
    ) -> Request:
        """Runs `tokens` behind what the sequence has, then asks `choose` after each token how to go on."""
        check_tokens(tokens, self._engine.spec.vocab)
        sequence.check_usable()
        self._engine.check_room(len(sequence) + len(tokens))
        ahead = deque(sorted(stop for stop in set(stops) if len(sequence) < stop <= len(sequence) + len(tokens)))
        request = Request(sequence, [int(token) for token in tokens], choose, ahead, reached)
        with self._changed:
            if any(other.sequence is sequence for other in (*self._waiting, *self._running)):
                raise StateError("the sequence has a request already")
            self._waiting.append(request)
            self._changed.notify_all()
        return request

    def cancel(self, request: Request) -> None:
        """From the next step on it is gone, and its sequence is let go of at once where no step is running."""
        with self._changed:
            self._end(request, CancelledError("the request was cancelled"))

    @property
    def n_active(self) -> int:
        with self._changed:
            return len(self._waiting) + len(self._running)

    def wait(self, seconds: float | None = None) -> bool:
        """Until there is something to do."""
        with self._changed:
            return self._changed.wait_for(lambda: bool(self._waiting or self._running), seconds)

    def step(self) -> int:
        """One forward; returns the tokens that were run, 0 where there was nothing to do."""
        with self._changed:
            work = self._gather()
        if not work:
            return 0
        segments = [
            Segment(sequence, tokens, "last" if len(tokens) == len(request.pending) else "none")
            for request, sequence, tokens in work
        ]
        start = time.perf_counter()
        try:
            logits = self._engine.forward(*segments)
        except BaseException as error:
            with self._changed:
                for request, _, _ in work:
                    self._end(request, error)
            if isinstance(error, MoefluxError):
                return 0
            raise
        self._adapt(work, time.perf_counter() - start)
        for (request, sequence, tokens), rows in zip(work, logits, strict=True):
            self._move_on(request, sequence, len(tokens), rows)
        return sum(len(tokens) for _, _, tokens in work)

    def run(self) -> None:
        """Until all requests are done."""
        while self.n_active:
            self.step()

    def _gather(self) -> list[tuple[Request, Sequence, list[int]]]:
        """Decoders first, then prompts in turn, within what one forward has scratch memory for."""
        while self._waiting and len(self._running) < self._max:
            self._running.append(self._waiting.popleft())
        decoders = [request for request in self._running if request.decoding]
        prompts = [request for request in self._running if not request.decoding]
        room = self._engine.plan.chunk_tokens
        left = max(0, min(room - len(decoders), self._chunk if decoders else room))
        work = [(request, request.sequence, request.take(1)) for request in decoders[:room]]
        for i, request in enumerate(prompts):
            share = max(1, left // (len(prompts) - i))  # what one does not need is left to those after it
            tokens = request.take(min(share, left))
            if tokens:
                work.append((request, request.sequence, tokens))
                left -= len(tokens)
        self._running = [*decoders[room:], *decoders[:room], *prompts[1:], *prompts[:1]]
        return [(request, sequence, tokens) for request, sequence, tokens in work if sequence is not None]

    def _move_on(self, request: Request, sequence: Sequence, n: int, rows: F32 | None) -> None:
        """What the caller wants to know is told outside of the lock; its own mistakes end its own request."""
        if request.done:  # cancelled meanwhile
            return
        del request.pending[:n]
        token: int | None = None
        try:
            if request.stops and len(sequence) == request.stops[0]:
                request.stops.popleft()
                if request.reached is not None:
                    request.reached(len(sequence))
            if rows is None:
                return
            token = request.choose(rows[0])
            if token is not None:
                check_tokens([token], self._engine.spec.vocab)
                self._engine.check_room(len(sequence) + 1)
        except Exception as error:
            with self._changed:
                self._end(request, error)
            return
        if token is None:
            with self._changed:
                self._end(request, None)
        else:
            request.pending.append(int(token))

    def _end(self, request: Request, error: BaseException | None) -> None:
        if request.done:
            return
        request.done, request.error, request.sequence = True, error, None
        request.pending, request.reached = [], None
        self._running = [other for other in self._running if other is not request]
        if request in self._waiting:
            self._waiting.remove(request)

    def _adapt(self, work: list[tuple[Request, Sequence, list[int]]], seconds: float) -> None:
        """The chunk of prompts beside decoders: halved after a step that took too long, doubled after a short one."""
        alone = all(len(tokens) == 1 for _, _, tokens in work) or all(len(tokens) > 1 for _, _, tokens in work)
        if alone:
            return
        if seconds > self._allowed:
            self._chunk = max(LEAST_CHUNK, self._chunk // 2)
        elif seconds < self._allowed / 2:
            self._chunk = min(self._engine.plan.chunk_tokens, self._chunk * 2)
