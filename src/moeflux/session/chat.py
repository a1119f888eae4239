"""A conversation with a model: its messages, and a session that keeps as much of them as it can from turn to turn."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from moeflux.core.atomic_file import write_atomically
from moeflux.core.errors import FormatError
from moeflux.core.json_file import read_json
from moeflux.runtime.engine import Engine
from moeflux.runtime.prefill import OnPrefill
from moeflux.sampling.constraint import Grammar
from moeflux.session.events import Finish, Token, text_of
from moeflux.session.generate import Generation
from moeflux.session.model_text import ModelText
from moeflux.session.prompt import Conversation, Messages, PreparedPrompt, prepare
from moeflux.session.session import Session
from moeflux.session.transcripts import Transcripts
from moeflux.session.writer import Request
from moeflux.text.chat import Tools
from moeflux.text.messages import read_messages, write_answer
from moeflux.text.regions import Part, Text
from moeflux.text.stops import read_stops
from moeflux.text.tools import CallEnd, ToolCall

ROLES = ("system", "user", "assistant", "tool")


class Answer(Iterator[Token]):
    """Iterate for tokens. Once it is over, the conversation has the answer as its last message.

    An answer that fails, or is cancelled before it says anything, takes its question out of the conversation again.
    """

    def __init__(self, chat: Chat, generation: Generation, prompt: PreparedPrompt, n_before: int) -> None:
        self._chat, self._generation, self._prompt, self._n_before = chat, generation, prompt, n_before
        self._ids: list[int] = []
        self._parts: list[Part] = []
        self._closed = False

    def __next__(self) -> Token:
        try:
            token = next(self._generation)
        except StopIteration:
            self._close()
            raise
        except BaseException:
            self._take_back()
            raise
        self._ids.append(token.id)
        self._parts += token.parts
        return token

    def cancel(self) -> None:
        self._generation.cancel()

    def end(self) -> None:
        """Cancels it and closes it, if that has not been done."""
        self.cancel()
        for _ in self:
            pass

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
        return write_answer(self.text, self.reasoning, self.calls)

    def _close(self) -> None:
        if self._closed or self.finish is None:
            return
        self._parts += self.finish.parts
        message = self.message()
        if not message["content"] and not self.calls and self.finish.reason == "cancelled":
            self._take_back()
            return
        self._closed = True
        self._chat._answered(message, self._prompt, self._ids, self.calls)

    def _take_back(self) -> None:
        if not self._closed:
            self._closed = True
            del self._chat.messages[self._n_before :]


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
        self._thinking = thinking
        self.system = system
        self.messages: list[dict[str, Any]] = []  # without the system prompt
        self._session = Session(engine, anchor_every=None)
        self._session.sequence.limit_checkpoints(engine.config.checkpoints)
        self._transcripts = Transcripts()
        self._answer: Answer | None = None

    def ask(self, content: str | Sequence[Mapping[str, Any]], **options: Any) -> Answer:
        """The user says something: a text, or parts of a text as clients send them. Options as for `send`."""
        return self.send([{"role": "user", "content": content}], **options)

    def send(
        self,
        messages: Messages,
        *,
        tools: Tools | None = None,
        max_tokens: int | None = None,
        stop: str | Sequence[str] = (),
        grammar: Grammar | None = None,
        progress: OnPrefill | None = None,
        **sampling: Any,
    ) -> Answer:
        """Messages that follow: what the user says, results of tools. `tools`: in place of the conversation's own.

        An answer that is still being written is ended first. What is refused leaves the conversation as it was.
        """
        if self._answer is not None:
            self._answer.end()
        n_before = len(self.messages)
        self.messages += read_messages(messages)
        try:
            system = [{"role": "system", "content": self.system}] if self.system else []
            wanted = Conversation.of([*system, *self.messages], tools or self._tools, self._thinking)
            prompt = prepare(self._format, wanted, self._transcripts)
            params = self._text.sampling(**sampling)
            request = Request(prompt.ids, params, max_tokens, read_stops(stop), grammar, prompt.splitter, (prompt.said,))
            generation = Generation(self._engine, self._text, request, self._session, progress)
        except BaseException:
            del self.messages[n_before:]
            raise
        self._answer = Answer(self, generation, prompt, n_before)
        return self._answer

    def reset(self) -> None:
        """Forgets everything but the system prompt."""
        if self._answer is not None:
            self._answer.end()
        self.messages.clear()
        self._session.clear()
        self._transcripts.clear()

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

    def _answered(self, message: dict[str, Any], prompt: PreparedPrompt, ids: list[int], calls: Sequence[ToolCall]) -> None:
        self.messages.append(message)
        self._transcripts.remember(prompt.marked + self._format.rendered(ids), [*prompt.ids, *ids])
        self._transcripts.remember_calls(calls)
