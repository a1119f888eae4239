"""Chat completions over HTTP: the same words as in-process, streamed or whole, with every option that a request has."""

from __future__ import annotations

import json
import re

import jsonschema
import pytest

import moeflux
from serve.server import STORY, chunks

CHAT = "/v1/chat/completions"
PERSON = {
    "type": "object",
    "properties": {"name": {"type": "string", "maxLength": 12}, "age": {"type": "integer", "minimum": 0, "maximum": 120}},
    "required": ["name", "age"],
    "additionalProperties": False,
}


def joined(pieces, name):
    return "".join(c["choices"][0]["delta"].get(name) or "" for c in pieces if c["choices"])


def test_the_answer_is_what_the_model_says_in_process(server):
    answer = server.chat(max_tokens=24)
    with moeflux.load() as engine:
        alone = engine.chat().ask(STORY[0]["content"], max_tokens=24, temperature=0)
        for _ in alone:
            pass
    choice = answer["choices"][0]
    assert choice["message"]["content"] == alone.text
    assert choice["finish_reason"] == "length"
    assert answer["usage"]["completion_tokens"] == 24
    assert answer["usage"]["prompt_tokens"] == alone.finish.usage.prompt
    assert answer["model"] == "moeflux-demo"


@pytest.mark.parametrize(
    "more", [{}, {"logprobs": True, "top_logprobs": 3}, {"stop": ["the"]}, {"seed": 5, "temperature": 1}]
)
def test_a_stream_adds_up_to_the_whole_answer(server, more):
    body = {"model": "m", "messages": STORY, "max_tokens": 30, "temperature": 0, **more}
    server.chat(**body)  # from now on the prompt is known to both
    whole, pieces = server.chat(**body), chunks(server, CHAT, {**body, "stream_options": {"include_usage": True}})
    choice = whole["choices"][0]
    assert pieces[0]["choices"][0]["delta"]["role"] == "assistant"
    assert joined(pieces, "content") == choice["message"]["content"]
    assert [c["choices"][0]["finish_reason"] for c in pieces if c["choices"]][-1] == choice["finish_reason"]
    assert pieces[-1]["choices"] == []
    assert pieces[-1]["usage"] == whole["usage"]
    assert all(piece["usage"] is None for piece in pieces[:-1])
    listed = [entry for c in pieces if c["choices"] and c["choices"][0]["logprobs"]
              for entry in c["choices"][0]["logprobs"]["content"]]  # fmt: skip
    assert listed == ((choice["logprobs"] or {}).get("content") or [])
    assert len({piece["id"] for piece in pieces}) == 1


def test_log_probabilities_are_the_models_own(server):
    answer = server.chat(max_tokens=8, logprobs=True, top_logprobs=2, repetition_penalty=1)
    listed = answer["choices"][0]["logprobs"]["content"]
    assert len(listed) == 8
    for entry in listed:
        assert entry["logprob"] == entry["top_logprobs"][0]["logprob"]  # greedy: the most likely one
        assert entry["logprob"] > entry["top_logprobs"][1]["logprob"]
        assert bytes(entry["bytes"]).decode(errors="replace") == entry["token"]
    said = b"".join(bytes(entry["bytes"]) for entry in listed).decode()
    assert said.strip() == answer["choices"][0]["message"]["content"].strip()


def test_several_answers_have_seeds_of_their_own(server):
    options = {"temperature": 1, "max_tokens": 10}
    several = server.chat(n=3, seed=7, **options)
    alone = [server.chat(seed=7 + i, **options)["choices"][0]["message"]["content"] for i in range(3)]
    assert [choice["message"]["content"] for choice in several["choices"]] == alone
    assert [choice["index"] for choice in several["choices"]] == [0, 1, 2]
    assert several["usage"]["completion_tokens"] == 30
    assert several["usage"]["prompt_tokens"] == server.chat()["usage"]["prompt_tokens"]  # asked once
    assert len(set(alone)) == 3


def test_several_answers_in_one_stream(server):
    body = {"model": "m", "messages": STORY, "max_tokens": 6, "n": 2, "seed": 1, "temperature": 1}
    whole = server.chat(**body)
    texts = ["", ""]
    for piece in chunks(server, CHAT, body):
        for choice in piece["choices"]:
            texts[choice["index"]] += choice["delta"].get("content") or ""
    assert texts == [choice["message"]["content"] for choice in whole["choices"]]


def test_without_a_seed_answers_differ_and_with_one_they_do_not(server):
    options = {"temperature": 1.5, "max_tokens": 16}
    assert server.chat(seed=3, **options)["choices"] == server.chat(seed=3, **options)["choices"]
    assert len({server.chat(**options)["choices"][0]["message"]["content"] for _ in range(3)}) > 1


