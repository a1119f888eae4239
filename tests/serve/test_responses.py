"""Responses with OpenAI's own SDK: whole, streamed, in the background; items, tools, thoughts, caching."""

from __future__ import annotations

import json

import openai
import pytest

from serve.scripted_model import READ, scripted_model, serving_script
from serve.server import wait_until

TOOL = {"type": "function", "name": "read", "description": "Reads a file.", "parameters": READ["input_schema"]}
PATCH = {"type": "custom", "name": "patch", "description": "Patches files."}
STRAIGHT = {"type": "object", "properties": {"age": {"type": "integer", "minimum": 0, "maximum": 120}},
            "required": ["age"], "additionalProperties": False}  # fmt: skip
WORDS = "It says 1: the quick brown fox.\nThat is all."


@pytest.fixture(scope="module")
def script(tmp_path_factory):
    folder = tmp_path_factory.mktemp("scripted")
    with serving_script(folder, scripted_model(folder / "model")) as running:
        yield running


@pytest.fixture(scope="module")
def client(script):
    with openai.OpenAI(base_url=f"{script.url}/v1", api_key="k", max_retries=0) as client:
        yield client


@pytest.fixture(scope="module")
def demo(server):
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="k", max_retries=0) as client:
        yield client


def ask(client, input="What does the file say?", **more):
    return client.responses.create(**{"model": "m", "input": input, "max_output_tokens": 400, **more})


def bare(response):
    """Without what differs from answer to answer."""
    found = response.model_dump(mode="json")
    items = [{key: value for key, value in item.items() if key not in ("id", "call_id")} for item in found["output"]]
    return items, found["status"], found["incomplete_details"], found["usage"]


def test_words(client):
    answer = ask(client, reasoning={"effort": "none"})
    assert answer.output_text == WORDS
    assert answer.status == "completed"
    usage = answer.usage
    assert usage.total_tokens == usage.input_tokens + usage.output_tokens
    assert usage.input_tokens_details.cached_tokens + usage.input_tokens_details.cache_write_tokens <= usage.input_tokens


@pytest.mark.parametrize(
    "more",
    [
        {},
        {"reasoning": {"effort": "none"}},
        {"tools": [TOOL]},
        {"tools": [TOOL], "include": ["reasoning.encrypted_content"]},
        {"tools": [TOOL], "tool_choice": "none"},
        {"tools": [TOOL], "tool_choice": {"type": "function", "name": "read"}, "reasoning": {"effort": "none"}},
        {"max_output_tokens": 3},
        {"top_logprobs": 2, "include": ["message.output_text.logprobs"]},
    ],
)
def test_a_stream_adds_up_to_the_whole_response(client, more):
    ask(client, **more)  # from now on both know the prompt
    whole = ask(client, **more)
    events = list(ask(client, stream=True, **more))
    assert bare(events[-1].response) == bare(whole)
    assert [event.sequence_number for event in events] == list(range(len(events)))
    assert events[0].type == "response.created"
    deltas = "".join(event.delta for event in events if event.type == "response.output_text.delta")
    assert deltas == whole.output_text
    for item in whole.output:
        if item.type == "function_call":
            written = [event.delta for event in events if event.type == "response.function_call_arguments.delta"]
            assert "".join(written) == item.arguments
            assert len(written) > 1


def test_a_call_and_its_result(client):
    """Items go back as they came, thoughts too; what was known is read."""
    items = [{"role": "developer", "content": "Be kind."}, {"role": "user", "content": "Read it."}]
    first = ask(client, items, tools=[TOOL], include=["reasoning.encrypted_content"], store=False)
    thought, call = first.output
    assert (call.name, json.loads(call.arguments)) == ("read", {"path": "file 1.txt"})
    assert thought.content[0].text == "I look at step 1."
    back = [item.model_dump(exclude_none=True) for item in first.output]
    result = {"type": "function_call_output", "call_id": call.call_id, "output": "42"}
    last = ask(client, [*items, *back, result], tools=[TOOL], store=False)
    assert "It says 2" in last.output_text
    assert last.usage.input_tokens_details.cached_tokens >= first.usage.input_tokens + first.usage.output_tokens - 2


def test_a_response_that_follows_another(client):
    first = ask(client, tools=[TOOL])
    result = {"type": "function_call_output", "call_id": first.output[-1].call_id, "output": "42"}
    second = ask(client, [result], tools=[TOOL], previous_response_id=first.id)
    assert "It says 2" in second.output_text
    with pytest.raises(openai.BadRequestError, match="not found"):
        ask(client, previous_response_id="resp_unknown")


