"""How a checkpoint holds a conversation: its tokenizer, its template and the syntax of what it answers.

What people write can spell tokens that are structure ("<|im_end|>"). Such spellings are marked before rendering and encoded
as plain text, so that no message can end its turn or begin another's.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence, Set
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from moeflux.core.errors import MissingTensorError, MoefluxError
from moeflux.text.messages import Arguments, read_messages, read_tools
from moeflux.text.plain_data import PlainReader
from moeflux.text.regions import Splitter, Syntax, find_syntax
from moeflux.text.template import ChatTemplate, Message
from moeflux.text.tokenizer import Tokenizer
from moeflux.text.tools import schemas_of

Tools = Sequence[Mapping[str, Any]]
OPEN, CLOSE = "\ufdd0", "\ufdd1"  # no characters, and never will be: Unicode keeps them for inner use


@dataclass(frozen=True)
class Prompt:
    """A rendered conversation, with the marks around spellings that are text."""

    marked: str

    @property
    def text(self) -> str:
        return self.marked.replace(OPEN, "").replace(CLOSE, "")


class ChatFormat:
    def __init__(self, tokenizer: Tokenizer, template: ChatTemplate) -> None:
        self.tokenizer = tokenizer
        self.template = template
        self.syntax: Syntax = find_syntax(tokenizer, template.source)
        used = template.source + "".join(self.syntax.markers.values())
        added = tokenizer.added.items()
        control = {text for text, id in added if text.strip() and (id in tokenizer.special or text in used)}
        thoughts = {self.syntax.markers[role] for role in ("think", "answer") if role in self.syntax.markers}
        self._control = _any_of(control)
        self._said = _any_of(control - thoughts)  # templates take thoughts out of what an assistant said
        self._marks = re.compile(f"{OPEN}({self._control.pattern}){CLOSE}|[{OPEN}{CLOSE}]")

    @classmethod
    def open(cls, folder: Path, tokenizer: Tokenizer | None = None) -> ChatFormat:
        tokenizer = tokenizer or Tokenizer.open(folder)
        template = ChatTemplate.open(folder, tokenizer)
        if template is None:
            raise MissingTensorError(
                "there is no chat template",
                where=str(folder),
                hint="this model continues texts: use `moeflux generate`, or add a chat_template.jinja",
            )
        return cls(tokenizer, template)

    def prompt(self, messages: Sequence[Message], tools: Tools | None = None, **variables: Any) -> Prompt:
        """Messages and tools as clients send them: see `text/messages`."""
        read = [self._with_content(message) for message in read_messages(messages)]
        reader = PlainReader()
        more = {name: reader.value(value, f"template variable {name!r}") for name, value in variables.items()}
        marked = [_mark(m, self._said if m["role"] == "assistant" else self._control) for m in read]
        return Prompt(
            self.template.render(marked, tools=_mark(read_tools(tools), self._control), **_mark(more, self._control))
        )

    def _with_content(self, message: dict[str, Any]) -> dict[str, Any]:
        return message if message["content"] else {**message, "content": self._silence if "tool_calls" in message else ""}

    @cached_property
    def _silence(self) -> str | None:
        """The content of a message that only calls tools: some templates fail at None, some show calls only where it is."""
        call = {"id": "0", "type": "function", "function": {"name": "probed", "arguments": Arguments({}, "{}")}}
        for content in ("", None):
            said = {"role": "assistant", "content": content, "tool_calls": [call]}
            asked: list[Message] = [{"role": "user", "content": "?"}, said]
            try:
                if "probed" in self.template.render(asked):
                    return content
            except MoefluxError:
                continue
        return ""

    def encode(self, prompt: Prompt) -> list[int]:
        ids: list[int] = []
        for i, piece in enumerate(self._marks.split(prompt.marked)):
            if piece:  # every other one was marked; a lone mark leaves None
                ids += self.tokenizer.encode_plain(piece) if i % 2 else self.tokenizer.encode_rendered(piece)
        return ids

    def splitter(self, prompt: Prompt, tools: Tools | None = None) -> Splitter:
        """For the answer to this prompt."""
        reasoning = self.syntax.opens_reasoning(prompt.text)
        return Splitter(self.syntax, self.tokenizer, reasoning=reasoning, schemas=schemas_of(read_tools(tools)))


def _any_of(words: Set[str]) -> re.Pattern[str]:
    """A word comes before those that it contains."""
    return re.compile("|".join(re.escape(word) for word in sorted(words, key=len, reverse=True)) or "(?!)")


def _mark(value: Any, control: re.Pattern[str]) -> Any:
    if isinstance(value, str):
        bare = value.replace(OPEN, "").replace(CLOSE, "")
        return control.sub(f"{OPEN}\\g<0>{CLOSE}", bare)
    if isinstance(value, Arguments):
        return Arguments(
            {_mark(key, control): _mark(item, control) for key, item in value.items()}, _mark(str(value), control)
        )
    if isinstance(value, Mapping):
        return {_mark(key, control): _mark(item, control) for key, item in value.items()}
    return [_mark(item, control) for item in value] if isinstance(value, (list, tuple)) else value
