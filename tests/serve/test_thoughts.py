"""Thoughts over chat completions: beside the answer, streamed, counted, cut by a budget, and sent back without a loss."""

from __future__ import annotations

import pytest

from serve.scripted_model import READ, scripted_model, serving_script
from serve.server import STORY, chunks

CHAT = "/v1/chat/completions"
TOOL = {"type": "function", "function": {"name": "read", "parameters": READ["input_schema"]}}
BODY = {"model": "m", "messages": STORY, "max_tokens": 200}


@pytest.fixture(scope="module")
def script(tmp_path_factory):
    folder = tmp_path_factory.mktemp("thoughts")
    with serving_script(folder, scripted_model(folder / "model")) as running:
        yield running


def test_thoughts_stand_beside_the_answer(script):
    answer = script.chat(**BODY, logprobs=True)
    choice, usage = answer["choices"][0], answer["usage"]
    assert choice["message"]["reasoning_content"] == "I look at step 1."
    assert choice["message"]["content"] == "It says 1: the quick brown fox.\nThat is all."
    assert choice["finish_reason"] == "stop"
    thought = usage["completion_tokens_details"]["reasoning_tokens"]
    assert 0 < thought < usage["completion_tokens"]
    listed = choice["logprobs"]["content"]  # of the answer, not of the thoughts
    assert "".join(entry["token"] for entry in listed).strip() == choice["message"]["content"]


def test_streamed_thoughts_add_up(script):
    whole = script.chat(**BODY, tools=[TOOL])["choices"][0]["message"]
    pieces = chunks(script, CHAT, {**BODY, "tools": [TOOL]})
    deltas = [choice["delta"] for piece in pieces for choice in piece["choices"]]
    assert "".join(delta.get("reasoning_content") or "" for delta in deltas) == whole["reasoning_content"]
    assert len([delta for delta in deltas if delta.get("reasoning_content")]) > 3
    arguments = "".join(call["function"].get("arguments", "") for delta in deltas for call in delta.get("tool_calls", ()))
    assert arguments == whole["tool_calls"][0]["function"]["arguments"] == '{"path": "file 1.txt"}'


@pytest.mark.parametrize("no", [{"reasoning_effort": "none"}, {"chat_template_kwargs": {"enable_thinking": False}}])
def test_no_thoughts_where_none_are_wanted(script, no):
    answer = script.chat(**BODY, **no)
    assert "reasoning_content" not in answer["choices"][0]["message"]
    assert answer["usage"]["completion_tokens_details"]["reasoning_tokens"] == 0


def test_a_budget_ends_a_thought(script):
    answer = script.chat(**BODY, reasoning_budget=3)
    message = answer["choices"][0]["message"]
    assert message["reasoning_content"] != "I look at step 1."
    assert "I look at step 1.".startswith(message["reasoning_content"])


def test_thoughts_and_calls_that_come_back_are_known(script):
    first = script.chat(**BODY, tools=[TOOL])
    said = first["choices"][0]["message"]
    (call,) = said["tool_calls"]
    back = [*STORY, said, {"role": "tool", "tool_call_id": call["id"], "content": "a fox"}]
    second = script.chat(**{**BODY, "messages": back}, tools=[TOOL])
    assert second["choices"][0]["message"]["content"].startswith("It says 2")
    before = first["usage"]["prompt_tokens"] + first["usage"]["completion_tokens"]
    assert second["usage"]["prompt_tokens_details"]["cached_tokens"] >= before - 1
