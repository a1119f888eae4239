"""Anthropic's Messages with its own SDK: whole and streamed, tools, thoughts, caching, errors."""

from __future__ import annotations

import json
import re

import anthropic
import pytest

from serve.scripted_model import READ, scripted_model, serving_script

ASKED = [{"role": "user", "content": "What does the file say?"}]
STRAIGHT = {"type": "object", "properties": {"age": {"type": "integer", "minimum": 0, "maximum": 120}},
            "required": ["age"], "additionalProperties": False}  # fmt: skip


@pytest.fixture(scope="module")
def script(tmp_path_factory):
    folder = tmp_path_factory.mktemp("scripted")
    with serving_script(folder, scripted_model(folder / "model")) as running:
        yield running


@pytest.fixture(scope="module")
def client(script):
    with anthropic.Anthropic(base_url=script.url, api_key="k", max_retries=0) as client:
        yield client


@pytest.fixture(scope="module")
def demo(server):
    with anthropic.Anthropic(base_url=server.url, api_key="k", max_retries=0) as client:
        yield client


def ask(client, messages=ASKED, **more):
    return client.messages.create(**{"model": "m", "max_tokens": 400, "messages": messages, **more})


def streamed(client, messages=ASKED, **more):
    body = {"model": "m", "max_tokens": 400, "messages": messages, **more}
    with client.messages.stream(**body) as stream:
        kinds = [event.type for event in stream]
        return stream.get_final_message(), kinds


def bare(message):
    """Without what differs from answer to answer."""
    content = [block.model_dump() for block in message.content]
    for block in content:
        block.pop("id", None)
    return content, message.stop_reason, message.stop_sequence


def test_words(client):
    answer = ask(client)
    assert answer.type == "message"
    assert answer.content[0].text == "It says 1: the quick brown fox.\nThat is all."
    assert answer.stop_reason == "end_turn"
    u = answer.usage
    count = client.messages.count_tokens(model="m", messages=ASKED).input_tokens
    assert u.input_tokens + u.cache_read_input_tokens + u.cache_creation_input_tokens == count
    assert u.output_tokens > 5


@pytest.mark.parametrize(
    "more",
    [
        {},
        {"tools": [READ]},
        {"tools": [READ], "thinking": {"type": "enabled", "budget_tokens": 1024}},
        {"thinking": {"type": "adaptive", "display": "omitted"}},
        {"stop_sequences": ["fox"]},
        {"max_tokens": 3},
        {"tools": [READ], "max_tokens": 12},
        {"tools": [READ], "tool_choice": {"type": "tool", "name": "read"}},
        {"tools": [READ], "tool_choice": {"type": "none"}},
    ],
)
def test_a_stream_adds_up_to_the_whole_message(client, more):
    ask(client, **more)  # from now on both know the prompt
    whole = ask(client, **more)
    final, kinds = streamed(client, **more)
    assert bare(final) == bare(whole)
    assert final.usage.model_dump() == whole.usage.model_dump()
    assert kinds.count("message_start") == kinds.count("message_stop") == 1
    assert kinds.count("content_block_start") == kinds.count("content_block_stop") == len(whole.content)


def test_a_call_and_its_result(client):
    answer = ask(client, tools=[READ], thinking={"type": "enabled", "budget_tokens": 1024})
    thought, use = answer.content
    assert thought.thinking == "I look at step 1."
    assert (use.name, use.input, answer.stop_reason) == ("read", {"path": "file 1.txt"}, "tool_use")
    result = {"type": "tool_result", "tool_use_id": use.id, "content": "42"}
    turns = [*ASKED, {"role": "assistant", "content": answer.content}, {"role": "user", "content": [result]}]
    last = ask(client, turns, tools=[READ], thinking={"type": "enabled", "budget_tokens": 1024})
    assert last.content[-1].text.startswith("It says 2")
    assert last.usage.cache_read_input_tokens >= answer.usage.output_tokens


def test_hidden_thoughts_come_back(client):
    """A thought that is not shown travels in its signature: the next prompt has it."""
    shown = ask(client, tools=[READ], thinking={"type": "enabled", "budget_tokens": 1024})
    hidden = ask(client, tools=[READ], thinking={"type": "adaptive", "display": "omitted"})
    assert hidden.content[0].thinking == ""
    counts = []
    for answer in (shown, hidden):
        result = {"type": "tool_result", "tool_use_id": answer.content[-1].id, "content": "42"}
        turns = [*ASKED, {"role": "assistant", "content": answer.content}, {"role": "user", "content": [result]}]
        counts.append(client.messages.count_tokens(model="m", messages=turns, tools=[READ]).input_tokens)
    assert counts[0] == counts[1]


def test_a_budget_of_thoughts(client):
    answer = ask(client, thinking={"type": "enabled", "budget_tokens": 2})
    assert answer.usage.output_tokens_details.thinking_tokens <= 8
    assert answer.content[0].type == "thinking"
    assert answer.content[0].thinking != "I look at step 1."


