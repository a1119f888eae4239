"""A message as it is written: every change is an event, and the whole message is what its events add up to."""

from __future__ import annotations

import json
import secrets
from dataclasses import dataclass
from typing import Any

from moeflux.serve.answering import Told
from moeflux.serve.anthropic.asks import asks_an_hour
from moeflux.serve.anthropic.types import Message, MessagesRequest
from moeflux.serve.errors import Problem, anthropic_body
from moeflux.serve.sse import Sse
from moeflux.session.diagnosis import Difference, Fingerprint, Ledger, compare
from moeflux.session.events import Finish, Queued, Started, Token, Usage
from moeflux.session.prompt import Conversation
from moeflux.text.blocks import seal
from moeflux.text.json_value import completed_members, write_value
from moeflux.text.regions import Part, Text
from moeflux.text.tools import CallDelta, CallEnd, CallStart

_REASONS = {
    "length": "max_tokens",
    "context": "model_context_window_exceeded",
    "stop_sequence": "stop_sequence",
}
_MISSES = {"model": "model_changed", "tools": "tools_changed", "system": "system_changed"}
CALLER = {"type": "direct"}  # the model itself
PING = Sse('{"type":"ping"}', "ping")


@dataclass(frozen=True)
class Answered:
    """Whose message this is: for its fingerprint and for the log."""

    model: str
    conversation: Conversation
    ledger: Ledger
    request_id: str


class MessagesAnswer:
    def __init__(self, request: MessagesRequest, whose: Answered) -> None:
        self._whose, self._request = whose, request
        self._format = request.output_config.format if request.output_config else None
        self._omits = bool(request.thinking and request.thinking.display == "omitted")
        self._an_hour = asks_an_hour(request)
        self._id = f"msg_{secrets.token_hex(12)}"
        self._prompt = 0
        self._cached = 0
        self._begun = self._called = False
        self._blocks: list[_Block] = []
        self._diagnostics: dict[str, Any] | None = None
        self._finish: Finish | None = None

    # What happens.

    def begin(self) -> list[Sse]:
        return [PING]  # the first bytes, before it is known how much of the prompt is

    def take(self, told: Told) -> list[Sse]:
        match told.event:
            case Queued(prompt=prompt):
                self._prompt = len(prompt.ids)
                self._note(prompt.ids, prompt.said)
            case Started(cached):
                self._cached = cached
                return self._start()
            case Token(parts=parts):
                return [*self._start(), *self._written(parts)]
            case Finish() as finish:
                self._finish = finish
                return [*self._start(), *self._written(finish.parts), *self._close()]
        return []

    def end(self) -> list[Sse]:
        assert self._finish is not None
        usage = self._usage(self._finish.usage)
        ended = {"stop_reason": self._reason, "stop_sequence": self._finish.stop_sequence}
        delta = {**ended, "stop_details": None, "container": None}
        return [_event("message_delta", delta=delta, usage=usage), _event("message_stop")]

    def fail(self, problem: Problem) -> list[Sse]:
        return [Sse(json.dumps(anthropic_body(problem, self._whose.request_id)), "error")]

    def beat(self) -> bytes:
        return PING.encode()

    def whole(self) -> Message:
        assert self._finish is not None
        content = [block.whole() for block in self._blocks if block.shown]
        return Message.model_validate(
            {
                **self._head(self._usage(self._finish.usage)),
                "content": content,
                "stop_reason": self._reason,
                "stop_sequence": self._finish.stop_sequence,
            }
        )

    # How it is told.

    def _start(self) -> list[Sse]:
        if self._begun:
            return []
        self._begun = True
        usage = self._usage(Usage(self._prompt, self._cached, 0, 0, 0))
        return [_event("message_start", message=self._head(usage))]

    def _head(self, usage: dict[str, Any]) -> dict[str, Any]:
        return {
            "id": self._id, "type": "message", "role": "assistant", "model": self._whose.model, "content": [],
            "stop_reason": None, "stop_sequence": None, "stop_details": None, "container": None, "usage": usage,
            "diagnostics": self._diagnostics,
        }  # fmt: skip

    def _written(self, parts: tuple[Part, ...]) -> list[Sse]:
        events: list[Sse] = []
        for part in parts:
            match part:
                case Text(text, region):
                    kind = "text" if region == "text" else "thinking"
                    events += self._in_block(kind)
                    events += self._blocks[-1].add(text)
                case CallStart(_, name, id):
                    events += self._close()
                    block = _Block(len(self._shown), "tool_use", name, id or f"toolu_{secrets.token_hex(12)}")
                    self._blocks.append(block)
                    events += block.open()
                case CallDelta(_, text):
                    events += self._blocks[-1].add(text)
                case CallEnd(_, call):
                    self._called = self._called or call.complete
                    self._blocks[-1].complete = call.complete
                    events += self._close()
        return events

    @property
    def _shown(self) -> list[_Block]:
        return [block for block in self._blocks if block.shown]

    def _in_block(self, kind: str) -> list[Sse]:
        if self._blocks and self._blocks[-1].kind == kind and not self._blocks[-1].closed:
            return []
        events = self._close()
        self._blocks.append(_Block(len(self._shown), kind, omits=self._omits))
        return events

    def _close(self) -> list[Sse]:
        return self._blocks[-1].close() if self._blocks and not self._blocks[-1].closed else []

    @property
    def _reason(self) -> str:
        assert self._finish is not None
        return _REASONS.get(self._finish.reason) or ("tool_use" if self._called else "end_turn")

    def _usage(self, usage: Usage) -> dict[str, Any]:
        """What was read, what was kept, and the rest: together the tokens of the prompt."""
        return {
            "input_tokens": usage.prompt - usage.cached - usage.kept,
            "output_tokens": usage.completion,
            "cache_creation_input_tokens": usage.kept,
            "cache_read_input_tokens": usage.cached,
            "cache_creation": {
                "ephemeral_5m_input_tokens": 0 if self._an_hour else usage.kept,
                "ephemeral_1h_input_tokens": usage.kept if self._an_hour else 0,
            },
            "output_tokens_details": {"thinking_tokens": usage.reasoning},
            "server_tool_use": None,
            "service_tier": "standard",
            "inference_geo": None,
            "speed": None,
        }

    # Why what was known was not.

    def _note(self, ids: tuple[int, ...], said: int) -> None:
        whose = self._whose
        now = Fingerprint.of(self._request.model, whose.conversation, ids, said, self._format)
        missed = self._missed(now)
        self._diagnostics = None if missed is None else {"cache_miss_reason": missed}
        whose.ledger.remember(self._id, now)

    def _missed(self, now: Fingerprint) -> dict[str, Any] | None:
        asked = self._request.diagnostics
        if asked is None or asked.previous_message_id is None:
            return None
        before = self._whose.ledger.find(asked.previous_message_id)
        if before is None:
            return {"type": "previous_message_not_found"}
        difference = compare(before, now)
        return None if difference is None else miss_reason(difference)


