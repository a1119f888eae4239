"""How far the answers of one request are: for `/status`, for metrics and for the log."""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol

from moeflux.runtime.prefill import PrefillProgress
from moeflux.session.events import Event, Failed, Finish, Queued, Scored, Started, Token, Usage


class Meter(Protocol):
    """What counts."""

    def started(self, waited_s: float) -> None: ...

    def first_token(self, seconds: float) -> None: ...

    def next_token(self, seconds: float) -> None: ...

    def finished(self, finish: Finish, seconds: float) -> None: ...

    def failed(self, kind: str) -> None: ...


@dataclass
class AnswerTrack:
    state: Literal["queued", "prompt", "decode", "done"] = "queued"
    begun: float = field(default_factory=time.perf_counter)
    last: float = 0.0  # when its latest token came
    cached: int = 0
    done: int = 0  # tokens of the prompt that are known or were run,
    total: int | None = None  # of so many
    generated: int = 0
    usage: Usage | None = None
    reason: str | None = None

    def as_dict(self, now: float) -> dict[str, Any]:
        prompt = {"cached": self.cached, "done": self.done, "total": self.total}
        return {"state": self.state, "seconds": round(now - self.begun, 3), "prompt": prompt, "generated": self.generated}


class RequestTrack:
    def __init__(self, id: str, client: str, n_answers: int, meter: Meter) -> None:
        self.id, self.client, self._meter = id, client, meter
        self.answers = [AnswerTrack() for _ in range(n_answers)]

    def note(self, index: int, event: Event) -> None:
        answer, now = self.answers[index], time.perf_counter()
        match event:
            case Queued():
                answer.begun = now
            case Started(cached):
                answer.state, answer.cached, answer.done = "prompt", cached, cached
                self._meter.started(now - answer.begun)
            case PrefillProgress(done, total):
                answer.done, answer.total = answer.cached + done, answer.cached + total
            case Token():
                self._note_token(answer, now)
            case Finish() as finish:
                answer.state, answer.usage, answer.reason = "done", finish.usage, finish.reason
                self._meter.finished(finish, now - answer.begun)
            case Failed(error):
                answer.state, answer.reason = "done", type(error).__name__
                self._meter.failed(error.fault)
            case Scored():
                pass

    def _note_token(self, answer: AnswerTrack, now: float) -> None:
        if answer.generated == 0:
            answer.state = "decode"
            self._meter.first_token(now - answer.begun)
        else:
            self._meter.next_token(now - answer.last)
        answer.generated += 1
        answer.last = now

    def as_dict(self) -> dict[str, Any]:
        now = time.perf_counter()
        return {"request": self.id, "client": self.client, "answers": [answer.as_dict(now) for answer in self.answers]}

    @property
    def summary(self) -> dict[str, Any]:
        """For the log: how much, never what."""
        used = [answer.usage for answer in self.answers if answer.usage is not None]
        return {
            "prompt_tokens": used[0].prompt if used else None,
            "cached_tokens": used[0].cached if used else None,
            "generated_tokens": sum(answer.generated for answer in self.answers),
            "reasons": [answer.reason for answer in self.answers],
        }
