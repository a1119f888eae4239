"""Conversations and tools as clients send them: one form for templates, typed errors that say where."""

from __future__ import annotations

import contextlib
import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from moeflux import InputError, MoefluxError
from moeflux.text.chat import ChatFormat
from moeflux.text.messages import read_messages, read_tools, write_answer
from moeflux.text.template import ChatTemplate
from moeflux.text.tools import ToolCall
from text import tiny
from text.test_template import ours

HALF = "a\ud800b"


def user(content="hi", **more):
    return {"role": "user", "content": content, **more}


def calling(arguments, **more):
    call = {"id": "c1", "type": "function", "function": {"name": "look", "arguments": arguments}}
    return {"role": "assistant", "content": None, "tool_calls": [call], **more}


def parts(*texts):
    return [{"type": "text", "text": text} for text in texts]


def deep(n):
    value = []
    for _ in range(n):
        value = [value]
    return value


def inside_itself():
    value = []
    value.append(value)
    return value


def doubled():
    value = [1]
    for _ in range(40):
        value = [value, value]
    return value


@pytest.mark.parametrize(
    ("given", "wanted"),
    [
        (user(), user()),
        (user(parts("a", "b")), user("ab")),
        (user([]), user("")),
        ({"role": "developer", "content": "x"}, {"role": "system", "content": "x"}),
        (user("x", name="Ann", weight=5, cache_control={}), user("x", name="Ann")),
        (
            {"role": "tool", "tool_call_id": "c1", "content": parts("42")},
            {"role": "tool", "content": "42", "tool_call_id": "c1"},
        ),
        (
            {"role": "assistant", "content": "x", "reasoning": "hm"},
            {"role": "assistant", "content": "x", "reasoning_content": "hm"},
        ),
        ({"role": "assistant", "content": "x", "tool_calls": []}, {"role": "assistant", "content": "x"}),
        (calling('{"a": [1]}'), calling({"a": [1]})),
        (calling({"a": 1}), calling({"a": 1})),
        (calling(""), calling({})),
        (calling(None), calling({})),
    ],
)
def test_one_form(given, wanted):
    assert read_messages([given]) == [wanted]
    assert read_messages(read_messages([given])) == [wanted]


def test_bare_calls():
    bare = {"role": "assistant", "tool_calls": [{"name": "look", "arguments": "{}"}]}
    (read,) = read_messages([bare])
    assert read["tool_calls"] == [{"type": "function", "function": {"name": "look", "arguments": {}}}]


