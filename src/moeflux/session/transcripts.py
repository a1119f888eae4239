"""What was said before, as it was written: texts with their tokens, calls with their spelling. From any thread.

What is known keeps its tokens: encoded anew, a model's own text can be cut in another way, and its state would be lost. For
the same reason calls that clients write in another way (keys in another order, other white space) are told as they were.
"""

from __future__ import annotations

import json
from collections import OrderedDict
from collections.abc import Iterable, Mapping, Sequence
from threading import Lock
from typing import Any

from moeflux.text.chat import ChatFormat, Prompt
from moeflux.text.json_value import read_value
from moeflux.text.messages import Arguments
from moeflux.text.tools import ToolCall

MOST_TOKENS = 2**20  # of all remembered transcripts together
MOST_CALLS = 4096


class Transcripts:
    def __init__(self, most_tokens: int = MOST_TOKENS) -> None:
        self._known: OrderedDict[str, list[int]] = OrderedDict()  # the one used longest ago first
        self._calls: OrderedDict[str, str] = OrderedDict()  # arguments as they were written, by what they mean
        self._most, self._n_tokens, self._lock = most_tokens, 0, Lock()

    def encode(self, chat: ChatFormat, prompt: Prompt) -> list[int]:
        with self._lock:
            begins = max((text for text in self._known if prompt.marked.startswith(text)), key=len, default=None)
            known = [] if begins is None else self._known[begins]
            if begins is not None:
                self._known.move_to_end(begins)
        return [*known, *chat.encode(Prompt(prompt.marked[len(begins or "") :]))]

    def remember(self, marked: str, ids: Sequence[int]) -> None:
        with self._lock:
            self._n_tokens -= len(self._known.pop(marked, ()))
            self._known[marked] = list(ids)
            self._n_tokens += len(ids)
            while self._n_tokens > self._most:
                self._n_tokens -= len(self._known.popitem(last=False)[1])

    def remember_calls(self, calls: Iterable[ToolCall]) -> None:
        """Those that a model made."""
        with self._lock:
            for call in calls:
                if call.complete:
                    meaning = _meaning(call.name, read_value(call.arguments))
                    self._calls.pop(meaning, None)
                    self._calls[meaning] = call.arguments
            while len(self._calls) > MOST_CALLS:
                self._calls.popitem(last=False)

    def restore(self, messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
        """Messages as `read_messages` gives them, with calls as they were written."""
        return [
            {**m, "tool_calls": [self._restored(c) for c in m["tool_calls"]]} if "tool_calls" in m else m for m in messages
        ]

    def _restored(self, call: dict[str, Any]) -> dict[str, Any]:
        function: dict[str, Any] = call["function"]
        with self._lock:
            written = self._calls.get(_meaning(function["name"], function["arguments"]))
        if written is None or written == str(function["arguments"]):
            return call
        return {**call, "function": {**function, "arguments": Arguments(read_value(written), written)}}

    def clear(self) -> None:
        with self._lock:
            self._known.clear()
            self._calls.clear()
            self._n_tokens = 0


def _meaning(name: str, arguments: Mapping[str, Any]) -> str:
    return json.dumps([name, arguments], sort_keys=True)
