"""Completions: continued as in-process, and scored as `moeflux eval` scores."""

from __future__ import annotations

import json

import pytest

import moeflux
from moeflux.serve.answering import Told
from moeflux.serve.openai.completion_types import CompletionRequest
from moeflux.serve.openai.completions import CompletionAnswer
from moeflux.session.evaluate import evaluate
from moeflux.session.events import Token
from moeflux.text.regions import Text
from serve.server import chunks

PATH = "/v1/completions"
TEXT = "Once upon a time there was a little fox who lived in the woods. One day it found a red ball."


def complete(server, **more):
    answer = server.post(PATH, {"model": "m", "prompt": TEXT, "temperature": 0, **more})
    assert answer.status_code == 200, answer.text
    return answer.json()


@pytest.fixture(scope="module")
def engine():
    with moeflux.load(text="plain") as engine:
        yield engine


def test_a_text_is_continued_as_in_process(server, engine):
    alone = engine.generate(TEXT, max_tokens=16, temperature=0)
    text = "".join(token.text for token in alone)
    answer = complete(server)
    assert answer["choices"][0]["text"] == text
    assert answer["choices"][0]["finish_reason"] == "length"
    assert answer["usage"]["completion_tokens"] == 16  # what is left out is 16
    ids = engine.text.tokenizer.encode(TEXT)
    assert complete(server, prompt=ids)["choices"] == answer["choices"]


def test_several_prompts_of_both_kinds(server, engine):
    texts = [TEXT, "The cat", "A dog and"]
    alone = [complete(server, prompt=text)["choices"][0]["text"] for text in texts]
    together = complete(server, prompt=texts)
    assert [choice["text"] for choice in together["choices"]] == alone
    assert [choice["index"] for choice in together["choices"]] == [0, 1, 2]
    ids = [engine.text.tokenizer.encode(text) for text in texts]
    assert complete(server, prompt=ids)["choices"] == together["choices"]
    assert together["usage"]["prompt_tokens"] == sum(map(len, ids))


def test_scores_of_a_text_are_those_of_eval(server, engine):
    """As evaluation tools ask: ids, one token more, the prompt back with its log-probabilities."""
    ids = engine.text.tokenizer.encode(TEXT)
    answer = complete(server, prompt=[ids], max_tokens=1, logprobs=1, echo=True)
    listed = answer["choices"][0]["logprobs"]
    scored = listed["token_logprobs"][1:-1]
    assert len(listed["tokens"]) == len(ids) + 1
    assert listed["token_logprobs"][0] is None
    assert listed["top_logprobs"][0] is None
    assert -sum(scored) == pytest.approx(evaluate(engine, engine.text.tokenizer, TEXT).nats, rel=1e-5)
    greedy = [
        value == max(top.values())
        for value, top in zip(listed["token_logprobs"][1:], listed["top_logprobs"][1:], strict=True)
    ]
    assert greedy[-1]  # the token that it chose itself
    assert any(greedy[:-1])
    assert not all(greedy[:-1])
    again = complete(server, prompt=[ids], max_tokens=1, logprobs=1, echo=True)  # with the prompt known by now
    assert again["choices"] == answer["choices"]
    assert again["usage"]["prompt_tokens_details"]["cached_tokens"] == 0  # all of it was run


def test_the_prompt_back_without_scores(server):
    answer = complete(server, echo=True, max_tokens=4)
    assert answer["choices"][0]["text"].startswith(TEXT)
    assert answer["choices"][0]["logprobs"] is None
    only = complete(server, echo=True, max_tokens=0)
    assert only["choices"][0]["text"] == TEXT


@pytest.mark.parametrize(
    "more", [{}, {"logprobs": 2}, {"echo": True}, {"echo": True, "logprobs": 0}, {"n": 2, "temperature": 1, "seed": 1}]
)
def test_a_stream_adds_up_to_the_whole_answer(server, more):
    body = {"model": "m", "prompt": TEXT, "temperature": 0, "max_tokens": 12, "return_token_ids": True, **more}
    complete(server, **body)
    whole, pieces = complete(server, **body), chunks(server, PATH, {**body, "stream_options": {"include_usage": True}})
    for choice in whole["choices"]:
        own = [c for piece in pieces for c in piece["choices"] if c["index"] == choice["index"]]
        assert "".join(c["text"] for c in own) == choice["text"]
        assert [id for c in own for id in c["token_ids"]] == choice["token_ids"]
        assert own[-1]["finish_reason"] == choice["finish_reason"]
        for name in ("tokens", "token_logprobs", "top_logprobs", "text_offset") if choice["logprobs"] else ():
            assert [entry for c in own if c["logprobs"] for entry in c["logprobs"][name]] == choice["logprobs"][name]
    assert pieces[-1]["usage"] == whole["usage"]


@pytest.mark.parametrize(
    ("more", "param"),
    [({"suffix": "the end"}, "suffix"), ({"best_of": 3}, "best_of"), ({"prompt": []}, "prompt"),
     ({"ignore_eos": True}, "ignore_eos"), ({"prompt": [10**6]}, None), ({"prompt": ""}, None),
     ({"logprobs": 99}, "logprobs")],
)  # fmt: skip
def test_what_is_not_done_is_refused(server, more, param):
    answer = server.post(PATH, {"model": "m", "prompt": TEXT, **more})
    assert answer.status_code == 400, answer.text
    assert answer.json()["error"]["param"] == param


class Alike:
    """A tokenizer whose tokens all look the same: halves of characters do."""

    def piece(self, id):
        return b"\xf0"


def test_of_tokens_that_look_alike_the_more_likely_one_is_named():
    """Or a token that was not the most likely one would seem to be."""
    request = CompletionRequest(model="m", prompt="x", logprobs=2)
    answer = CompletionAnswer(request, Alike(), "m", "fp")
    (piece,) = answer.take(Told(0, Token(5, (Text("x"),), -1.0, ((7, -0.5), (5, -1.0)))))
    listed = json.loads(piece.data)["choices"][0]["logprobs"]
    assert listed["token_logprobs"] == [-1.0]
    assert max(listed["top_logprobs"][0].values()) == -0.5
