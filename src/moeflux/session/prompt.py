"""A conversation as tokens: rendered, encoded, with the places where a later one may go another way."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from threading import Lock
from typing import Any

from moeflux.core.errors import InputError
from moeflux.runtime.snapshot import common_length
from moeflux.text.calls import AUTO, ToolChoice
from moeflux.text.chat import ChatFormat, Prompt, Tools
from moeflux.text.regions import Splitter

MOST_TOKENS = 2**20  # of all remembered transcripts together

Messages = Sequence[Mapping[str, Any]]


@dataclass(frozen=True)
class Conversation:
    """What a caller sends: messages, the tools that the model may call, and variables for the template."""

    messages: Messages
    tools: Tools | None = None
    variables: Mapping[str, Any] = field(default_factory=dict)  # enable_thinking, …
    choice: ToolChoice = AUTO

    @classmethod
    def of(cls, messages: Messages, tools: Tools | None = None, thinking: bool | None = None) -> Conversation:
        """`thinking` None: what the template does by itself."""
        return cls(messages, tools, {} if thinking is None else {"enable_thinking": thinking})


@dataclass(frozen=True)
class PreparedPrompt:
    """`said`: where the last message ends. Behind it, the next prompt may differ: templates leave old thoughts out."""

    marked: str  # as rendered
    ids: list[int]
    said: int
    splitter: Splitter


class Transcripts:
    """Rendered texts and the tokens that they were. From any thread.

    What is known keeps its tokens: encoded anew, a model's own text can be cut in another way, and its state would be lost.
    """

    def __init__(self, most_tokens: int = MOST_TOKENS) -> None:
        self._known: OrderedDict[str, list[int]] = OrderedDict()  # the one used longest ago first
        self._most, self._n_tokens, self._lock = most_tokens, 0, Lock()

    def encode(self, chat: ChatFormat, prompt: Prompt) -> list[int]:
        with self._lock:
            begins = max((text for text in self._known if prompt.marked.startswith(text)), key=len, default=None)
            known = [] if begins is None else self._known[begins]
            if begins is not None:
                self._known.move_to_end(begins)
        return [*known, *chat.encode(Prompt(prompt.marked[len(begins or "") :]))]

    def remember(self, marked: str, ids: list[int]) -> None:
        with self._lock:
            self._n_tokens -= len(self._known.pop(marked, ()))
            self._known[marked] = ids
            self._n_tokens += len(ids)
            while self._n_tokens > self._most:
                self._n_tokens -= len(self._known.popitem(last=False)[1])

    def clear(self) -> None:
        with self._lock:
            self._known.clear()
            self._n_tokens = 0


def prepare(chat: ChatFormat, conversation: Conversation, transcripts: Transcripts) -> PreparedPrompt:
    """Typed errors where messages or tools are not what a template takes."""
    c = conversation
    prompt = chat.prompt(c.messages, c.tools, **c.variables)
    ids = transcripts.encode(chat, prompt)
    try:
        bare = chat.prompt(c.messages, c.tools, add_generation_prompt=False, **c.variables)
        said = common_length(transcripts.encode(chat, bare), ids)
    except InputError:  # some templates refuse to end so
        said = len(ids)
    return PreparedPrompt(prompt.marked, ids, said, chat.splitter(prompt, c.tools))
