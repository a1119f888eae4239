"""`/v1/completions`: texts and token ids continued or scored."""

from __future__ import annotations

import json
import secrets
import time
from dataclasses import dataclass, field
from typing import Any

from pydantic import BaseModel

from moeflux.serve.answering import Told
from moeflux.serve.asks import Ask
from moeflux.serve.errors import Problem, openai_body, refuse
from moeflux.serve.openai.completion_types import MOST_PROMPTS, Completion, CompletionRequest
from moeflux.serve.openai.fields import grammar_of
from moeflux.serve.openai.usage import shown, usage_of
from moeflux.serve.sse import COMMENT, Sse
from moeflux.session.events import Finish, Scored, Token, text_of
from moeflux.session.handle import RequestOptions
from moeflux.session.model_text import ModelText
from moeflux.text.tokenizer import Tokenizer

OnePrompt = str | list[int]


def prompts_of(request: CompletionRequest) -> list[OnePrompt]:
    prompt = request.prompt
    many: list[Any] = [prompt] if isinstance(prompt, str) or isinstance(prompt[0] if prompt else "", int) else list(prompt)
    if not many or len(many) * (request.n or 1) > MOST_PROMPTS:
        raise refuse(f"{len(many)} prompts; it can be 1 to {MOST_PROMPTS} answers", "prompt")
    return many


def asks_of(request: CompletionRequest, text: ModelText) -> list[Ask]:
    request.check_known()
    if request.suffix:
        raise refuse("suffix is not supported: this model continues a text and does not fill it in", "suffix")
    n = request.n or 1
    if request.best_of is not None and request.best_of != n:
        raise refuse("best_of is not supported beyond n", "best_of")
    sampling, grammar = request.sampling(request.logprobs), grammar_of(request.structured_outputs)
    score = request.logprobs if request.echo else None
    asks = []
    for at, prompt in enumerate(prompts_of(request)):
        for i in range(n):
            changes = sampling.for_answer(text, i)
            options = RequestOptions(request.max_tokens, request.stops, grammar, changes, score=score)
            asks.append(Ask(prompt, options, beside=at * n if i else None))
    return asks


