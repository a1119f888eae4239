"""Ten turns of an agent on one conversation, as both APIs send it: each runs what is new, also after a restart.

AGENT_SENTENCES=400 makes the first request as long as Claude Code's, and `pytest -s` shows what each turn ran.
"""

from __future__ import annotations

import os

import anthropic
import openai
import pytest

from moeflux.session.session import ANCHOR_EVERY
from serve.scripted_model import READ, scripted_model, serving_script

TURNS, SENTENCES = 10, int(os.environ.get("AGENT_SENTENCES", "60"))
SYSTEM = "You are an agent that reads files and says what they say. " * SENTENCES
SLACK = 16  # tokens of the prompt for the next answer, which are never the beginning of what is said later


class Anthropic:
    """Claude Code's way: blocks with marks that move, a header that changes, thoughts that come back."""

    def __init__(self):
        self._messages = []
        self._n = 0

    def turn(self, url):
        with anthropic.Anthropic(base_url=url, api_key="k", max_retries=0) as self._client:
            return self._turn()

    def _turn(self):
        """One answer. Tokens that were run for its prompt, and those of the prompt."""
        self._n += 1
        if not self._messages or self._messages[-1]["role"] == "assistant":
            self._messages.append({"role": "user", "content": f"Step {self._n}: what does the next file say?"})
        marked = [*self._messages[:-1], _with_mark(self._messages[-1])]
        mark = {"cache_control": {"type": "ephemeral"}}
        billing = {"type": "text", "text": f"x-anthropic-billing-header: cc; cch={self._n};"}
        with self._client.messages.stream(
            model="m", max_tokens=32000, messages=marked, tools=[READ],
            system=[billing, {"type": "text", "text": SYSTEM, **mark}], thinking={"type": "enabled", "budget_tokens": 1024},
        ) as stream:  # fmt: skip
            answer = stream.get_final_message()
        content = [block.model_dump() for block in answer.content]
        for block in content:
            block.pop("citations", None)
        self._messages.append({"role": "assistant", "content": content})
        if answer.stop_reason == "tool_use":
            result = {"type": "tool_result", "tool_use_id": content[-1]["id"], "content": f"contents {self._n}"}
            self._messages.append({"role": "user", "content": [result]})
        usage = answer.usage
        run = usage.input_tokens + usage.cache_creation_input_tokens
        return run, run + usage.cache_read_input_tokens, usage.output_tokens


class Chat:
    """pi's and opencode's way: thoughts beside the text, arguments set apart in another way."""

    def __init__(self):
        self._messages = [{"role": "system", "content": SYSTEM}]
        self._n = 0

    def turn(self, url):
        with openai.OpenAI(base_url=f"{url}/v1", api_key="k", max_retries=0) as self._client:
            return self._turn()

    def _turn(self):
        self._n += 1
        if self._messages[-1]["role"] in ("assistant", "system"):
            self._messages.append({"role": "user", "content": f"Step {self._n}: what does the next file say?"})
        tool = {"type": "function", "function": {"name": "read", "parameters": READ["input_schema"]}}
        answer = self._client.chat.completions.create(model="m", max_tokens=4096, messages=self._messages, tools=[tool])
        said = answer.choices[0].message
        message = {"role": "assistant", "content": said.content or ""}
        if getattr(said, "reasoning_content", None):
            message["reasoning_content"] = said.reasoning_content
        if said.tool_calls:
            calls = [call.model_dump() for call in said.tool_calls]
            for call in calls:
                call["function"]["arguments"] = call["function"]["arguments"].replace('": "', '":"')
            message["tool_calls"] = calls
        self._messages.append(message)
        for call in said.tool_calls or ():
            self._messages.append({"role": "tool", "tool_call_id": call.id, "content": f"contents {self._n}"})
        usage = answer.usage
        return usage.prompt_tokens - usage.prompt_tokens_details.cached_tokens, usage.prompt_tokens, usage.completion_tokens


def _with_mark(message):
    mark = {"cache_control": {"type": "ephemeral"}}
    content = message["content"]
    if isinstance(content, str):
        return {**message, "content": [{"type": "text", "text": content, **mark}]}
    return {**message, "content": [*content[:-1], {**content[-1], **mark}]}


@pytest.mark.parametrize(("agent", "template"), [(Anthropic, "xml"), (Chat, "xml"), (Chat, "thinking")])
def test_each_turn_runs_what_is_new(tmp_path, agent, template):
    """`thinking` leaves out thoughts when the next question comes: then the answer before it is run again, without them."""
    model = scripted_model(tmp_path / "model", template)
    (tmp_path / "states").mkdir()
    options = ("--prefix-folder", str(tmp_path / "states"), "--context", "65536")
    told = None
    with serving_script(tmp_path, model, *options) as server:
        agent = agent()
        figures = [agent.turn(server.url) for _ in range(TURNS // 2)]
    with serving_script(tmp_path, model, *options) as server:  # and again, with nothing but its files
        figures += [agent.turn(server.url) for _ in range(TURNS - TURNS // 2)]
    print("run, prompt, written:", *figures)
    for run, prompt, written in figures:
        if told is not None:
            new = prompt - told
            assert run <= new + ANCHOR_EVERY
            assert template == "thinking" or run <= new + SLACK, figures
        told = prompt + written
