"""What a model writes, split while it streams: reasoning, text for the reader, tool calls.

Where a marker is a token of its own, only that token is the marker: text that merely spells it stays text. Where it is not,
its spelling is looked for, and what could be the beginning of one waits. White space between a region and a marker frames
the region and is not part of it. Stop sequences are looked for in what the model writes for the reader, white space in front
of a marker included: there is no knowing yet that a marker will come.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Literal

from moeflux.text.stops import Stops
from moeflux.text.tokenizer import Tokenizer
from moeflux.text.tools import CallPart, CallReader, HeadedCall, Schemas, Style, TaggedCall

Region = Literal["text", "reasoning"]
Role = Literal["think", "answer", "section", "section_end", "call", "separator", "call_end"]


@dataclass(frozen=True)
class Text:
    text: str
    region: Region = "text"


Part = Text | CallPart


@dataclass(frozen=True)
class Syntax:
    """How a model marks its regions."""

    markers: Mapping[Role, str]
    style: Style = "tagged"

    def opens_reasoning(self, prompt: str) -> bool:
        """Whether a prompt ends inside reasoning, so that the model goes on there."""
        think, answer = self.markers.get("think"), self.markers.get("answer")
        if think is None or answer is None:
            return False
        return prompt.rstrip().endswith(think)


_THINK: dict[Role, str] = {"think": "<think>", "answer": "</think>"}
_TAGGED: dict[Role, str] = {"call": "<tool_call>", "call_end": "</tool_call>"}
_DEEPSEEK: dict[Role, str] = {
    "section": "<｜tool▁calls▁begin｜>",
    "section_end": "<｜tool▁calls▁end｜>",
    "call": "<｜tool▁call▁begin｜>",
    "separator": "<｜tool▁sep｜>",
    "call_end": "<｜tool▁call▁end｜>",
}
_KIMI: dict[Role, str] = {
    "section": "<|tool_calls_section_begin|>",
    "section_end": "<|tool_calls_section_end|>",
    "call": "<|tool_call_begin|>",
    "separator": "<|tool_call_argument_begin|>",
    "call_end": "<|tool_call_end|>",
}


def find_syntax(tokenizer: Tokenizer, template: str) -> Syntax:
    """From what the tokenizer has and the template says."""

    def known(marker: str) -> bool:
        return marker in tokenizer.added or marker in template

    think = _THINK if known("<think>") else {}
    styles: tuple[tuple[Style, dict[Role, str]], ...] = (("deepseek", _DEEPSEEK), ("kimi", _KIMI), ("tagged", _TAGGED))
    for style, markers in styles:
        if known(markers["call"]):
            return Syntax({**think, **markers}, style)
    return Syntax(think)


def with_tags(syntax: Syntax) -> Syntax:
    """With calls in the way that most models learnt."""
    return Syntax({**syntax.markers, **_TAGGED})


def without_calls(syntax: Syntax) -> Syntax:
    thoughts: dict[Role, str] = {role: text for role, text in syntax.markers.items() if role in ("think", "answer")}
    return Syntax(thoughts, syntax.style)


_MEANT: Mapping[str, tuple[Role, ...]] = {  # markers that mean something, by region
    "text": ("think", "section", "call"),
    "reasoning": ("answer",),
    "section": ("call", "section_end"),
    "call": ("separator", "call_end"),
}


class Splitter:
    """Feed it tokens' texts in order, and markers that came as tokens; it gives parts as they become certain."""

    def __init__(
        self, syntax: Syntax, tokenizer: Tokenizer, *, reasoning: bool = False, schemas: Schemas | None = None
    ) -> None:
        """`reasoning`: the prompt ended inside reasoning. `schemas`: of the tools, to type what models write untyped."""
        self._syntax, self._schemas = syntax, schemas or {}
        added = tokenizer.added
        self.tokens: Mapping[int, Role] = {added[text]: role for role, text in syntax.markers.items() if text in added}
        spelled = {text: role for role, text in syntax.markers.items() if text not in added}
        self._spelled = {region: _Spelled(spelled, roles) for region, roles in _MEANT.items()}
        self._region: Region | Literal["section", "call"] = "reasoning" if reasoning else "text"
        self._framed = reasoning  # white space that comes now is framing
        self._held = ""  # could become a marker
        self._space: list[str] = []  # could turn out to be framing
        self._call: CallReader | None = None
        self._n_calls = 0
        self._stops = Stops()

    @property
    def reasoning(self) -> bool:
        """Whether what comes now is reasoning."""
        return self._region == "reasoning"

    def watch(self, stops: Stops) -> None:
        """After one of them was found in text for the reader, nothing more comes."""
        self._stops = stops

    def turn_off(self) -> None:
        """From now on everything is text, whatever it spells."""
        self.tokens, self._spelled = {}, {region: _Spelled({}, ()) for region in _MEANT}

    def add(self, text: str) -> Iterator[Part]:
        text, self._held, at = self._held + text, "", 0
        while at < len(text) and self._stops.found is None:
            spelled = self._spelled[self._region]
            found = spelled.search(text, at)
            if found is None:
                n = spelled.held_back(text[at:])
                self._held = text[len(text) - n :]
                yield from self._put(text[at : len(text) - n])
                return
            yield from self._put(text[at : found.start()])
            yield from self._turn(spelled.roles[found[0]], found[0])
            at = found.end()

    def mark(self, token: int) -> Iterator[Part]:
        """A token that is a marker came."""
        yield from self._flush()
        role = self.tokens[token]
        yield from self._turn(role, self._syntax.markers[role])

    def finish(self) -> Iterator[Part]:
        """The model has ended."""
        yield from self._flush()
        if self._call is not None:
            yield from self._end_call(closed=False, marker="")
        yield from self._frame(self._stops.finish())
        yield from self._give("".join(self._space))
        self._space.clear()

    def _flush(self) -> Iterator[Part]:
        held, self._held = self._held, ""
        yield from self._put(held)

    def _put(self, text: str) -> Iterator[Part]:
        if self._region == "call":
            assert self._call is not None
            yield from self._call.feed(text)
        elif self._region != "section":
            if self._framed:
                text = text.lstrip()
            if not text:
                return
            self._framed = False
            yield from self._frame(self._stops.add(text) if self._region == "text" else text)

    def _frame(self, text: str) -> Iterator[Part]:
        """White space waits until it is known whether something follows."""
        body = text.rstrip()
        if body:
            yield from self._give("".join(self._space) + body)
            self._space.clear()
        if len(body) < len(text):
            self._space.append(text[len(body) :])

    def _give(self, text: str) -> Iterator[Part]:
        if text:
            yield Text(text, "reasoning" if self._region == "reasoning" else "text")

    def _turn(self, role: Role, marker: str) -> Iterator[Part]:
        if role == "separator" and isinstance(self._call, HeadedCall):
            yield from self._call.separate(marker)
            return
        if self._region == "text":  # a region is over, and with it what could have been a stop
            yield from self._frame(self._stops.finish())
        if self._call is not None:
            yield from self._end_call(closed=role == "call_end", marker=marker)
        if self._stops.found is not None:
            return
        self._space.clear()
        self._framed = True
        match role:
            case "think":
                self._region = "reasoning"
            case "section":
                self._region = "section"
            case "call":
                self._region, self._call = "call", self._new_call()
            case "call_end" if "section" in self._syntax.markers:
                self._region = "section"
            case _:
                self._region = "text"

    def _new_call(self) -> CallReader:
        if self._syntax.style == "tagged":
            return TaggedCall(self._n_calls, self._schemas)
        return HeadedCall(self._n_calls, self._syntax.style)

    def _end_call(self, closed: bool, marker: str) -> Iterator[Part]:
        """What turned out to be no call is shown as it was written."""
        call, self._call = self._call, None
        assert call is not None
        parts = list(call.finish(closed))
        self._region = "text"
        if parts:
            self._n_calls += 1
            yield from parts
        else:
            written = self._syntax.markers["call"] + call.text + (marker if closed else "")
            yield from self._give(self._stops.add(written))
            yield from self._give(self._stops.finish())


class _Spelled:
    """Markers that are no tokens, where they mean something."""

    def __init__(self, markers: Mapping[str, Role], meant: tuple[Role, ...]) -> None:
        self.roles = {text: role for text, role in markers.items() if role in meant}
        self._any = re.compile("|".join(map(re.escape, self.roles)) or "(?!)")
        self._most = max(map(len, self.roles), default=1) - 1

    def search(self, text: str, at: int) -> re.Match[str] | None:
        return self._any.search(text, at) if self.roles else None

    def held_back(self, text: str) -> int:
        """How many characters at the end of `text` could be the beginning of a marker."""
        most = min(len(text), self._most)
        return next((n for n in range(most, 0, -1) if any(word.startswith(text[-n:]) for word in self.roles)), 0)
