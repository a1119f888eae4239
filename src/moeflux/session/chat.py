"""A conversation with a model: its messages, and a session that keeps as much of them as it can from turn to turn."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from moeflux.core.atomic_file import write_atomically
from moeflux.core.errors import FormatError, InputError
from moeflux.core.json_file import read_json
from moeflux.runtime.engine import Engine
from moeflux.runtime.prefill import OnPrefill
from moeflux.runtime.snapshot import common_length
from moeflux.sampling.constraint import Grammar
from moeflux.session.events import Finish, Token, text_of
from moeflux.session.generate import Generation, Request
from moeflux.session.model_text import ModelText
from moeflux.session.session import Session
from moeflux.text.chat import Prompt, Tools
from moeflux.text.regions import Part, Text
from moeflux.text.tools import CallEnd, ToolCall

CHECKPOINTS = 2  # states that are kept where they cannot be cut: each costs what one sequence costs
ROLES = ("system", "user", "assistant", "tool")


class Answer(Iterator[Token]):
    """Iterate for tokens. Once it is over, the conversation has the answer as its last message."""

    def __init__(self, chat: Chat, generation: Generation, prompt: Prompt, ids: list[int]) -> None:
        self._chat, self._generation, self._prompt = chat, generation, prompt
        self._prompt_ids, self._ids = ids, list[int]()
        self._parts: list[Part] = []
        self._closed = False

    def __next__(self) -> Token:
        try:
            token = next(self._generation)
        except StopIteration:
            self._close()
            raise
        self._ids.append(token.id)
        self._parts += token.parts
        return token

    def cancel(self) -> None:
        self._generation.cancel()

    @property
    def finish(self) -> Finish | None:
        return self._generation.finish

    @property
    def text(self) -> str:
        return text_of(tuple(self._parts))

    @property
    def reasoning(self) -> str:
        return "".join(part.text for part in self._parts if isinstance(part, Text) and part.region == "reasoning")

    @property
    def calls(self) -> tuple[ToolCall, ...]:
        return tuple(part.call for part in self._parts if isinstance(part, CallEnd))

    def message(self) -> dict[str, Any]:
        """As templates take it."""
        calls = [{"type": "function", "function": {"name": c.name, "arguments": c.arguments}} for c in self.calls]
        thought = {"reasoning_content": self.reasoning} if self.reasoning else {}
        return {"role": "assistant", "content": self.text, **thought, **({"tool_calls": calls} if calls else {})}

    def _close(self) -> None:
        if self.finish and not self._closed:
            self._closed = True
            self._parts += self.finish.parts
            self._chat._answered(self, self._prompt.marked, self._prompt_ids, self._ids)


class Chat:
    """`thinking`: passed to the template as enable_thinking; None: what the template does by itself."""

    def __init__(
        self,
        engine: Engine,
        text: ModelText,
        *,
        system: str | None = None,
        tools: Tools | None = None,
        thinking: bool | None = None,
    ) -> None:
        self._engine, self._text, self._tools = engine, text, tools
        self._format = text.chat
        self._variables = {} if thinking is None else {"enable_thinking": thinking}
        self.system = system
        self.messages: list[dict[str, Any]] = []  # without the system prompt
        self._session = Session(engine, anchor_every=None)
        self._session.sequence.limit_checkpoints(CHECKPOINTS)
        self._known: tuple[str, list[int]] = ("", [])  # text as rendered and written so far, and the tokens that it was

    def ask(
        self,
        content: str,
        *,
        max_tokens: int | None = None,
        stop: Sequence[str] = (),
        grammar: Grammar | None = None,
        progress: OnPrefill | None = None,
        **sampling: Any,
    ) -> Answer:
        """The user says something. An answer that is cancelled before it begins leaves the conversation as it was."""
        system = [{"role": "system", "content": self.system}] if self.system else []
        self.messages.append({"role": "user", "content": content})
        try:
            prompt = self._format.prompt([*system, *self.messages], self._tools, **self._variables)
            ids = self._encode(prompt)
            splitter = self._format.splitter(prompt, self._tools)
            params = self._text.sampling(**sampling)
            said = (self._said([*system, *self.messages], ids),)
            request = Request(ids, params, max_tokens, tuple(stop), grammar, splitter, said)
            generation = Generation(self._engine, self._text, request, self._session, progress)
        except BaseException:
            self.messages.pop()
            raise
        return Answer(self, generation, prompt, ids)

    def reset(self) -> None:
        """Forgets everything but the system prompt."""
        self.messages.clear()
        self._session.clear()
        self._known = ("", [])

    @property
    def n_tokens(self) -> int:
        """That the session holds."""
        return len(self._session.sequence)

    def save(self, path: Path) -> None:
        """The conversation as JSON, whole or not at all."""
        text = json.dumps({"system": self.system, "messages": self.messages}, ensure_ascii=False, indent=1)
        write_atomically(path, lambda file: file.write(text.encode(errors="backslashreplace")))

    def load(self, path: Path) -> None:
        """A conversation that was saved takes the place of this one."""
        value = read_json(path)
        messages, system = value.get("messages"), value.get("system")
        good = isinstance(messages, list) and all(
            isinstance(m, dict) and m.get("role") in ROLES and isinstance(m.get("content"), str) for m in messages
        )
        if not good or not (system is None or isinstance(system, str)):
            raise FormatError("this is not a saved conversation", where=str(path))
        self.reset()
        self.system, self.messages = system, list(messages or ())

    def _encode(self, prompt: Prompt) -> list[int]:
        """What is known keeps the tokens that it was: encoded anew, a model's own text can be cut in another way."""
        text, ids = self._known
        if ids and prompt.marked.startswith(text):
            return [*ids, *self._format.encode(Prompt(prompt.marked[len(text) :]))]
        return self._format.encode(prompt)

    def _said(self, messages: list[dict[str, Any]], ids: list[int]) -> int:
        """Where the last message ends. Behind it, the next prompt may differ: templates leave old thoughts out."""
        try:
            prompt = self._format.prompt(messages, self._tools, add_generation_prompt=False, **self._variables)
        except InputError:  # some templates refuse to end so
            return len(ids)
        return common_length(self._encode(prompt), ids)

    def _answered(self, answer: Answer, prompt: str, prompt_ids: list[int], ids: list[int]) -> None:
        message = answer.message()
        if not message["content"] and not answer.calls and answer.finish and answer.finish.reason == "cancelled":
            self.messages.pop()
            return
        self.messages.append(message)
        self._known = (prompt + self._text.tokenizer.decode(ids), [*prompt_ids, *ids])
