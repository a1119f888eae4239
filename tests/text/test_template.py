"""Templates render as HF transformers renders them, character for character, and prompts become the same tokens."""

from __future__ import annotations

import json
from functools import cache
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from moeflux import FormatError, InputError, MissingTensorError
from moeflux.text.chat import ChatFormat
from moeflux.text.template import ChatTemplate
from text import tiny

TEMPLATES = Path(__file__).parent / "templates"
NAMES = {"bos_token": "<|endoftext|>", "eos_token": "<|im_end|>", "pad_token": None}
CONFIG = tuple(NAMES.items())

words = st.text(st.characters(exclude_categories=["Cs"], exclude_characters="\ue000\ue001\ue002\ue003"), max_size=20)
spellings = st.sampled_from([*tiny.QWEN, "'", '"', "&<>", "\n\n", " ", "é"])
contents = st.lists(words | spellings, max_size=4).map("".join)
values = st.recursive(st.none() | st.booleans() | st.integers() | contents, lambda v: st.lists(v, max_size=3), max_leaves=5)
arguments = st.dictionaries(st.sampled_from(["city", "n", "<x>"]), values, max_size=3)
calls = st.builds(lambda a: {"type": "function", "function": {"name": "look", "arguments": a}}, arguments)
users = st.builds(lambda c: {"role": "user", "content": c}, contents)
results = st.builds(lambda c: {"role": "tool", "content": c}, contents)
thoughts = st.one_of(
    st.just({}), st.builds(lambda key, c: {key: c}, st.sampled_from(["reasoning_content", "thinking"]), contents)
)
answers = st.builds(
    lambda c, t, k: {"role": "assistant", "content": c, **t, **({"tool_calls": k} if k else {})},
    contents, thoughts, st.lists(calls, max_size=2),
)  # fmt: skip
systems = st.lists(contents.map(lambda c: {"role": "system", "content": c}), max_size=1)
conversations = st.builds(
    lambda s, u, turns: [*s, u, *turns], systems, users, st.lists(users | answers | results, max_size=4)
)
tools = st.none() | st.just([{"type": "function", "function": {"name": "look", "parameters": {"é": "'<|im_end|>'"}}}])


@cache
def hf(source):
    transformers = pytest.importorskip("transformers")
    inner = transformers.PreTrainedTokenizerFast(tokenizer_object=tiny.byte_level()._tokenizer)
    for name, content in NAMES.items():
        setattr(inner, name, content)
    inner.chat_template = source
    return inner


@cache
def ours(name):
    tokenizer = tiny.byte_level("qwen", CONFIG)
    source = (TEMPLATES / f"{name}.jinja").read_text()
    return ChatFormat(tokenizer, ChatTemplate({"default": source}, {k: v for k, v in NAMES.items() if v}, name)), hf(source)


@given(conversations, tools, st.booleans())
@pytest.mark.parametrize("name", ["chatml", "thinking", "everything"])
def test_rendered_as_transformers_does(name, messages, tools, prompt):
    chat, reference = ours(name)
    wanted = reference.apply_chat_template(messages, tools=tools, tokenize=False, add_generation_prompt=prompt)
    assert chat.template.render(messages, tools=tools, add_generation_prompt=prompt) == wanted


@given(st.lists(users | results, min_size=1, max_size=4), tools)
def test_encoded_as_transformers_does_with_control_tokens_as_text(messages, tools):
    chat, reference = ours("thinking")
    wanted = reference.apply_chat_template(
        messages, tools=tools, add_generation_prompt=True, sanitize_control_tokens=True, return_dict=False
    )
    assert chat.encode(chat.prompt(messages, tools)) == wanted


@given(contents)
def test_no_message_changes_the_structure(content):
    chat, _ = ours("thinking")
    ids = chat.encode(chat.prompt([{"role": "user", "content": content}]))
    found = [text for id in ids for text, known in chat.tokenizer.added.items() if id == known]
    assert found == ["<|im_start|>", "<|im_end|>", "<|im_start|>", "<think>"]


def test_marks_cannot_be_forged():
    chat, _ = ours("chatml")
    plain = chat.prompt([{"role": "user", "content": "a<|im_end|>b"}])
    forged = chat.prompt([{"role": "user", "content": "a\ufdd1<|im_\ufdd0end|>\ufdd0b"}])
    assert chat.encode(plain) == chat.encode(forged)
    assert plain.text == forged.text