def test_namespaces_and_texts(demo):
    """Tools in a namespace, and tools that take a text: forced, they are called as their client knows them."""
    space = {"type": "namespace", "name": "files", "tools": [TOOL]}
    choice = {"type": "function", "name": "read", "namespace": "files"}
    more = {"temperature": 0, "max_output_tokens": 300}
    answer = ask(demo, tools=[space, {"type": "web_search"}], tool_choice=choice, **more)
    call = answer.model_dump()["output"][0]
    assert (call["name"], call["namespace"]) == ("read", "files")
    (text,) = ask(demo, tools=[PATCH], tool_choice={"type": "custom", "name": "patch"}, **more).output
    assert (text.type, text.name) == ("custom_tool_call", "patch")
    assert isinstance(text.input, str)


def test_structured_output(demo):
    format = {"type": "json_schema", "name": "person", "schema": STRAIGHT, "strict": True}
    answer = ask(demo, text={"format": format}, max_output_tokens=60)
    assert 0 <= json.loads(answer.output_text)["age"] <= 120


def test_in_the_background(client):
    """It runs without a connection; events are read again from any number on."""
    started = ask(client, background=True)
    assert started.status in ("in_progress", "queued", "completed")
    wait_until(lambda: client.responses.retrieve(started.id).status == "completed")
    whole = client.responses.retrieve(started.id)
    assert whole.output_text == WORDS
    events = list(client.responses.retrieve(started.id, stream=True))
    assert [event.sequence_number for event in events] == list(range(len(events)))
    later = list(client.responses.retrieve(started.id, stream=True, starting_after=5))
    assert [event.sequence_number for event in later] == list(range(6, len(events)))
    assert events[-1].response.output_text == WORDS
    client.responses.delete(started.id)
    with pytest.raises(openai.NotFoundError):
        client.responses.retrieve(started.id)


def test_a_stream_that_is_taken_up_again(client):
    stream = ask(client, background=True, stream=True)
    first = [next(stream) for _ in range(4)]
    stream.close()
    id = first[0].response.id
    rest = list(client.responses.retrieve(id, stream=True, starting_after=first[-1].sequence_number))
    numbers = [event.sequence_number for event in (*first, *rest)]
    assert numbers == list(range(len(numbers)))
    assert rest[-1].response.output_text == WORDS


def test_cancelling(demo):
    started = ask(demo, background=True, max_output_tokens=2000, input="Tell me a long story.")
    ended = demo.responses.cancel(started.id)
    assert ended.status == "cancelled"
    assert demo.responses.retrieve(started.id).status == "cancelled"


def test_why_a_prompt_was_not_known(client):
    first = ask(client, instructions="Be kind.", tools=[TOOL])

    def told(**more):
        options = {"comparison_response_id": first.id}
        body = {"instructions": "Be kind.", "tools": [TOOL], **more}
        answer = ask(client, **body, extra_body={"prompt_cache_options": options})
        return answer.model_dump()["prompt_cache_diagnostics"]

    assert told() == {"type": "cache_hit"}
    assert told(tools=[{**TOOL, "description": "Reads."}])["reason"] == "tools_changed"
    missed = told(input="Other words")
    assert (missed["type"], missed["reason"]) == ("cache_miss", "input_changed")
    assert missed["cache_missed_tokens"] > 0


def test_keeping_and_prewarming(client):
    part = {
        "type": "input_text",
        "text": "A long beginning. " * 30,
        "prompt_cache_breakpoint": {"mode": "explicit", "ttl": "12h"},
    }
    items = [{"role": "user", "content": [part, {"type": "input_text", "text": "One?"}]}]
    warm = ask(client, items, extra_body={"prompt_cache_options": {"prewarm": True}})
    assert (warm.status, warm.output, warm.usage.output_tokens) == ("completed", [], 0)
    after = ask(client, [{"role": "user", "content": [part, {"type": "input_text", "text": "Two?"}]}])
    assert after.usage.input_tokens_details.cached_tokens > 100


@pytest.mark.parametrize(
    ("more", "words"),
    [
        ({"input": [{"type": "item_reference", "id": "x"}]}, "item_reference"),
        ({"input": [{"role": "user", "content": [{"type": "input_image"}]}]}, "input_image"),
        ({"tool_choice": {"type": "function", "name": "fly"}}, "no tool"),
        ({"text": {"format": {"type": "json_schema"}}}, "json_schema"),
        ({"input": "word " * 20_000}, "maximum context length"),
    ],
)
def test_mistakes(client, more, words):
    with pytest.raises(openai.BadRequestError, match=words):
        ask(client, **more)
