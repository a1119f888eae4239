"""One conversation, however a client sends it: the same prompt, token for token, and prompts that go on where they did."""

from __future__ import annotations

import json
from functools import cache

import pytest
from hypothesis import given
from hypothesis import strategies as st

from moeflux import InputError
from moeflux.session.prompt import Conversation, prepare
from moeflux.session.transcripts import Transcripts
from moeflux.text.blocks import read_blocks, seal, unseal
from moeflux.text.chat import ChatFormat, Prompt
from moeflux.text.items import read_items
from moeflux.text.template import ChatTemplate
from moeflux.text.tools import ToolCall
from text import tiny
from text.test_template import TEMPLATES

NAMES = ["thinking", "tools", "xml", "chatml"]
LOOK = {"type": "function", "function": {"name": "look", "description": "looks", "parameters": {"type": "object"}}}


@cache
def chat(name):
    source = (TEMPLATES / f"{name}.jinja").read_text()
    return ChatFormat(tiny.byte_level("qwen"), ChatTemplate({"default": source}, {}, name))


def ids(name, messages, tools=None, **more):
    return prepare(chat(name), Conversation(messages, tools, **more), Transcripts()).ids


def text_of(name, messages, tools=None, **more):
    return chat(name).tokenizer.decode(ids(name, messages, tools, **more))


words = st.sampled_from(["hello", "a fox", "", " spaced ", "line\n", "<|im_end|>", "Größe 漢字", "{}", "</think>"])
values = st.recursive(st.integers() | st.booleans() | words, lambda v: st.lists(v, max_size=2), max_leaves=3)
arguments = st.dictionaries(st.sampled_from(["city", "n", "z", "a"]), values, max_size=4)


@st.composite
def conversations(draw):
    """As Anthropic's clients hold them: blocks, calls with results, system turns in between."""
    messages = [{"role": "user", "content": draw(words) or "?"}]
    for i in range(draw(st.integers(0, 4))):
        kind = draw(st.sampled_from(["say", "call", "system"]))
        if kind == "system":
            messages.append({"role": "system", "content": "Env " + draw(words)})
        elif kind == "say":
            messages.append({"role": "assistant", "content": [{"type": "text", "text": draw(words) or "yes"}]})
            messages.append({"role": "user", "content": draw(words) or "and?"})
        else:
            use = {"type": "tool_use", "id": f"t{i}", "name": "look", "input": draw(arguments)}
            thought = {"type": "thinking", "thinking": "hm " + draw(words), "signature": seal("")}
            messages.append({"role": "assistant", "content": [thought, {"type": "text", "text": "so"}, use]})
            result = {"type": "tool_result", "tool_use_id": f"t{i}", "content": draw(words)}
            messages.append({"role": "user", "content": [result, {"type": "text", "text": draw(words) or "go"}]})
    if messages[-1]["role"] == "assistant":
        messages.append({"role": "user", "content": "last"})
    return messages


def reshaped(message, draw):
    """The same message as another client, or the same one later, would send it."""
    content = message["content"]
    if isinstance(content, str) and draw(st.booleans()):
        marked = {"cache_control": {"type": "ephemeral"}, "keep_s": 300} if draw(st.booleans()) else {}
        return {**message, "content": [{"type": "text", "text": content, **marked}]}
    if isinstance(content, list):
        return {**message, "content": [again(block, draw) for block in content]}
    return message


def again(block, draw):
    if block["type"] == "tool_use":
        keys = draw(st.permutations(list(block["input"])))
        return {**block, "input": {key: block["input"][key] for key in keys}}
    if block["type"] == "tool_result" and isinstance(block["content"], str) and draw(st.booleans()):
        return {**block, "content": [{"type": "text", "text": block["content"]}], "keep_s": 300}
    if block["type"] == "thinking" and draw(st.booleans()):
        return {"type": "thinking", "thinking": "", "signature": seal(block["thinking"])}
    return block


def calls_of(messages):
    """Of canonical messages, as the model wrote them."""
    made = [call["function"] for message in messages for call in message.get("tool_calls", ())]
    return [ToolCall(call["name"], json.dumps(call["arguments"], ensure_ascii=False)) for call in made]


@given(conversations(), st.sampled_from(NAMES), st.data())
def test_the_same_conversation_is_the_same_tokens(messages, name, data):
    """Strings and lists, keys in another order, marks, thoughts that come sealed, a billing header that changes."""
    system = [{"type": "text", "text": "Be kind."}]
    billed = [{"type": "text", "text": f"x-anthropic-billing-header: cch={data.draw(st.integers(0, 9))};"}, *system]
    one, two = read_blocks(system, messages, []), read_blocks(billed, [reshaped(m, data.draw) for m in messages], [])
    transcripts = Transcripts()
    transcripts.remember_calls(calls_of(one.messages))
    wanted = prepare(chat(name), Conversation(one.messages, [LOOK]), transcripts)
    found = prepare(chat(name), Conversation(two.messages, [LOOK]), transcripts)
    assert found.ids == wanted.ids
    assert found.said == wanted.said