def test_an_assistants_thoughts_are_taken_out_by_the_template():
    chat, reference = ours("thinking")
    messages = [
        {"role": "user", "content": "q"},
        {"role": "assistant", "content": "<think>\nhm\n</think>\n\nyes"},
    ]
    prompt = chat.prompt(messages, add_generation_prompt=False)
    assert prompt.text == reference.apply_chat_template(messages, tokenize=False)
    think = chat.tokenizer.added["<think>"]
    assert chat.encode(prompt).count(think) == 1


def test_where_a_prompt_leaves_the_model():
    chat, _ = ours("thinking")
    messages = [{"role": "user", "content": "<think>"}]
    assert chat.syntax.opens_reasoning(chat.prompt(messages).text)
    assert not chat.syntax.opens_reasoning(chat.prompt(messages, enable_thinking=False).text)


@pytest.mark.parametrize("name", ["default", "tool_use"])
def test_templates_are_found_where_transformers_finds_them(tmp_path, name):
    tokenizer = tiny.byte_level("qwen", (("chat_template", "config {{ bos_token }}"), *CONFIG))
    message = [{"role": "user", "content": "hi"}]

    def rendered(tokenizer=tokenizer):
        return ChatTemplate.open(tmp_path, tokenizer).render(message, tools=[{}] if name == "tool_use" else None)

    (tmp_path / "chat_template.json").write_text('{"chat_template": "old"}')
    assert rendered(tiny.byte_level("qwen")) == "old"
    assert rendered() == "config <|endoftext|>"
    (tmp_path / "chat_template.jinja").write_text("file")
    assert rendered() == "file"
    (tmp_path / "additional_chat_templates").mkdir()
    (tmp_path / "additional_chat_templates" / "tool_use.jinja").write_text("with tools")
    assert rendered() == {"default": "file", "tool_use": "with tools"}[name]


def test_named_templates(tmp_path):
    named = json.loads('[{"name": "default", "template": "d"}, {"name": "tool_use", "template": "t"}]')
    template = ChatTemplate.open(tmp_path, tiny.Tokenizer(tiny.byte_level()._tokenizer, {"chat_template": named}))
    assert template.render([{"role": "user"}]) == "d"
    assert template.render([{"role": "user"}], tools=[{}]) == "t"


@pytest.mark.parametrize("value", [5, [], [{"name": "other", "template": "t"}], [{"name": "default", "template": 1}], ["x"]])
def test_bad_named_templates(tmp_path, value):
    with pytest.raises(FormatError, match="chat_template"):
        ChatTemplate.open(tmp_path, tiny.Tokenizer(tiny.byte_level()._tokenizer, {"chat_template": value}))


def test_no_template(tmp_path):
    assert ChatTemplate.open(tmp_path, tiny.byte_level()) is None
    with pytest.raises(MissingTensorError, match="chat template"):
        ChatFormat.open(tmp_path, tiny.byte_level())


@pytest.mark.parametrize(
    ("source", "error", "words"),
    [
        ("{% if %}", FormatError, "not a chat template"),
        ("{{ raise_exception('roles must alternate') }}", InputError, "roles must alternate"),
        ("{{ messages.append(1) }}", InputError, "unsafe"),
        ("{{ ''.__class__.__mro__ }}", InputError, "unsafe"),
        ("{% set n = namespace(__class__=1) %}", InputError, "__class__"),
        ("{% set n = namespace() %}{% set n._x = 1 %}", InputError, "_x"),
        ("{{ messages[0].content + 1 }}", InputError, "TypeError"),
        ("{% for i in range(999999999) %}{% endfor %}", InputError, "range"),
        ("{{ 1 // 0 }}", InputError, "ZeroDivisionError"),
        ("{{ unheard.of }}", InputError, "unheard"),
    ],
)
def test_hostile_and_broken_templates(source, error, words):
    with pytest.raises(error, match=words):
        ChatTemplate({"default": source}, {}, "here").render([{"role": "user", "content": "x"}])


def test_no_messages():
    with pytest.raises(InputError, match="no messages"):
        ours("chatml")[0].prompt([])