class CompletionAnswer:
    """Each choice grows by pieces: a piece is sent, and is part of the whole."""

    def __init__(self, request: CompletionRequest, tokenizer: Tokenizer, model: str, fingerprint: str) -> None:
        options = request.stream_options
        self._usage_wanted, self._n = bool(options and options.include_usage), request.n or 1
        self._echo, self._scores = bool(request.echo), bool(request.echo) and request.logprobs is not None
        self._head = {"id": f"cmpl-{secrets.token_hex(12)}", "object": "text_completion", "created": int(time.time()),
                      "model": model, "system_fingerprint": fingerprint}  # fmt: skip
        self._tokenizer = tokenizer
        prompts = prompts_of(request)
        logprobs = request.logprobs is not None
        self._choices = [
            _Choice(i, prompts[i // self._n], tokenizer, logprobs, bool(request.return_token_ids))
            for i in range(len(prompts) * self._n)
        ]

    def begin(self) -> list[Sse]:
        if not self._echo or self._scores:  # a scored prompt comes with its scores
            return []
        return [self._piece(choice, choice.prompt_text) for choice in self._choices]

    def take(self, told: Told) -> list[Sse]:
        choice = self._choices[told.index]
        match told.event:
            case Scored(tokens):
                for token in tokens:
                    choice.note(token)
                return [self._piece(choice, choice.prompt_text)]
            case Token() as token:
                choice.note(token)
                return [self._piece(choice, token.text)] if token.text else []
            case Finish() as finish:
                choice.end = finish
                return [self._piece(choice, text_of(finish.parts))]
        return []

    def end(self) -> list[Sse]:
        done = [Sse("[DONE]")]
        return [self._sse([], usage=self._usage()), *done] if self._usage_wanted else done

    def fail(self, problem: Problem) -> list[Sse]:
        return [Sse(json.dumps(openai_body(problem)))]

    def beat(self) -> bytes:
        return COMMENT

    def whole(self) -> BaseModel:
        choices = [choice.whole() for choice in self._choices]
        return Completion.model_validate({**self._head, "choices": choices, "usage": self._usage()})

    def _usage(self) -> dict[str, Any]:
        ended = [(choice.index // self._n, choice.end.usage) for choice in self._choices if choice.end is not None]
        return usage_of(ended)

    def _piece(self, choice: _Choice, text: str) -> Sse:
        return self._sse([choice.grow(text)])

    def _sse(self, choices: list[dict[str, Any]], **more: Any) -> Sse:
        more = {"usage": None, **more} if self._usage_wanted else more
        return Sse(json.dumps({**self._head, "choices": choices, **more}, ensure_ascii=False))


@dataclass
class _Lists:
    """Log-probabilities, token by token."""

    tokens: list[str] = field(default_factory=list)
    token_logprobs: list[float | None] = field(default_factory=list)
    top_logprobs: list[dict[str, float] | None] = field(default_factory=list)
    text_offset: list[int] = field(default_factory=list)

    def __iadd__(self, other: _Lists) -> _Lists:
        for name in self.__dataclass_fields__:
            getattr(self, name).extend(getattr(other, name))
        return self

    def as_dict(self) -> dict[str, Any]:
        return {name: list(getattr(self, name)) for name in self.__dataclass_fields__}


class _Choice:
    def __init__(self, index: int, prompt: OnePrompt, tokenizer: Tokenizer, logprobs: bool, ids: bool) -> None:
        self.index, self._prompt, self._tokenizer = index, prompt, tokenizer
        self._wanted, self._ids_wanted = logprobs, ids
        self._texts: list[str] = []
        self._lists, self._waiting = _Lists(), _Lists()
        self._ids: list[int] = []
        self._new_ids: list[int] = []
        self._offset = 0
        self.end: Finish | None = None

    @property
    def prompt_text(self) -> str:
        return self._prompt if isinstance(self._prompt, str) else self._tokenizer.decode(self._prompt)

    def note(self, token: Token) -> None:
        """A token, which is shown with the next piece."""
        self._new_ids.append(token.id)
        if not self._wanted:
            return
        text, lists = shown(self._tokenizer, token.id), self._waiting
        lists.tokens.append(text)
        lists.token_logprobs.append(token.logprob)
        lists.top_logprobs.append(self._top(text, token))
        lists.text_offset.append(self._offset)
        self._offset += len(text)

    def _top(self, text: str, token: Token) -> dict[str, float] | None:
        """Of tokens that look alike, the more likely one is named."""
        if token.logprob is None:
            return None
        top: dict[str, float] = {}
        for id, logprob in token.top:
            top.setdefault(shown(self._tokenizer, id), logprob)
        top.setdefault(text, token.logprob)
        return top

    def grow(self, text: str) -> dict[str, Any]:
        """The next piece, and part of the whole from now on."""
        self._texts.append(text)
        lists, self._waiting = self._waiting, _Lists()
        ids, self._new_ids = self._new_ids, []
        self._lists += lists
        self._ids += ids
        piece = {"index": self.index, "text": text, "logprobs": lists.as_dict() if lists.tokens else None,
                 "finish_reason": self._reason}  # fmt: skip
        return {**piece, "token_ids": ids} if self._ids_wanted else piece

    @property
    def _reason(self) -> str | None:
        return None if self.end is None else "length" if self.end.reason in ("length", "context") else "stop"

    def whole(self) -> dict[str, Any]:
        logprobs = self._lists.as_dict() if self._wanted else None
        whole = {"index": self.index, "text": "".join(self._texts), "logprobs": logprobs, "finish_reason": self._reason}
        return {**whole, "token_ids": self._ids} if self._ids_wanted else whole
