"""Many sequences through one engine: which segments run in the next step, and what follows from their logits.

A step is one forward, of sequences that decode or of prompts. Where both wait they take turns in time: a turn of prompts,
then as much time for those that decode. With experts on a drive a step costs the distinct experts that it needs, so a
prompt cut into thin slices beside decoders would read nearly all experts for each slice.

Nothing here changes a result. A failing step is taken back, its sequences are run again one by one, and only those that fail
alone end, each with its own error.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Sequence as Seq
from dataclasses import replace
from threading import Condition

from moeflux.core.errors import CancelledError, StateError
from moeflux.runtime.batch import check_tokens
from moeflux.runtime.cancel import CancelFlag
from moeflux.runtime.engine import Engine
from moeflux.runtime.good_state import GoodState
from moeflux.runtime.job import F32, Job, Ran, Reached, Rows, Share, Step, Take
from moeflux.runtime.sequence import Sequence
from moeflux.runtime.turns import Turns


class Scheduler:
    """`submit`, `cancel` and `make_way` may be called from any thread, `step` from one."""

    def __init__(self, engine: Engine, turns: Turns | None = None, most: int | None = None) -> None:
        """`most`: jobs that run at once; by default as many as the engine was planned for."""
        self._engine = engine
        self._turns = turns or Turns(engine.plan.chunk_tokens, engine.plan.sweep_s)
        self._most = engine.config.sequences if most is None else most
        self._waiting: deque[Job] = deque()
        self._running: list[Job] = []  # whose turn it is first, first
        self._changed = Condition()  # its lock is re-entrant
        self._step: Step | None = None
        self._stop = CancelFlag()  # ends the running step between two layers
        self.expected = 0  # requests that will be submitted soon: a lone prompt then takes short turns

    # From any thread.

    def submit(
        self,
        sequence: Sequence,
        tokens: Seq[int],
        take: Take,
        stops: Seq[int] = (),
        reached: Reached | None = None,
        rows: Rows | None = None,
    ) -> Job:
        """Runs `tokens` behind what the sequence has, then asks `take` how to go on. The sequence is busy until then.

        `rows`: is handed the logits after every token but the last, which is therefore run by itself.
        """
        check_tokens(tokens, self._engine.spec.vocab)
        with self._changed:
            self.check_free(sequence)
            sequence.check_usable()
            self._engine.check_room(len(sequence) + len(tokens))
            end = len(sequence) + len(tokens)
            stops = stops if rows is None else [*stops, end - 1]
            ahead = sorted(stop for stop in set(stops) if len(sequence) < stop <= end)
            job = Job(sequence, [int(token) for token in tokens], take, GoodState(sequence), deque(ahead), reached, rows)
            self._waiting.append(job)
            self._changed.notify_all()
            self.make_way()
        return job

    def check_free(self, sequence: Sequence) -> None:
        """Whether nobody has the sequence: it is busy from `submit` until the last step that uses it has ended."""
        with self._changed:
            stepping = self._step.shares if self._step else []
            held = [job.sequence for job in (*self._waiting, *self._running)]
            if any(other is sequence for other in (*held, *(share.sequence for share in stepping))):
                raise StateError("the sequence is busy with a request", hint="wait for its end, or use another sequence")

    def cancel(self, job: Job) -> None:
        """It ends at once, or with the step that it is in; a step that nobody wants any more ends with the layer."""
        with self._changed:
            if job.done:
                return
            job.cancelled = True
            if self._step is None or all(share.job is not job for share in self._step.shares):
                self._end(job, CancelledError("the request was cancelled"))
            elif all(share.job.cancelled for share in self._step.shares):
                self._stop.set()
            self._changed.notify_all()

    def make_way(self) -> None:
        """Somebody came: a long step of prompts with most of its time before it stops with the layer, to be cut smaller."""
        with self._changed:
            step = self._step
            if step is None or step.kind != "prompt" or any(share.job.stopped_once for share in step.shares):
                return
            if self._turns.worth_stopping(step.n_tokens, time.perf_counter() - step.start):
                for share in step.shares:
                    share.job.stopped_once = True
                self._stop.set()

    @property
    def n_active(self) -> int:
        with self._changed:
            return len(self._waiting) + len(self._running)

    def wait(self, seconds: float | None = None) -> bool:
        """Until there is something to do."""
        with self._changed:
            return self._changed.wait_for(lambda: bool(self._waiting or self._running), seconds)

    # From one thread.

    def step(self) -> int:
        """One forward; returns the tokens that were run, 0 where there was nothing to do."""
        self._deliver(list(self._running))  # where the last step was interrupted before all were told
        with self._changed:
            shares = self._gather()
            if not shares:
                return 0
            self._stop.clear()
            self._step = step = Step(shares, time.perf_counter())
        try:
            ran = self._run(step)
            self._settle(ran)
            self._deliver([share.job for share, _ in ran])
        finally:
            with self._changed:
                self._step = None
                for share in shares:
                    if share.job.cancelled:
                        self._end(share.job, CancelledError("the request was cancelled"))
        return sum(share.n_tokens for share, _ in ran)

    def run(self) -> None:
        """Until all jobs are done."""
        while self.n_active:
            self.step()

    def _gather(self) -> list[Share]:
        """Those that decode, or prompts in turn, within what one forward has scratch memory for."""
        while self._waiting and len(self._running) < self._most:
            self._running.append(self._waiting.popleft())
        decoding = [job for job in self._running if job.kind == "decode"]
        prompts = [job for job in self._running if job.kind == "prompt"]
        alone = len(self._running) + len(self._waiting) + self.expected == 1
        kind, left = self._turns.next(bool(decoding), bool(prompts), alone=alone)
        jobs = decoding if kind == "decode" else prompts
        shares: list[Share] = []
        for i, job in enumerate(jobs):
            assert job.sequence is not None
            assert job.good is not None
            fair = max(1, left // (len(jobs) - i))  # what one does not need is left to those after it
            if n := job.count_next(min(fair, left)):
                shares.append(Share(job, job.sequence, job.good, n))
                left -= n
        first = 1 if kind == "prompt" else len(shares)  # to the end of the row
        self._running = [*(prompts if kind == "decode" else decoding), *jobs[first:], *jobs[:first]]
        return shares

    def _run(self, step: Step) -> list[Ran]:
        is_prompt = step.kind == "prompt"
        try:
            for share in step.shares:
                share.good.keep(prompt=is_prompt)
            segments = [share.segment() for share in step.shares]
            logits = self._engine.forward(*segments, cancel=self._stop if is_prompt else None)
        except CancelledError:
            self._take_back(step.shares)
            return []
        except Exception as error:
            return self._run_apart(step.shares, error)
        except BaseException:
            self._take_back(step.shares)
            raise
        self._turns.ran(step.kind, step.n_tokens, time.perf_counter() - step.start)
        for share in step.shares:
            share.job.stopped_once = False
        return [(share, None if rows is None else rows[0]) for share, rows in zip(step.shares, logits, strict=True)]

    def _run_apart(self, shares: list[Share], error: Exception) -> list[Ran]:
        """After a failure: each by itself, so that it ends only those whose own tokens fail."""
        again = self._take_back(shares)
        if len(again) == 1:
            self._end(again[0].job, error)
            return []
        ran: list[Ran] = []
        for share in again:
            if share.job.cancelled:
                continue
            try:
                ran.append((share, self._run_alone(share)))
            except Exception as own:
                share.good.go_back()
                self._end(share.job, own)
            except BaseException:
                share.good.go_back()
                self._settle(ran)
                raise
        return ran

    def _run_alone(self, share: Share) -> F32 | None:
        rows: F32 | None = None
        for start in range(0, share.n_tokens, self._engine.plan.chunk_tokens):
            stop = min(share.n_tokens, start + self._engine.plan.chunk_tokens)
            (rows,) = self._engine.forward(share.segment(start, stop))
        return None if rows is None else rows[0]

    def _take_back(self, shares: list[Share]) -> list[Share]:
        """As if the step had not been. Where a sequence had to go further back, its share has those tokens again."""
        again = []
        for share in shares:
            lost = share.good.go_back()
            share.job.pending[:0] = lost
            again.append(replace(share, n_tokens=len(lost) + share.n_tokens))
        return again

    def _settle(self, ran: list[Ran]) -> None:
        """Tokens that ran are taken off before anybody is told, so that nothing that a callback does can run them twice."""
        for share, logits in ran:
            job = share.job
            del job.pending[: share.n_tokens]
            job.logits = logits
            if job.stops and len(share.sequence) >= job.stops[0]:
                job.arrived = job.stops.popleft()

    def _deliver(self, jobs: list[Job]) -> None:
        """What callers do, and their mistakes, is outside of the lock; a mistake ends its own job."""
        for job in jobs:
            if job.done or job.cancelled:
                continue
            try:
                self._tell(job)
            except BaseException as error:
                self._end(job, error)
                if not isinstance(error, Exception):
                    raise

    def _tell(self, job: Job) -> None:
        if job.arrived is not None:
            position, job.arrived = job.arrived, None
            if job.reached is not None:
                job.reached(position)
        if job.logits is None:
            return
        logits, job.logits = job.logits, None
        tokens = [*job.take(logits)]
        if tokens and job.sequence is not None:
            check_tokens(tokens, self._engine.spec.vocab)
            self._engine.check_room(len(job.sequence) + len(tokens))
            job.pending, job.kind = [int(token) for token in tokens], "decode"
        else:
            self._end(job, None)

    def _end(self, job: Job, error: BaseException | None) -> None:
        with self._changed:
            if job.done:
                return
            job.done, job.error, job.sequence, job.good = True, error, None, None
            job.pending, job.logits, job.reached = [], None, None
            self._running = [other for other in self._running if other is not job]
            if job in self._waiting:
                self._waiting.remove(job)
            self._changed.notify_all()