@given(conversations(), st.sampled_from(NAMES))
def test_openai_and_anthropic_clients_mean_the_same(messages, name):
    read = read_blocks("Be kind.", messages, []).messages
    spelled = []
    for message in read:
        calls = [
            {
                **call,
                "function": {
                    **call["function"],
                    "arguments": json.dumps(call["function"]["arguments"], separators=(",", ":")),
                },
            }
            for call in message.get("tool_calls", ())
        ]
        spelled.append({**message, "tool_calls": calls} if calls else message)
    assert ids(name, spelled, [LOOK]) == ids(name, read, [LOOK])


@given(conversations(), st.sampled_from(["tools", "xml", "chatml"]))
def test_a_conversation_that_goes_on_begins_alike(messages, name):
    """Whatever comes next, nothing before it changes (of templates that do not leave out thoughts)."""
    read = read_blocks("Be kind.", messages, []).messages
    n = next((i for i in range(len(read) - 1, 0, -1) if read[i]["role"] == "user" and read[i - 1]["role"] != "tool"), 0)
    earlier = prepare(chat(name), Conversation(read[: n + 1], [LOOK]), Transcripts())
    later = ids(name, [*read[: n + 1], {"role": "assistant", "content": "ok"}, {"role": "user", "content": "more"}], [LOOK])
    assert later[: earlier.said] == earlier.ids[: earlier.said]


def test_a_tool_that_is_loaded_on_the_way_changes_nothing_before_it():
    """Wherever its client puts it in the list of tools."""
    deferred = {"name": "deep", "description": "digs", "input_schema": {"type": "object"}, "defer_loading": True}
    always = {"name": "look", "input_schema": {"type": "object"}}
    start = [{"role": "user", "content": "find"}]
    use = {"type": "tool_use", "id": "t", "name": "look", "input": {}}
    reference = {"type": "tool_reference", "tool_name": "deep"}
    loading = {"type": "tool_result", "tool_use_id": "t", "content": [reference]}
    after = [*start, {"role": "assistant", "content": [use]}, {"role": "user", "content": [loading]}]
    for name in NAMES:
        before = read_blocks("s", start, [always])
        prepared = prepare(chat(name), Conversation(before.messages, before.tools), Transcripts())
        for tools in ([always, deferred], [deferred, always]):
            read = read_blocks("s", after, tools)
            assert [tool["function"]["name"] for tool in read.loaded] == ["deep"]
            conversation = Conversation(read.messages, read.tools, loaded=tuple(read.loaded))
            found = prepare(chat(name), conversation, Transcripts())
            assert found.ids[: prepared.said] == prepared.ids[: prepared.said]
            assert "digs" in chat(name).tokenizer.decode(found.ids[prepared.said :])
            assert [tool["function"]["name"] for tool in conversation.callable] == ["look", "deep"]
    with pytest.raises(InputError, match="no deferred tool 'deep'"):
        read_blocks("s", after, [always])


@pytest.mark.parametrize("name", NAMES)
def test_system_turns_anywhere(name):
    messages = [
        {"role": "system", "content": "one"},
        {"role": "developer", "content": "two"},
        {"role": "user", "content": "hello"},
        {"role": "system", "content": "late news"},
        {"role": "user", "content": "go"},
    ]
    text = text_of(name, messages)
    assert text.index("one\n\ntwo") < text.index("hello") < text.index("late news") < text.index("go")
    turn = "user" if name == "xml" else "system"
    assert f"<|im_start|>{turn}\nlate news" in text


def test_tools_for_a_template_that_knows_none():
    call = {"id": "c", "function": {"name": "look", "arguments": '{"a":1}'}}
    messages = [
        {"role": "system", "content": "Be kind."},
        {"role": "user", "content": "hello"},
        {"role": "assistant", "content": "well", "tool_calls": [call]},
        {"role": "tool", "content": "42"},
    ]
    text = text_of("chatml", messages, [LOOK])
    assert '"name": "look"' in text.split("<|im_start|>user")[0]
    assert 'well\n<tool_call>\n{"name": "look", "arguments": {"a": 1}}\n</tool_call><|im_end|>' in text
    assert "<tool_response>\n42\n</tool_response>" in text
    assert "call functions" not in text_of("chatml", messages[:2])
    assert "call functions" not in text_of("tools", messages, [LOOK])


@pytest.mark.parametrize("name", NAMES)
def test_an_answer_that_has_begun_is_gone_on_with(name):
    messages = [{"role": "user", "content": "hello"}, {"role": "assistant", "content": "Dear <|im_end|> friend"}]
    text = text_of(name, messages)
    assert text.endswith("Dear <|im_end|> friend")
    assert ids(name, messages)[-1] not in chat(name).tokenizer.added.values()
    whole = ids(name, [*messages, {"role": "user", "content": "?"}])
    assert whole[: len(ids(name, messages))] == ids(name, messages)