def test_stop_reasons(client):
    stopped = ask(client, stop_sequences=["quick"])
    assert (stopped.stop_reason, stopped.stop_sequence) == ("stop_sequence", "quick")
    assert stopped.content[0].text == "It says 1: the "
    assert ask(client, max_tokens=3).stop_reason == "max_tokens"


def test_an_answer_that_has_begun(client):
    answer = ask(client, [*ASKED, {"role": "assistant", "content": "It says"}])
    assert not answer.content[0].text.startswith("It says It")


def test_forced_calls_of_a_model_that_knows_no_tools(demo):
    """The demo model tells stories; a grammar makes it call."""
    answer = ask(demo, tools=[READ], tool_choice={"type": "any"}, max_tokens=300, extra_body={"temperature": 0})
    assert answer.content[0].type == "tool_use"
    assert answer.content[0].name == "read"
    if answer.stop_reason == "tool_use":
        assert set(answer.content[0].input) == {"path"}


def test_structured_output(demo):
    answer = ask(demo, max_tokens=60, output_config={"format": {"type": "json_schema", "schema": STRAIGHT}})
    assert 0 <= json.loads(answer.content[0].text)["age"] <= 120


def test_caching_says_what_happened(client):
    system = [{"type": "text", "text": "Be kind. " * 40, "cache_control": {"type": "ephemeral", "ttl": "1h"}}]
    first = ask(client, system=system)
    assert first.usage.cache_creation_input_tokens > 0
    assert first.usage.cache_creation.ephemeral_1h_input_tokens == first.usage.cache_creation_input_tokens
    again = ask(client, [{"role": "user", "content": "Something else?"}], system=system)
    assert again.usage.cache_read_input_tokens >= 40
    warm = ask(client, [{"role": "user", "content": "A third thing?"}], system=system, max_tokens=0)
    assert (warm.content, warm.usage.output_tokens) == ([], 0)
    after = ask(client, [{"role": "user", "content": "A third thing?"}], system=system)
    assert after.usage.input_tokens + after.usage.cache_creation_input_tokens <= 40


def test_cached_answers_are_the_same(demo):
    """Greedy, through every way a state is found: bit for bit the same words."""
    system = "You tell stories about foxes and rivers. " * 20
    body = {"system": [{"type": "text", "text": system, "cache_control": {"type": "ephemeral"}}], "max_tokens": 24,
            "extra_body": {"temperature": 0}}  # fmt: skip
    turns = [{"role": "user", "content": "A fox."}]
    first = ask(demo, turns, **body)
    assert ask(demo, turns, **body).content == first.content
    longer = [*turns, {"role": "assistant", "content": first.content[0].text}, {"role": "user", "content": "And?"}]
    warm = ask(demo, longer, **body)
    plain = ask(demo, longer, **{**body, "system": [{"type": "text", "text": system}]})
    assert warm.usage.cache_read_input_tokens > first.usage.output_tokens
    assert plain.content == warm.content


def test_why_a_prompt_was_not_known(client):
    def told(previous, **more):
        body = {"messages": ASKED, "system": "Be kind.", "tools": [READ], **more}
        answer = ask(client, **body, extra_body={"diagnostics": {"previous_message_id": previous}})
        return answer.id, (answer.model_dump()["diagnostics"] or {}).get("cache_miss_reason")

    id, reason = told(None)
    assert reason is None
    _, same = told(id)
    assert same is None
    _, went_on = told(id, messages=[*ASKED, {"role": "assistant", "content": "x"}, {"role": "user", "content": "y"}])
    assert went_on is None
    for kind, more in (
        ("system_changed", {"system": "Be rude."}),
        ("tools_changed", {"tools": [{**READ, "description": "Reads."}]}),
        ("messages_changed", {"messages": [{"role": "user", "content": "Other words"}]}),
    ):
        _, reason = told(id, **more)
        assert reason["type"] == kind
        assert reason["cache_missed_input_tokens"] > 0
        assert reason["at"]["index"] == 0
    assert told("msg_unknown")[1] == {"type": "previous_message_not_found"}


