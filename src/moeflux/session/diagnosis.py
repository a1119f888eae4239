"""Why a prompt was not known: what differs from an earlier one, where, and how many tokens had to be run again for it.

A fingerprint holds hashes of a request's parts and the tokens of its prompt; a ledger keeps those of recent answers.
"""

from __future__ import annotations

import json
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from hashlib import blake2b
from threading import Lock
from typing import Any, Literal

import numpy as np

from moeflux.runtime.snapshot import Tokens, common_length
from moeflux.session.prompt import Conversation
from moeflux.text.messages import read_messages, read_tools

MOST_KEPT = 512  # answers
MOST_TOKENS = 2**22  # of their prompts together

What = Literal["model", "tools", "system", "messages", "variables", "format"]


@dataclass(frozen=True)
class Fingerprint:
    """`said`: tokens of the prompt up to the end of its last message; what stands behind is never there again."""

    parts: Mapping[str, tuple[str, ...]]  # hashes, by what they are of; a message or tool each
    tokens: Tokens
    said: int

    @classmethod
    def of(cls, model: str, conversation: Conversation, ids: Sequence[int], said: int, format: object = None) -> Fingerprint:
        messages = read_messages(conversation.messages)  # one form, however they came
        n = next((i for i, message in enumerate(messages) if message["role"] != "system"), len(messages))
        parts = {
            "model": (_hash(model),),
            "tools": tuple(_hash(tool) for tool in read_tools(conversation.tools) or ()),
            "system": tuple(_hash(message) for message in messages[:n]),
            "variables": (_hash(dict(conversation.variables)),),
            "format": (_hash(format),),
            "messages": tuple(_hash(message) for message in messages[n:]),
        }
        return cls(parts, np.array(ids, dtype=np.int32), said)


@dataclass(frozen=True)
class Difference:
    """`index`: of the tool or message. `position`: tokens that are alike. `missed`: the earlier prompt's that are not."""

    what: What
    index: int | None
    position: int
    missed: int

    @property
    def where(self) -> str:
        """For people."""
        place = "" if self.index is None else f" {self.index}"
        names = {"messages": "message", "tools": "tool", "system": "system prompt", "variables": "options of the template"}
        return f"{names.get(self.what, self.what)}{place if self.what in ('messages', 'tools') else ''}"


_ORDER: tuple[What, ...] = ("model", "tools", "system", "variables", "format", "messages")


def compare(before: Fingerprint, now: Fingerprint) -> Difference | None:
    """None: the earlier prompt is a beginning of this one."""
    position = common_length(before.tokens[: before.said], now.tokens)
    missed = before.said - position
    if missed <= 0 and before.parts["model"] == now.parts["model"]:
        return None
    for what in _ORDER:
        old, new = before.parts[what], now.parts[what]
        index = next((i for i, pair in enumerate(zip(old, new, strict=False)) if pair[0] != pair[1]), None)
        if index is None and (len(new) < len(old) or (what != "messages" and len(new) != len(old))):
            index = min(len(old), len(new))
        if index is not None:
            return Difference(what, index, position, max(missed, 0))
    return Difference("messages", None, position, missed)  # the template shows them in another way now


@dataclass
class Ledger:
    """Fingerprints of recent answers by their ids, the oldest first. From any thread."""

    _kept: OrderedDict[str, Fingerprint] = field(default_factory=OrderedDict)
    _n_tokens: int = 0
    _lock: Lock = field(default_factory=Lock)

    def remember(self, id: str, fingerprint: Fingerprint) -> None:
        with self._lock:
            self._kept[id] = fingerprint
            self._n_tokens += len(fingerprint.tokens)
            while len(self._kept) > MOST_KEPT or (self._n_tokens > MOST_TOKENS and len(self._kept) > 1):
                self._n_tokens -= len(self._kept.popitem(last=False)[1].tokens)

    def find(self, id: str) -> Fingerprint | None:
        with self._lock:
            return self._kept.get(id)


def _hash(value: Any) -> str:
    text = json.dumps(value, sort_keys=True, default=str)
    return blake2b(text.encode(errors="surrogatepass"), digest_size=12).hexdigest()