def test_a_stop_sequence_ends_the_answer_before_it(server):
    text = server.chat(max_tokens=30)["choices"][0]["message"]["content"]
    word = text.split()[4]
    cut = server.chat(max_tokens=30, stop=word)["choices"][0]
    assert (
        cut["message"]["content"] == text[: text.index(word)].rstrip()
        or cut["message"]["content"] == text[: text.index(word)]
    )
    assert cut["finish_reason"] == "stop"


def test_a_bias_forbids_a_token(server):
    first = server.chat(max_tokens=1, logprobs=True)["choices"][0]["logprobs"]["content"][0]["token"]
    (id,) = server.post("/tokenize", {"prompt": first, "add_special_tokens": False}).json()["tokens"]
    other = server.chat(max_tokens=1, logit_bias={str(id): -100})["choices"][0]["message"]["content"]
    assert other != first


@pytest.mark.parametrize("stream", [False, True])
def test_structured_output_fits_its_schema(server, stream):
    wanted = {"type": "json_schema", "json_schema": {"name": "person", "schema": PERSON, "strict": True}}
    body = {"max_tokens": 200, "response_format": wanted, "temperature": 1, "seed": 2}
    if stream:
        text = joined(chunks(server, CHAT, {"model": "m", "messages": STORY, **body}), "content")
    else:
        choice = server.chat(**body)["choices"][0]
        text = choice["message"]["content"]
        assert choice["finish_reason"] == "stop"
    jsonschema.validate(json.loads(text), PERSON)


def test_other_constraints(server):
    def say(**more):
        return server.chat(max_tokens=60, temperature=1, seed=4, **more)["choices"][0]["message"]["content"]

    assert say(response_format={"type": "json_object"}).startswith("{")
    assert say(structured_outputs={"choice": ["yes", 'no "quoted"']}) in ("yes", 'no "quoted"')
    assert len(say(structured_outputs={"regex": "[0-9]{5}"})) == 5
    assert re.fullmatch("ab+c", say(structured_outputs={"grammar": 'start: "a" "b"+ "c"'}))


def test_the_last_message_of_an_assistant_goes_on(server):
    full = server.chat(max_tokens=20)["choices"][0]["message"]["content"]
    ids = server.post("/tokenize", {"prompt": full, "add_special_tokens": False}).json()["tokens"]
    begun = server.post("/detokenize", {"tokens": ids[:8]}).json()["prompt"]
    answer = server.chat([*STORY, {"role": "assistant", "content": begun}], max_tokens=12)
    assert begun + answer["choices"][0]["message"]["content"] == full


def test_no_tokens_at_all_fill_the_cache(server):
    messages = [{"role": "user", "content": "word " * 300 + "What was that?"}]
    warm = server.chat(messages, max_tokens=0)
    assert warm["choices"][0]["message"]["content"] == ""
    assert warm["usage"]["completion_tokens"] == 0
    assert warm["usage"]["prompt_tokens_details"]["cached_tokens"] < 20
    after = server.chat(messages)["usage"]
    assert after["prompt_tokens_details"]["cached_tokens"] >= after["prompt_tokens"] - 8


def test_the_next_turn_reads_what_the_last_one_said(server):
    messages = [{"role": "user", "content": "Once there was a cat. " * 20}]
    first = server.chat(messages, max_tokens=40)
    said = first["choices"][0]["message"]
    messages = [*messages, {"role": "assistant", "content": said["content"]}, {"role": "user", "content": "And then?"}]
    second = server.chat(messages)
    read = second["usage"]["prompt_tokens_details"]["cached_tokens"]
    assert read >= first["usage"]["prompt_tokens"]
    fresh = [{"role": "system", "content": "x"}]  # another beginning, so that nothing is known
    assert server.chat([*fresh, *messages])["usage"]["prompt_tokens_details"]["cached_tokens"] < 20


def test_parts_are_the_text_that_they_make(server):
    parts = [
        {
            "role": "user",
            "content": [{"type": "text", "text": "Tell me a story "}, {"type": "text", "text": "about a little fox."}],
        }
    ]
    assert server.chat(parts)["choices"] == server.chat()["choices"]


def test_how_far_the_prompt_is(server):
    body = {
        "model": "m",
        "messages": [{"role": "user", "content": "one two three " * 600}],
        "max_tokens": 1,
        "return_progress": True,
    }
    seen = [piece["prompt_progress"] for piece in chunks(server, CHAT, body) if piece.get("prompt_progress")]
    assert seen
    for now in seen:
        assert 0 <= now["cache"] <= now["processed"] <= now["total"]
    assert [now["processed"] for now in seen] == sorted(now["processed"] for now in seen)