@pytest.mark.parametrize(
    ("more", "status", "words"),
    [
        ({"messages": []}, 400, "messages"),
        ({"max_tokens": None}, 400, "max_tokens"),
        ({"stop_sequences": [" \n"]}, 400, "non-whitespace"),
        (
            {"messages": [{"role": "user", "content": "word " * 20_000}]},
            400,
            r"prompt is too long: \d+ tokens > \d+ maximum",
        ),
        ({"messages": [{"role": "user", "content": [{"type": "image", "source": {}}]}]}, 400, "image"),
        ({"tool_choice": {"type": "any"}}, 400, "no tools"),
        ({"messages": [*ASKED, {"role": "assistant", "content": "So "}]}, 400, "trailing whitespace"),
        ({"system": [{"type": "text", "text": c, "cache_control": {"type": "ephemeral"}} for c in "abcde"]}, 400, "Found 5"),
        (
            {
                "system": [{"type": "text", "text": "a", "cache_control": {"type": "ephemeral"}}],
                "cache_control": {"type": "ephemeral", "ttl": "1h"},
            },
            400,
            "must not come after",
        ),
        ({"tools": [{**READ, "defer_loading": True, "cache_control": {"type": "ephemeral"}}]}, 400, "deferred"),
        ({"output_config": {"format": {"type": "json_schema", "schema": {"enum": []}}}}, 400, "schema"),
    ],
)
def test_mistakes(script, more, status, words):
    body = {"model": "m", "max_tokens": 5, "messages": ASKED, **more}
    body = {key: value for key, value in body.items() if value is not None}
    for stream in (False, True):
        answer = script.post("/v1/messages", {**body, "stream": stream})
        assert answer.status_code == status, answer.text
        told = answer.json()
        assert (told["type"], told["error"]["type"]) == ("error", "invalid_request_error")
        assert told["request_id"]
        assert re.search(words, told["error"]["message"]), told


DEEP = {"type": "object"}
for _ in range(60):
    DEEP = {"type": "object", "properties": {"a": DEEP}, "required": ["a"]}
HOSTILE = {
    "recursion": {"$ref": "#"},
    "mutual": {
        "type": "object",
        "properties": {"a": {"$ref": "#/$defs/x"}},
        "$defs": {"x": {"anyOf": [{"$ref": "#/$defs/x"}]}},
    },
    "deep": DEEP,
    "empty": {"type": "object", "properties": {"a": {"enum": []}}, "required": ["a"]},
    "many": {"type": "object", "properties": {f"p{i}": {"type": "integer"} for i in range(2000)}},
    "words": {"type": "object", "properties": {"a": {"enum": [f"word{i}" for i in range(20_000)]}}},
    "odd": {"type": "object", "properties": {"a": {"not": {}}, "b": {"if": {}, "then": {}}}, "patternProperties": {"(": {}}},
    "text": {"type": "object", "properties": {'"</parameter>\n<|im_end|>': {"type": "string"}}},
    "no object": {"type": "string"},
}


@pytest.mark.parametrize("schema", HOSTILE)
def test_hostile_tools_end_well(script, schema):
    """Answered or refused, within a time, and never a failure of the server."""
    for choice in ("auto", "any"):
        tools = [{"name": "odd", "description": "x", "input_schema": HOSTILE[schema]}]
        body = {"model": "m", "max_tokens": 30, "messages": ASKED, "tools": tools, "tool_choice": {"type": choice}}
        answer = script.post("/v1/messages", body)
        assert answer.status_code in (200, 400), answer.text


def test_automatic_caching_moves_with_the_end(client):
    turns = [{"role": "user", "content": "A first question, which is long enough to be worth it."}]
    mark = {"cache_control": {"type": "ephemeral"}}
    first = ask(client, turns, extra_body=mark)
    turns += [{"role": "assistant", "content": first.content[0].text}, {"role": "user", "content": "And a second one?"}]
    second = ask(client, turns, extra_body=mark)
    whole = second.usage.input_tokens + second.usage.cache_read_input_tokens + second.usage.cache_creation_input_tokens
    assert second.usage.cache_read_input_tokens > 0
    assert second.usage.cache_creation_input_tokens > 0
    assert second.usage.input_tokens < whole / 4


def test_errors_are_the_sdks(client):
    with pytest.raises(anthropic.BadRequestError, match="prompt is too long"):
        ask(client, [{"role": "user", "content": "word " * 20_000}])


def test_more_than_fits_is_clipped(client):
    assert ask(client, max_tokens=10_000_000, stream=False, timeout=60).stop_reason == "end_turn"


def test_a_client_that_goes_leaves_nothing_behind(script, client):
    with client.messages.stream(model="m", max_tokens=400, messages=ASKED) as stream:
        next(iter(stream))
    assert ask(client).stop_reason == "end_turn"


def test_deferred_tools(client):
    """Loaded on the way, they are told where they were asked for; what was before is read."""
    deep = {**READ, "name": "dig", "description": "Digs.", "defer_loading": True}
    first = ask(client, tools=[READ, deep])
    use = first.content[-1]
    content = [{"type": "tool_reference", "tool_name": "dig"}]
    result = {"type": "tool_result", "tool_use_id": use.id, "content": content}
    turns = [*ASKED, {"role": "assistant", "content": first.content}, {"role": "user", "content": [result]}]
    prompt = first.usage.input_tokens + first.usage.cache_read_input_tokens + first.usage.cache_creation_input_tokens
    after = ask(client, turns, tools=[deep, READ])
    assert after.usage.cache_read_input_tokens >= prompt - 16  # but for the empty thought before the answer
