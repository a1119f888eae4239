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

from moeflux.runtime.snapshot import common_length
from moeflux.text.chat import ChatFormat, Prompt
from moeflux.text.json_value import read_value
from moeflux.text.messages import Arguments
from moeflux.text.tools import ToolCall

MOST_TOKENS = 2**20  # of all remembered transcripts together
MOST_CALLS = 4096
BOUNDARY = 2  # tokens at the end of a text that depend on what follows it


class Transcripts:
    def __init__(self, most_tokens: int = MOST_TOKENS) -> None:
        self._known: OrderedDict[str, list[int]] = OrderedDict()  # the one used longest ago first
        self._cut: set[str] = set()  # of these, those that may end anywhere
        self._calls: OrderedDict[str, str] = OrderedDict()  # arguments as they were written, by what they mean
        self._most, self._n_tokens, self._lock = most_tokens, 0, Lock()

    def encode(self, chat: ChatFormat, prompt: Prompt) -> list[int]:
        with self._lock:
            begins = max((text for text in self._known if prompt.marked.startswith(text)), key=len, default=None)
            known, cut = ([], False) if begins is None else (self._known[begins], begins in self._cut)
            if begins is not None:
                self._known.move_to_end(begins)
        n = len(begins or "")
        if cut and not _ends_well(chat, prompt, n, known):
            known = known[: _last_marker(chat, known)]
            n = len(chat.rendered(known))
        return [*known, *chat.encode(Prompt(prompt.marked[n:]))]

    def remember(self, marked: str, ids: Sequence[int], *, cut: bool = False) -> None:
        """`cut`: it may end within a text of which the model did not write all."""
        with self._lock:
            self._n_tokens -= len(self._known.pop(marked, ()))
            self._known[marked] = list(ids)
            self._n_tokens += len(ids)
            self._cut.discard(marked)
            if cut:
                self._cut.add(marked)
            while self._n_tokens > self._most:
                text, tokens = self._known.popitem(last=False)
                self._n_tokens -= len(tokens)
                self._cut.discard(text)

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
            self._cut.clear()
            self._calls.clear()
            self._n_tokens = 0


def _meaning(name: str, arguments: Mapping[str, Any]) -> str:
    return json.dumps([name, arguments], sort_keys=True)


def _last_marker(chat: ChatFormat, ids: Sequence[int]) -> int:
    """Tokens up to the last one that is no part of a text."""
    added = frozenset(chat.tokenizer.added.values())
    return next((i for i in range(len(ids), 0, -1) if ids[i - 1] in added), 0)


def _ends_well(chat: ChatFormat, prompt: Prompt, n: int, ids: Sequence[int]) -> bool:
    """Whether a known beginning ends in an answer, but for its last token, which was not run, and which the model cut in a
    way of its own. Else the text that it ends in is encoded whole: it may end within a word."""
    tail = ids[_last_marker(chat, ids) :]
    left = chat.text_at(prompt, n)
    own = chat.encode(Prompt(chat.text_at(prompt, n - len(chat.rendered(tail)))))
    return common_length(own, tail) < len(tail) - BOUNDARY and (not left or len(chat.encode(Prompt(left))) == 1)
