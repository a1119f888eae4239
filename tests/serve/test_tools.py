"""Tools over chat completions: calls that are forced always parse, stream while they are written, and come back."""

from __future__ import annotations

import json

import openai
import pytest

from serve.server import STORY, chunks

CHAT = "/v1/chat/completions"
WEATHER = {
    "type": "function",
    "function": {
        "name": "weather",
        "description": "The weather in a city.",
        "parameters": {
            "type": "object",
            "properties": {
                "city": {"type": "string", "maxLength": 10},
                "unit": {"enum": ["C", "F"]},
                "day": {"type": "integer", "minimum": 0, "maximum": 9},
            },
            "required": ["city", "unit", "day"],
            "additionalProperties": False,
        },
    },
}
CLOCK = {
    "type": "function",
    "function": {"name": "clock", "parameters": {"type": "object", "properties": {}, "additionalProperties": False}},
}
FORCED = {"model": "m", "messages": STORY, "tools": [WEATHER, CLOCK], "temperature": 1, "seed": 3, "max_tokens": 300}


def calls_of(pieces):
    """What the deltas add up to, as clients add them up."""
    found = {}
    for piece in pieces:
        for choice in piece["choices"]:
            for delta in choice["delta"].get("tool_calls") or ():
                call = found.setdefault(delta["index"], {"id": None, "name": "", "arguments": ""})
                call["id"] = delta.get("id") or call["id"]
                call["name"] += delta["function"].get("name") or ""
                call["arguments"] += delta["function"].get("arguments") or ""
    return [found[index] for index in sorted(found)]


def check(arguments):
    assert set(arguments) == {"city", "unit", "day"}
    assert isinstance(arguments["city"], str)
    assert arguments["unit"] in ("C", "F")
    assert 0 <= arguments["day"] <= 9


@pytest.mark.parametrize("seed", range(3))
def test_a_named_tool_is_called_with_arguments_that_fit(server, seed):
    named = {"type": "function", "function": {"name": "weather"}}
    choice = server.chat(**{**FORCED, "seed": seed, "tool_choice": named})["choices"][0]
    assert choice["finish_reason"] == "tool_calls"
    (call,) = choice["message"]["tool_calls"]
    assert call["function"]["name"] == "weather"
    assert call["type"] == "function"
    assert call["id"]
    check(json.loads(call["function"]["arguments"]))


def test_some_tool_is_called_where_one_must_be(server):
    body = {**FORCED, "tool_choice": "required", "parallel_tool_calls": False}
    names = set()
    for seed in range(4):
        (call,) = server.chat(**{**body, "seed": seed})["choices"][0]["message"]["tool_calls"]
        names.add(call["function"]["name"])
        json.loads(call["function"]["arguments"])
    assert names <= {"weather", "clock"}


def test_only_allowed_tools_are_called(server):
    allowed = {"mode": "required", "tools": [{"type": "function", "function": {"name": "clock"}}]}
    choice = server.chat(**{**FORCED, "tool_choice": {"type": "allowed_tools", "allowed_tools": allowed}})["choices"][0]
    assert {call["function"]["name"] for call in choice["message"]["tool_calls"]} == {"clock"}


def test_no_tool_is_called_where_none_may_be(server):
    choice = server.chat(**{**FORCED, "tool_choice": "none", "max_tokens": 40})["choices"][0]
    assert "tool_calls" not in choice["message"]
    assert choice["finish_reason"] in ("stop", "length")


def test_streamed_calls_add_up_to_the_whole_answer(server):
    body = {**FORCED, "tool_choice": {"type": "function", "function": {"name": "weather"}}}
    (call,) = server.chat(**body)["choices"][0]["message"]["tool_calls"]
    pieces = chunks(server, CHAT, body)
    (streamed,) = calls_of(pieces)
    assert (streamed["name"], streamed["arguments"]) == ("weather", call["function"]["arguments"])
    assert streamed["id"]
    grown = [d["function"]["arguments"] for p in pieces for c in p["choices"] for d in c["delta"].get("tool_calls") or ()]
    assert len([piece for piece in grown if piece]) > 3  # while they are written
    assert [c["finish_reason"] for p in pieces for c in p["choices"]][-1] == "tool_calls"


def test_a_call_that_is_cut_ends_for_its_length(server):
    body = {**FORCED, "tool_choice": {"type": "function", "function": {"name": "weather"}}, "max_tokens": 9}
    choice = server.chat(**body)["choices"][0]
    assert choice["finish_reason"] == "length"


def test_the_result_of_a_call_comes_back_in_any_form(server):
    """Text or parts, arguments with other spaces, content null or empty: the same tokens, so that the state is found."""
    call = {"id": "call_1", "type": "function", "function": {"name": "weather", "arguments": '{"city": "Oslo’s <b>&"}'}}
    tight = {**call, "function": {**call["function"], "arguments": '{"city":"Oslo’s <b>&"}'}}
    forms = [
        [{"role": "assistant", "content": None, "tool_calls": [call]},
         {"role": "tool", "tool_call_id": "call_1", "content": "sun"}],
        [{"role": "assistant", "content": "", "tool_calls": [tight]},
         {"role": "tool", "tool_call_id": "call_1", "content": [{"type": "text", "text": "sun"}]}],
    ]  # fmt: skip
    answers = [server.chat([*STORY, *form], tools=[WEATHER], max_tokens=6) for form in forms]
    assert answers[0]["usage"]["prompt_tokens"] == answers[1]["usage"]["prompt_tokens"]
    assert answers[0]["choices"] == answers[1]["choices"]
    usage = answers[1]["usage"]
    assert usage["prompt_tokens_details"]["cached_tokens"] >= usage["prompt_tokens"] - 8


def test_tools_and_a_schema_together(server):
    schema = {
        "type": "object",
        "properties": {"n": {"type": "integer", "minimum": 0, "maximum": 9}},
        "required": ["n"],
        "additionalProperties": False,
    }
    wanted = {"type": "json_schema", "json_schema": {"name": "n", "schema": schema}}
    message = server.chat(**{**FORCED, "response_format": wanted})["choices"][0]["message"]
    assert message.get("tool_calls") or isinstance(json.loads(message["content"])["n"], int)


def test_the_sdk_runs_a_loop_with_tools(server):
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="any", max_retries=0) as client:
        messages = list(STORY)
        first = client.chat.completions.create(**{**FORCED, "tool_choice": "required", "messages": messages})
        said = first.choices[0].message
        assert said.tool_calls
        messages.append(said.model_dump(exclude_none=True))
        messages += [{"role": "tool", "tool_call_id": call.id, "content": "done"} for call in said.tool_calls]
        second = client.chat.completions.create(**{**FORCED, "tool_choice": "none", "messages": messages, "max_tokens": 8})
        assert second.choices[0].finish_reason in ("stop", "length")
        assert second.usage.prompt_tokens_details.cached_tokens >= first.usage.prompt_tokens


def test_breakpoints_are_times(server):
    part = {"type": "text", "text": "A long beginning. " * 40, "prompt_cache_breakpoint": {"mode": "explicit", "ttl": "12h"}}
    messages = [{"role": "user", "content": [part, {"type": "text", "text": "One."}]}]
    server.chat(messages, prompt_cache_options={"ttl": "30m"})
    other = [{"role": "user", "content": [part, {"type": "text", "text": "Two, and something else."}]}]
    usage = server.chat(other)["usage"]
    assert usage["prompt_tokens_details"]["cached_tokens"] > 100
    part["prompt_cache_breakpoint"]["ttl"] = "soon"
    assert server.post(CHAT, {"model": "m", "messages": messages}).status_code == 400
