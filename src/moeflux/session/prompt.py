"""A conversation as tokens: rendered, encoded, with the places where a later one may go another way."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from os.path import commonprefix
from typing import Any

from moeflux.core.errors import InputError
from moeflux.runtime.snapshot import common_length
from moeflux.session.transcripts import Transcripts
from moeflux.text.calls import AUTO, ToolChoice
from moeflux.text.chat import ChatFormat, Prompt, Tools
from moeflux.text.messages import read_messages, read_tools
from moeflux.text.pen import Pen
from moeflux.text.regions import Splitter

Messages = Sequence[Mapping[str, Any]]


@dataclass(frozen=True)
class Conversation:
    """What a caller sends: messages, the tools that the model may call, and variables for the template.

    An assistant's message at the end is the beginning of the answer. `keep_s` in messages and tools: see `text/messages`.
    """

    messages: Messages
    tools: Tools | None = None
    variables: Mapping[str, Any] = field(default_factory=dict)  # enable_thinking, …
    choice: ToolChoice = AUTO
    loaded: Tools = ()  # tools that messages brought: they can be called, and are not told of at the beginning

    @classmethod
    def of(cls, messages: Messages, tools: Tools | None = None, thinking: bool | None = None) -> Conversation:
        """`thinking` None: what the template does by itself."""
        return cls(messages, tools, {} if thinking is None else {"enable_thinking": thinking})

    @property
    def callable(self) -> Tools:
        """All tools that there are."""
        return (*(self.tools or ()), *self.loaded)


@dataclass(frozen=True)
class PreparedPrompt:
    """`said`: where the last message ends. Behind it, the next prompt may differ: templates leave old thoughts out."""

    marked: str  # as rendered
    ids: list[int]
    said: int
    splitter: Splitter
    boundaries: tuple[int, ...] = ()  # where the part ends that other conversations may begin with too
    breakpoints: Mapping[int, float] = field(default_factory=dict)  # and for how long each is to be kept at least


def prepare(chat: ChatFormat, conversation: Conversation, transcripts: Transcripts) -> PreparedPrompt:
    """Typed errors where messages or tools are not what a template takes."""
    c = conversation
    messages = transcripts.restore(read_messages(c.messages))
    variables = {"continue_final_message": True, **c.variables}
    prompt = chat.prompt(messages, c.tools, **variables)
    ids = transcripts.encode(chat, prompt)
    positions = _Positions(chat, prompt.marked, ids)
    splitter = chat.splitter(prompt, c.callable, calls=c.choice.mode != "none")
    pen, boundaries, breakpoints = Pen(), list[int](), dict[int, float]()
    signed = transcripts.restore(read_messages(c.messages, pen)), read_tools(c.tools, pen)
    for place in pen.find(chat.prompt(*signed, **variables).marked, prompt.marked):
        at = positions.of(place.offset)
        if place.keep_s is None:
            boundaries.append(at)
        else:
            breakpoints[at] = max(place.keep_s, breakpoints.get(at, 0.0))
    said = positions.of(_said(chat, c, messages, prompt.marked))
    return PreparedPrompt(prompt.marked, ids, said, splitter, tuple(boundaries), breakpoints)


def _said(chat: ChatFormat, c: Conversation, messages: Messages, marked: str) -> int:
    """Characters of the prompt up to the end of the last message."""
    try:
        bare = chat.prompt(messages, c.tools, **{**c.variables, "add_generation_prompt": False}).marked
    except InputError:  # some templates refuse to end so
        return len(marked)
    if marked.startswith(bare):
        return len(bare)
    return len(commonprefix([bare, marked]))  # noqa: RUF071 (characters are meant)


class _Positions:
    """Tokens of a prompt that lie before one of its characters."""

    def __init__(self, chat: ChatFormat, marked: str, ids: list[int]) -> None:
        self._chat, self._marked, self._ids = chat, marked, ids
        self._ends = list(accumulate(map(chat.tokenizer.n_bytes, ids))) if chat.tokenizer.is_byte_level else []

    def of(self, offset: int) -> int:
        if offset == len(self._marked):
            return len(self._ids)
        if self._ends and self._ends[-1] == _n_bytes(self._marked):
            return bisect_right(self._ends, _n_bytes(self._marked[:offset]))
        return common_length(self._chat.encode(Prompt(self._marked[:offset])), self._ids)  # the tokenizer changed the text


def _n_bytes(marked: str) -> int:
    return len(Prompt(marked).text.encode())
