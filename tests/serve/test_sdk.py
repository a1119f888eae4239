"""The SDKs that people use, against a real server: they must not be able to tell it from a hosted one."""

from __future__ import annotations

import json

import openai
import pytest
from pydantic import BaseModel, Field

from serve.server import STORY, serving, wait_until

TOOLS = [{"type": "function", "function": {"name": "weather", "description": "The weather.",
          "parameters": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}}}]  # fmt: skip
CALLS = {"model": "m", "messages": STORY, "max_tokens": 8, "temperature": 0}


class Animal(BaseModel):
    name: str = Field(max_length=8)
    legs: int = Field(ge=0, le=9)


@pytest.fixture(scope="module")
def client(server):
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="any", max_retries=0) as client:
        yield client


def test_create_and_stream(client):
    whole = client.chat.completions.create(**CALLS)
    assert whole.choices[0].message.role == "assistant"
    assert whole.usage.total_tokens == whole.usage.prompt_tokens + 8
    stream = client.chat.completions.create(**CALLS, stream=True, stream_options={"include_usage": True})
    pieces = list(stream)
    assert "".join(p.choices[0].delta.content or "" for p in pieces if p.choices) == whole.choices[0].message.content
    assert pieces[-1].usage.completion_tokens == 8


def test_the_helper_that_accumulates_a_stream(client):
    ends = {**CALLS, "max_tokens": 100, "stop": "."}
    whole = client.chat.completions.create(**ends)
    with client.chat.completions.stream(**ends) as stream:
        for _ in stream:
            pass
        final = stream.get_final_completion()
    assert final.choices[0].message.content == whole.choices[0].message.content
    assert final.choices[0].finish_reason == "stop"


def test_parsed_output(client):
    answer = client.chat.completions.parse(
        model="m", messages=STORY, response_format=Animal, temperature=1, seed=1, max_tokens=400
    )
    assert isinstance(answer.choices[0].message.parsed, Animal)


def test_completions_and_models(client):
    answer = client.completions.create(model="m", prompt="Once upon", max_tokens=4, logprobs=2, temperature=0)
    assert len(answer.choices[0].logprobs.tokens) == 4
    assert [model.id for model in client.models.list()] == ["moeflux-demo"]
    assert client.models.retrieve("moeflux-demo").id == "moeflux-demo"


def test_errors_are_the_sdks_own(client):
    with pytest.raises(openai.BadRequestError) as caught:
        client.chat.completions.create(model="m", messages=[{"role": "user", "content": "word " * 6000}])
    assert caught.value.code == "context_length_exceeded"
    assert caught.value.request_id
    with pytest.raises(openai.NotFoundError):
        client.models.retrieve("gpt-9")
    with pytest.raises(openai.NotFoundError):
        client.embeddings.create(model="m", input="x")


def test_a_key_that_is_wrong(tmp_path):
    with serving(tmp_path, "--api-key", "the-right-key") as server:
        url = f"{server.url}/v1"
        with (
            openai.OpenAI(base_url=url, api_key="the-wrong-key", max_retries=0) as client,
            pytest.raises(openai.AuthenticationError),
        ):
            client.models.list()
        with openai.OpenAI(base_url=url, api_key="the-right-key", max_retries=0) as client:
            assert client.chat.completions.create(**CALLS).choices


def test_closing_a_stream_frees_the_server(client, server):
    stream = client.chat.completions.create(**{**CALLS, "max_tokens": 3000}, stream=True)
    next(iter(stream))
    stream.close()
    wait_until(lambda: server.get("/status").json()["requests"] == [])


def test_tools_reach_the_template_and_are_left_alone_where_it_has_none(client):
    answer = client.chat.completions.create(**CALLS, tools=TOOLS, tool_choice="none")
    assert answer.choices[0].message.tool_calls is None
    assert json.loads(answer.model_dump_json())["choices"][0]["finish_reason"] == "length"
