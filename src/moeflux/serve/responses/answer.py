"""A response as it is written: events with numbers, and the object that they add up to."""

from __future__ import annotations

import secrets
import time
from dataclasses import dataclass
from typing import Any

from moeflux.sampling.params import SamplingParams
from moeflux.serve.answering import Told
from moeflux.serve.errors import Problem, openai_body
from moeflux.serve.openai.usage import logprob_of
from moeflux.serve.responses.asks import SEALED, names_of
from moeflux.serve.responses.items import CallItem, Event, MessageItem, OutputItem, ThoughtItem
from moeflux.serve.responses.types import ResponseObject, ResponsesRequest
from moeflux.serve.sse import Sse
from moeflux.session.diagnosis import Difference, Fingerprint, Ledger, compare
from moeflux.session.events import Finish, Queued, Started, Token, Usage
from moeflux.session.prompt import Conversation
from moeflux.text.json_value import write_value
from moeflux.text.regions import Part, Text
from moeflux.text.tokenizer import Tokenizer
from moeflux.text.tools import CallDelta, CallEnd, CallStart

_MISSES = {"model": "model_changed", "tools": "tools_changed", "format": "text_format_changed",
           "variables": "reasoning_effort_changed"}  # fmt: skip


@dataclass(frozen=True)
class Answered:
    """Whose response this is."""

    model: str
    conversation: Conversation
    ledger: Ledger
    tokenizer: Tokenizer
    sampling: SamplingParams  # the model's own way