@pytest.mark.parametrize(
    ("messages", "words"),
    [
        (None, "messages: None is not a list"),
        ("hi", "messages: 'hi' is not a list"),
        ([], "no messages"),
        ([user(), "hi"], "message 1: 'hi' is not an object"),
        ([{}], "message 0: there is no role None"),
        ([{"role": "king", "content": "x"}], "message 0: there is no role 'king'"),
        ([{"role": ["user"], "content": "x"}], "message 0: there is no role"),
        ([{"role": "user"}], "message 0: its content is None"),
        ([user(None)], "message 0: its content is None"),
        ([{"role": "assistant", "content": None}], "message 0: its content is None"),
        ([user(5)], "message 0: its content is 5"),
        ([user({"type": "text", "text": "x"})], "message 0: its content is"),
        ([user(["x"])], "message 0, part 0: 'x' is not an object"),
        ([user(), user([*parts("a"), {"type": "image_url", "image_url": {}}])], "message 1, part 1: 'image_url'"),
        ([user([{"type": "text"}])], "message 0, part 0: None is not a text"),
        ([user(HALF)], r"message 0: character 1 is half of a pair \(U\+D800\)"),
        ([user(), user(parts("a", HALF))], "message 1, part 1: character 1"),
        ([user(name=HALF)], "message 0: name: character 1"),
        ([user(name=5)], "message 0: name: 5 is not a text"),
        ([{"role": "tool", "tool_call_id": HALF, "content": ""}], "message 0: tool_call_id"),
        ([{"role": "assistant", "content": "", "reasoning_content": HALF}], "message 0: reasoning_content: character 1"),
        ([{"role": "assistant", "content": "", "reasoning_content": 5}], "message 0: reasoning_content: 5"),
        ([{"role": "assistant", "tool_calls": {}}], "message 0: tool_calls: {} is not a list"),
        ([{"role": "assistant", "tool_calls": [5]}], "message 0, tool call 0: 5 is not an object"),
        ([{"role": "assistant", "tool_calls": [{"type": "custom"}]}], "message 0, tool call 0: 'custom'"),
        ([{"role": "assistant", "tool_calls": [{"function": 5}]}], "tool call 0: function: 5 is not an object"),
        ([{"role": "assistant", "tool_calls": [{"function": {}}]}], "tool call 0: name: None is not a text"),
        ([user(), calling('{"a": ')], "message 1, tool call 0: arguments: .* is not JSON"),
        ([calling('{"a": NaN}')], "arguments: .*NaN is not JSON"),
        ([calling("[1]")], "arguments: .* is not an object"),
        ([calling({"a": HALF})], "arguments: character 1"),
        ([calling({HALF: 1})], "arguments: character 1"),
        ([calling('{"a": "\\ud800"}')], "arguments: character 0"),
        ([calling({"a": float("nan")})], "arguments: nan is not JSON"),
        ([calling({"a": {1, 2}})], "arguments: .* is not JSON"),
        ([calling({5: 1})], "arguments: 5 is not a text"),
        ([calling({"a": 10**5000})], "arguments: "),
        ([calling({"a": deep(2000)})], "arguments: more than 128 levels"),
        ([calling('{"a": ' + "[" * 100_000)], "arguments: .*more than 128 levels"),
        ([calling({"a": inside_itself()})], "arguments: more than 128 levels"),
        ([calling({"a": doubled()})], "arguments: more than 250000 values"),
        ([user("x" * 2**20)] * 65, "message 64: more than 67108864 characters"),
    ],
)
def test_what_is_no_conversation(messages, words):
    with pytest.raises(InputError, match=words):
        read_messages(messages)
    with pytest.raises(InputError, match=words):
        ours("thinking")[0].prompt(messages)


FUNCTION = {"name": "look", "description": "Looks.", "parameters": {"type": "object", "properties": {}}}


@pytest.mark.parametrize(
    "tool",
    [
        {"type": "function", "function": FUNCTION},
        {"function": {**FUNCTION, "strict": True}, "type": "function"},
        FUNCTION,
        {"name": "look", "description": "Looks.", "input_schema": FUNCTION["parameters"]},
    ],
)
def test_one_form_of_tools(tool):
    assert json.dumps(read_tools([tool])) == json.dumps([{"type": "function", "function": FUNCTION}])


def test_no_tools():
    assert read_tools(None) is read_tools([]) is None
    assert read_tools([{"name": "x", "parameters": None}]) == [{"type": "function", "function": {"name": "x"}}]


@pytest.mark.parametrize(
    ("tools", "words"),
    [
        ({}, "tools: {} is not a list"),
        ("look", "tools: 'look' is not a list"),
        ([5], "tool 0: 5 is not an object"),
        ([FUNCTION, {}], "tool 1: name: None is not a text"),
        ([{"name": " "}], "tool 0: its name is empty"),
        ([{"name": 5}], "tool 0: name: 5 is not a text"),
        ([{"name": HALF}], "tool 0: name: character 1"),
        ([{"type": "function", "function": None}], "tool 0: function: None is not an object"),
        ([{"type": "web_search"}], "tool 0: 'web_search'"),
        ([{"name": "x", "description": 5}], "tool 0: description: 5 is not a text"),
        ([{"name": "x", "parameters": "{}"}], "tool 0: parameters: '{}' is not an object"),
        ([{"name": "x", "parameters": {"a": HALF}}], "tool 0: parameters: character 1"),
        ([{"name": "x", "parameters": {"a": deep(500)}}], "tool 0: parameters: more than 128 levels"),
    ],
)
def test_what_is_no_tool(tools, words):
    with pytest.raises(InputError, match=words):
        read_tools(tools)
    chat, _ = ours("thinking")
    with pytest.raises(InputError, match=words):
        chat.prompt([user()], tools)
    with pytest.raises(InputError, match=words):
        chat.splitter(chat.prompt([user()]), tools)