def miss_reason(difference: Difference) -> dict[str, Any]:
    """In the words of the API, and beside them where it is."""
    return {
        "type": _MISSES.get(difference.what, "messages_changed"),
        "cache_missed_input_tokens": difference.missed,
        "at": {"part": difference.what, "index": difference.index, "token": difference.position},
    }


class _Block:
    """One block. A text of nothing but white space is none: clients could not send it back."""

    def __init__(self, index: int, kind: str, name: str = "", id: str = "", *, omits: bool = False) -> None:
        self.index, self.kind, self.name, self.id = index, kind, name, id
        self.shown = self.closed = False
        self.complete = True
        self._omits = omits and kind == "thinking"
        self._texts: list[str] = []
        self._space = ""  # that may turn out to be all there is

    def add(self, text: str) -> list[Sse]:
        if not self.shown and self.kind != "tool_use":
            self._space += text
            if not self._space.strip():
                return []
            opened, text = self.open(), self._space
            return [*opened, *self._delta(text)]
        return self._delta(text)

    def open(self) -> list[Sse]:
        self.shown = True
        empty: dict[str, dict[str, Any]] = {
            "text": {"type": "text", "text": "", "citations": None},
            "thinking": {"type": "thinking", "thinking": "", "signature": ""},
            "tool_use": {"type": "tool_use", "id": self.id, "name": self.name, "input": {}, "caller": CALLER},
        }
        return [_event("content_block_start", index=self.index, content_block=empty[self.kind])]

    def _delta(self, text: str) -> list[Sse]:
        self._texts.append(text)
        names = {"text": ("text_delta", "text"), "thinking": ("thinking_delta", "thinking"),
                 "tool_use": ("input_json_delta", "partial_json")}  # fmt: skip
        kind, key = names[self.kind]
        return [] if self._omits else [_event("content_block_delta", index=self.index, delta={"type": kind, key: text})]

    def close(self) -> list[Sse]:
        self.closed = True
        if not self.shown:
            return []
        stop = _event("content_block_stop", index=self.index)
        if self.kind != "thinking":
            return [stop]
        delta = {"type": "signature_delta", "signature": self._signature}
        return [_event("content_block_delta", index=self.index, delta=delta), stop]

    @property
    def _signature(self) -> str:
        """Brings the thought back where it is not shown."""
        return seal("".join(self._texts) if self._omits else "")

    def whole(self) -> dict[str, Any]:
        text = "".join(self._texts)
        match self.kind:
            case "text":
                return {"type": "text", "text": text, "citations": None}
            case "thinking":
                return {"type": "thinking", "thinking": "" if self._omits else text, "signature": self._signature}
        given = completed_members(text)
        return {"type": "tool_use", "id": self.id, "name": self.name, "input": given, "caller": CALLER}


def _event(kind: str, **fields: Any) -> Sse:
    return Sse(write_value({"type": kind, **fields}), kind)
