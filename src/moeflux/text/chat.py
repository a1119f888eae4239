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

from moeflux.core.errors import InputError, MissingTensorError
from moeflux.text.calls import CallGrammars
from moeflux.text.fit import Abilities, fit
from moeflux.text.framing import find_call_frame, find_thought_end, plain_frame
from moeflux.text.messages import Arguments, read_messages, read_tools
from moeflux.text.pen import END
from moeflux.text.plain_data import PlainReader
from moeflux.text.regions import Splitter, Syntax, find_syntax, with_tags, without_calls
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
        added_words = _any_of(set(tokenizer.added)).pattern
        self._bounds = re.compile(f"{OPEN}({self._control.pattern}){CLOSE}|{added_words}")
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
        """Messages and tools as clients send them: see `text/messages`.

        `continue_final_message`: where the last one is an assistant's, the prompt ends in it.
        """
        reader = PlainReader()
        more = {name: reader.value(value, f"template variable {name!r}") for name, value in variables.items()}
        read = read_messages(messages)
        goes_on = more.pop("continue_final_message", False) is True and can_go_on(read)
        if goes_on:
            read[-1]["content"] += END
            more["add_generation_prompt"] = False
        marked = [_mark(m, self._said if m["role"] == "assistant" else self._control) for m in read]
        fitted, shown_tools = fit(
            marked, _mark(read_tools(tools), self._control), self.can, lambda: self.call_grammars.frame
        )
        text = self.template.render(fitted, tools=shown_tools, **_mark(more, self._control))
        if not goes_on:
            return Prompt(text)
        said, found, _ = text.rpartition(END)
        if not found:
            raise InputError("the chat template does not show the answer that is to be gone on with", where="messages")
        return Prompt(said)

    @cached_property
    def can(self) -> Abilities:
        return Abilities(lambda messages, tools: self.template.render(messages, tools=tools))

    @cached_property
    def thought_end(self) -> list[int] | None:
        """Tokens that end a thought, with what stands behind it; None: the model has no thoughts."""
        text = find_thought_end(self.syntax, lambda m: self.template.render(m, add_generation_prompt=False))
        return None if text is None else self.tokenizer.encode_rendered(text)

    @cached_property
    def thought_gap(self) -> list[int]:
        """Tokens between the marker that ends a thought and what is said."""
        text = find_thought_end(self.syntax, lambda m: self.template.render(m, add_generation_prompt=False)) or ""
        return self.tokenizer.encode_plain(text.partition(self.syntax.markers.get("answer", ""))[2]) if text else []

    @cached_property
    def call_grammars(self) -> CallGrammars:
        syntax = self.calling
        frame = find_call_frame(syntax, lambda m: self.template.render(m, add_generation_prompt=False))
        if frame is None or not self.can.calls:
            frame = plain_frame(syntax)
        return CallGrammars(
            frame, {text: id for text, id in self.tokenizer.added.items() if text in syntax.markers.values()}
        )

    @property
    def call_openers(self) -> tuple[int, ...]:
        """Tokens with which calls begin."""
        markers = (self.syntax.markers.get("section", ""), self.syntax.markers.get("call", ""))
        return tuple(self.tokenizer.added[text] for text in markers if text in self.tokenizer.added)

    @cached_property
    def calling(self) -> Syntax:
        """The syntax of an answer that may have calls: where a model has none of its own, tools are told as text."""
        return self.syntax if "call" in self.syntax.markers else with_tags(self.syntax)

    def rendered(self, ids: Sequence[int]) -> str:
        """The rendered prompt that these tokens are of, with the marks around spellings that are text."""
        pieces, text, added = list[str](), list[int](), {id: content for content, id in self.tokenizer.added.items()}
        for id in (*ids, None):
            if id is not None and id not in added:
                text.append(id)
                continue
            if text:
                pieces.append(_mark(self.tokenizer.decode(text), self._control))
                text = []
            if id is not None:
                pieces.append(added[id])
        return "".join(pieces)

    def encode(self, prompt: Prompt) -> list[int]:
        ids: list[int] = []
        for i, piece in enumerate(self._marks.split(prompt.marked)):
            if piece:  # every other one was marked; a lone mark leaves None
                ids += self.tokenizer.encode_plain(piece) if i % 2 else self.tokenizer.encode_rendered(piece)
        return ids

    def text_at(self, prompt: Prompt, offset: int) -> str:
        """From there on, up to the next token that is no part of a text."""
        for found in self._bounds.finditer(prompt.marked, offset):
            if not found[0].startswith(OPEN):
                return prompt.marked[offset : found.start()]
        return prompt.marked[offset:]

    def splitter(self, prompt: Prompt, tools: Tools | None = None, *, calls: bool = True) -> Splitter:
        """For the answer to this prompt. `calls`: False where it may call nothing."""
        reasoning = self.syntax.opens_reasoning(prompt.text)
        syntax = (self.calling if tools else self.syntax) if calls else without_calls(self.syntax)
        return Splitter(syntax, self.tokenizer, reasoning=reasoning, schemas=schemas_of(read_tools(tools)))


def can_go_on(messages: Sequence[Message]) -> bool:
    """Whether the last one is an answer that has begun."""
    last = messages[-1]
    return last["role"] == "assistant" and not last.get("tool_calls") and bool(last.get("content"))


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