class ResponsesAnswer:
    def __init__(self, request: ResponsesRequest, whose: Answered) -> None:
        self._request, self._whose = request, whose
        self.id = f"resp_{secrets.token_hex(16)}"
        self._created = int(time.time())
        self._completed: int | None = None
        self._tools = names_of(request.tools)
        self._sealed = SEALED in (request.include or ())
        self._status = "in_progress"
        self._number = -1
        self._items: list[OutputItem] = []
        self._done: list[dict[str, Any]] = []
        self._logprobs: list[dict[str, Any]] = []
        self._usage: dict[str, Any] | None = None
        self._error: dict[str, Any] | None = None
        self._why: str | None = None
        self._diagnostics: dict[str, Any] | None = None

    # What happens.

    def begin(self) -> list[Sse]:
        return [self._told("response.created"), self._told("response.in_progress")]

    def take(self, told: Told) -> list[Sse]:
        match told.event:
            case Queued(prompt=prompt):
                self._note(prompt.ids, prompt.said)
            case Started():
                return [self._told("response.in_progress")]
            case Token() as token:
                if token.logprob is not None and not token.reasoning:
                    self._logprobs.append(logprob_of(self._whose.tokenizer, token))
                return self._written(token.parts)
            case Finish() as finish:
                pieces = self._written(finish.parts)
                return [*pieces, *self._close(finish.reason not in ("length", "context")), *self._finish(finish)]
        return []

    def end(self) -> list[Sse]:
        kind = "completed" if self._status == "completed" else "incomplete" if self._status == "incomplete" else "failed"
        return [self._told(f"response.{kind}")]

    def fail(self, problem: Problem) -> list[Sse]:
        error = openai_body(problem)["error"]
        self._status = "failed"
        self._error = {"code": error["code"] or error["type"], "message": error["message"]}
        return [self._told("response.failed")]

    def beat(self) -> bytes:
        return self._told("response.in_progress").encode()

    def whole(self) -> ResponseObject:
        return ResponseObject.model_validate(self._object())

    @property
    def over(self) -> bool:
        return self._status != "in_progress"

    @property
    def output(self) -> list[dict[str, Any]]:
        return self._done

    # How it is told.

    def _told(self, kind: str) -> Sse:
        return self._event((kind, {"response": self._object()}))

    def _event(self, event: Event) -> Sse:
        self._number += 1
        kind, fields = event
        return Sse(write_value({"type": kind, "sequence_number": self._number, **fields}), kind)

    def _written(self, parts: tuple[Part, ...]) -> list[Sse]:
        events: list[Sse] = []
        for part in parts:
            match part:
                case Text(text, region):
                    events += self._in_item(MessageItem if region == "text" else ThoughtItem)
                    events += map(self._event, self._items[-1].add(text, self._new_logprobs(region == "text")))
                case CallStart(_, name, id):
                    events += self._close()
                    events += self._open(CallItem(len(self._items), self._tools.get(name, {}), name, id))
                case CallDelta(_, text):
                    events += map(self._event, self._items[-1].add(text, []))
                case CallEnd(_, call):
                    events += self._close(call.complete)
        return events

    def _new_logprobs(self, wanted: bool) -> list[dict[str, Any]]:
        new, self._logprobs = (self._logprobs if wanted else []), []
        return new

    def _in_item(self, kind: type[MessageItem] | type[ThoughtItem]) -> list[Sse]:
        if self._items and isinstance(self._items[-1], kind) and not self._items[-1].closed:
            return []
        place = len(self._items)
        item = ThoughtItem(place, self._sealed) if kind is ThoughtItem else MessageItem(place)
        return [*self._close(), *self._open(item)]

    def _open(self, item: OutputItem) -> list[Sse]:
        self._items.append(item)
        return [self._event(event) for event in item.open()]

    def _close(self, complete: bool = True) -> list[Sse]:
        if not self._items or self._items[-1].closed:
            return []
        events = self._items[-1].close(complete)
        self._done.append(events[-1][1]["item"])
        return [self._event(event) for event in events]

    def _finish(self, finish: Finish) -> list[Sse]:
        cut = finish.reason in ("length", "context")
        self._status = "cancelled" if finish.reason == "cancelled" else "incomplete" if cut else "completed"
        if cut and self._most == 0:
            self._status = "completed"  # nothing was to be said
        self._why = "max_output_tokens" if self._status == "incomplete" else None
        self._completed = int(time.time())
        self._usage = _usage(finish.usage)
        return []

    @property
    def _most(self) -> int | None:
        options = self._request.prompt_cache_options
        return 0 if options and options.prewarm else self._request.max_output_tokens

    def _object(self) -> dict[str, Any]:
        r = self._request
        format = r.text.format if r.text and r.text.format else {"type": "text"}
        reasoning = r.reasoning.model_dump() if r.reasoning else {"effort": None, "summary": None}
        said = {
            "id": self.id, "object": "response", "created_at": self._created, "completed_at": self._completed,
            "status": self._status, "background": bool(r.background), "error": self._error,
            "incomplete_details": {"reason": self._why} if self._why else None, "instructions": r.instructions,
            "max_output_tokens": r.max_output_tokens, "max_tool_calls": r.max_tool_calls, "model": self._whose.model,
            "output": list(self._done), "parallel_tool_calls": r.parallel_tool_calls is not False,
            "previous_response_id": r.previous_response_id, "prompt_cache_key": r.prompt_cache_key,
            "reasoning": reasoning, "safety_identifier": r.safety_identifier, "service_tier": "default",
            "store": r.store is not False, "temperature": self._drawn(r.temperature, self._whose.sampling.temperature),
            "top_p": self._drawn(r.top_p, self._whose.sampling.top_p),
            "top_logprobs": r.top_logprobs or 0, "presence_penalty": r.presence_penalty or 0.0,
            "frequency_penalty": r.frequency_penalty or 0.0,
            "text": {"format": format, "verbosity": (r.text and r.text.verbosity) or "medium"},
            "tool_choice": r.tool_choice or "auto", "tools": [_tool(tool) for tool in r.tools or ()],
            "truncation": r.truncation or "disabled",
            "usage": self._usage, "user": r.user, "metadata": r.metadata or {},
        }  # fmt: skip
        return said if self._diagnostics is None else {**said, "prompt_cache_diagnostics": self._diagnostics}

    @staticmethod
    def _drawn(asked: float | None, own: float) -> float:
        """As it was: what the client asked for, or the model's own way."""
        return own if asked is None else asked

    # Why what was known was not.

    def _note(self, ids: tuple[int, ...], said: int) -> None:
        r, whose = self._request, self._whose
        now = Fingerprint.of(r.model, whose.conversation, ids, said, r.text.format if r.text else None)
        options = r.prompt_cache_options
        if options and options.comparison_response_id:
            before = whose.ledger.find(options.comparison_response_id)
            self._diagnostics = _diagnosis(before, now)
        whose.ledger.remember(self.id, now)


def _diagnosis(before: Fingerprint | None, now: Fingerprint) -> dict[str, Any]:
    if before is None:
        return {"type": "comparison_response_not_found"}
    difference = compare(before, now)
    return {"type": "cache_hit"} if difference is None else miss(difference)


def miss(difference: Difference) -> dict[str, Any]:
    """In the words of the API, and beside them where it is."""
    return {
        "type": "cache_miss",
        "reason": _MISSES.get(difference.what, "input_changed"),
        "cache_missed_tokens": difference.missed,
        "comparison_reusable_tokens": difference.position,
        "at": {"part": difference.what, "index": difference.index, "token": difference.position},
    }


def _tool(tool: dict[str, Any]) -> dict[str, Any]:
    """With all that clients expect of one."""
    return {"description": None, "parameters": None, "strict": False, **tool} if tool.get("type") == "function" else tool


def _usage(usage: Usage) -> dict[str, Any]:
    return {
        "input_tokens": usage.prompt,
        "input_tokens_details": {"cached_tokens": usage.cached, "cache_write_tokens": usage.kept},
        "output_tokens": usage.completion,
        "output_tokens_details": {"reasoning_tokens": usage.reasoning},
        "total_tokens": usage.prompt + usage.completion,
    }