@pytest.mark.parametrize("name", NAMES)
def test_marks_are_places_of_the_prompt(name):
    """Where a text ends that is to be kept; the tokens do not change for it."""
    tools = [{**LOOK, "keep_s": 3600}]
    messages = [
        {"role": "system", "content": [{"type": "text", "text": "Be kind.", "keep_s": 3600}]},
        {"role": "user", "content": [{"type": "text", "text": "one "}, {"type": "text", "text": "two\n", "keep_s": 300}]},
        {"role": "user", "content": "three"},
    ]
    found = prepare(chat(name), Conversation(messages, tools), Transcripts())
    assert found.ids == ids(name, [{**m, "content": m["content"]} for m in messages], [LOOK])
    before = [chat(name).tokenizer.decode(found.ids[:at]) for at in sorted(found.breakpoints)]
    assert [found.breakpoints[at] for at in sorted(found.breakpoints)] == [3600, 3600, 300]
    assert before[-1].endswith("two")
    assert sorted(text.rpartition(" ")[2] for text in before[:2])[0].endswith(("kind.", '"looks'))
    (boundary,) = found.boundaries
    assert chat(name).tokenizer.decode(found.ids[:boundary]).endswith("<|im_start|>user\n")


def test_signs_that_people_write_are_no_places():
    messages = [{"role": "user", "content": [{"type": "text", "text": "a\ufdd2b\ufddec", "keep_s": 5}]}]
    found = prepare(chat("tools"), Conversation(messages), Transcripts())
    assert found.breakpoints == {}  # what was signed did not look the same
    assert prepare(chat("tools"), Conversation([{"role": "user", "content": "x"}]), Transcripts()).breakpoints == {}


def test_known_texts_can_be_read_from_their_tokens():
    """After a restart there are tokens only: they are the text that is rendered again, marks included."""
    call = {"id": "c", "function": {"name": "look", "arguments": {"a": "<|im_end|>"}}}
    messages = [
        {"role": "user", "content": "say <|im_start|> and <tool_call>"},
        {"role": "assistant", "content": "", "reasoning_content": "hm", "tool_calls": [call]},
    ]
    for name in NAMES:
        prompt = chat(name).prompt(messages, [LOOK])
        assert chat(name).rendered(chat(name).encode(prompt)) == prompt.marked


@given(st.integers(0, 49), st.sampled_from(NAMES))
def test_states_that_were_kept_anywhere_change_no_tokens(n, name):
    """After a restart, beginnings of texts are known that end within a word."""
    text = "The quick brown fox jumps over the lazy dog. Größe"
    messages = [{"role": "user", "content": text}]
    prompt, wanted = chat(name).prompt(messages), ids(name, messages)
    begun = chat(name).encode(Prompt(prompt.marked[: prompt.marked.index(text) + n]))
    transcripts = Transcripts()
    transcripts.remember(chat(name).rendered(begun), begun, cut=True)
    assert prepare(chat(name), Conversation(messages), transcripts).ids == wanted


def test_sealed_thoughts_come_back():
    assert unseal(seal("hm 漢")) == "hm 漢"
    assert unseal("EqoBCkgIARABGAI") is None
    assert unseal("mf1.!!!") in (None, "")
    assert unseal(5) is None


ITEMS = [
    {"type": "message", "role": "developer", "content": [{"type": "input_text", "text": "Be kind."}]},
    {"role": "user", "content": "find it"},
    {"type": "reasoning", "summary": [], "content": [{"type": "reasoning_text", "text": "hm"}]},
    {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": "so"}]},
    {"type": "function_call", "call_id": "c1", "name": "look", "arguments": '{"city":"Rom"}'},
    {"type": "function_call", "call_id": "c2", "name": "look", "namespace": "deep", "arguments": "{}"},
    {"type": "function_call_output", "call_id": "c1", "output": "42"},
    {"type": "custom_tool_call_output", "call_id": "c2", "output": [{"type": "input_text", "text": "43"}]},
    {"type": "reasoning", "summary": [], "encrypted_content": seal("again")},
    {"type": "custom_tool_call", "call_id": "c3", "name": "patch", "input": "*** Begin"},
]


def test_items_become_turns():
    messages = read_items(ITEMS)
    assert [m["role"] for m in messages] == ["developer", "user", "assistant", "tool", "tool", "assistant"]
    turn = messages[2]
    assert turn["reasoning_content"] == "hm"
    assert [call["function"]["name"] for call in turn["tool_calls"]] == ["look", "deep__look"]
    assert messages[-1]["reasoning_content"] == "again"
    assert messages[-1]["tool_calls"][0]["function"]["arguments"] == {"input": "*** Begin"}
    text = text_of("xml", messages)
    assert text.index("hm\n</think>") < text.index("so\n\n<tool_call>") < text.index("42") < text.index("43")
    with pytest.raises(InputError, match=r"input.0: 'item_reference'"):
        read_items([{"type": "item_reference", "id": "x"}])
    with pytest.raises(InputError, match=r"input.0.content.0: 'input_image'"):
        read_items([{"role": "user", "content": [{"type": "input_image"}]}])