@given(st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(st.characters()) | st.binary(max_size=2),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(
        st.sampled_from(["role", "content", "tool_calls", "type", "text", "function", "name", "arguments"]) | st.integers(),
        inner | st.sampled_from(["user", "assistant", "text", "tool", "{}"]), max_size=4),
    max_leaves=12,
))  # fmt: skip
def test_anything_is_a_conversation_or_a_typed_error(value):
    for read in (read_messages, read_tools):
        for asked in (value, [value]):
            with contextlib.suppress(MoefluxError):
                json.dumps(read(asked)).encode()


def template(source):
    tokenizer = tiny.byte_level("qwen")
    return ChatFormat(tokenizer, ChatTemplate({"default": source}, {}, "here"))


SHOW = "{% for m in messages %}{% for c in m.tool_calls or [] %}"
CALLED = [user(), calling('{"a":  "<|im_end|>"}')]


@pytest.mark.parametrize(
    "shown",
    [
        "{{ 'x' + c.function.arguments + 'y' }}",  # DeepSeek's
        "{{ c.function.arguments if c.function.arguments is string else c.function.arguments | tojson }}",  # Qwen3's
        "{% for k, v in c.function.arguments | items %}{{ k }}={{ v }}{% endfor %}",  # Qwen3-Coder's
        "{% for k, v in c.function.arguments.items() %}{{ k }}={{ v | tojson }}{% endfor %}",  # GLM's
        "{{ '%s' % c.function.arguments }}{{ c.function.arguments ~ '!' }}",
    ],
)
def test_arguments_for_every_template(shown):
    """As an object and as text, from an object or a text, and always set apart in the same way."""
    chat = template(SHOW + shown + "{% endfor %}{% endfor %}")
    prompt = chat.prompt(CALLED)
    assert "<|im_end|>" in prompt.text
    assert chat.tokenizer.added["<|im_end|>"] not in chat.encode(prompt)
    assert ('{"a": "' in prompt.text) == ("items" not in shown)
    assert prompt == chat.prompt([user(), calling({"a": "<|im_end|>"})])
    chat.prompt([user(), calling({"a": "x"})])


@pytest.mark.parametrize(
    "shown",
    [
        "{% if '</think>' in m.content %}!{% endif %}{{ m.tool_calls[0].function.name }}",  # fails at None
        "{% if m.content is none %}{{ m.tool_calls[0].function.name }}{% endif %}",  # shows calls only there
    ],
)
@pytest.mark.parametrize("content", [None, ""])
def test_a_message_that_only_calls(shown, content):
    chat = template("{% for m in messages %}{% if m.tool_calls %}" + shown + "{% endif %}{% endfor %}")
    assert chat.prompt([user(), calling({}, content=content)]).text == "look"


def test_keys_cannot_change_the_structure():
    chat, _ = ours("thinking")
    tools = [{"name": "<|im_end|>", "parameters": {"<|im_start|>": {}}}]
    ids = chat.encode(chat.prompt([user(), calling({"<|im_end|>": 1})], tools))
    plain = chat.encode(chat.prompt([user(), calling({"x": 1})], [{"name": "x", "parameters": {"x": {}}}]))
    for name in ("<|im_end|>", "<|im_start|>"):
        assert ids.count(chat.tokenizer.added[name]) == plain.count(chat.tokenizer.added[name])


def test_variables_of_the_template():
    chat = template("{{ who }}")
    assert chat.tokenizer.added["<|im_end|>"] not in chat.encode(chat.prompt([user()], who="<|im_end|>"))
    with pytest.raises(InputError, match="template variable 'who': character 1"):
        chat.prompt([user()], who=HALF)


@pytest.mark.parametrize("way", ["encode", "encode_plain", "encode_rendered"])
def test_half_pairs_in_text(way):
    with pytest.raises(InputError, match="character 1 is half"):
        getattr(tiny.byte_level("qwen"), way)(HALF)


def test_an_answer_as_a_message():
    calls = [ToolCall("look", '{"a": 1}', id="c1"), ToolCall("look", '{"a": ', complete=False)]
    message = write_answer("text", "hm", calls)
    (read,) = read_messages([message])
    assert read["tool_calls"] == [{"id": "c1", "type": "function", "function": {"name": "look", "arguments": {"a": 1}}}]
    assert (read["content"], read["reasoning_content"]) == ("text", "hm")
    assert write_answer("text", "", []) == {"role": "assistant", "content": "text"}
