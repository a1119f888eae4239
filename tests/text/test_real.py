"""Tokenizers and templates of published models: the same text, the same tokens, the same prompts as transformers."""

from __future__ import annotations

import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from moeflux import InputError
from moeflux.text.chat import ChatFormat
from moeflux.text.messages import Arguments
from moeflux.text.template import ChatTemplate
from moeflux.text.tokenizer import Tokenizer
from text import real
from text.test_detokenize import TEXTS, stream
from text.test_template import conversations, tools

KNOWN = {  # name -> (ids of "Hello, world!", what its template must know, the syntax that follows)
    "qwen3": ([9707, 11, 1879, 0], "<|im_start|>", "tagged"),
    "deepseek_v3": ([19923, 14, 2058, 3], "<｜Assistant｜>", "deepseek"),
    "deepseek": ([19923, 14, 2058, 3], None, None),
}


@pytest.fixture(scope="module", params=KNOWN)
def case(request):
    folder = getattr(real, request.param)(request.config.cache.mkdir("moeflux-tokenizers"))
    return request.param, folder, Tokenizer.open(folder)


def test_known_ids(case):
    name, _, tokenizer = case
    assert tokenizer.encode_rendered("Hello, world!") == KNOWN[name][0]
    assert tokenizer.encode_plain("Hello, world!") == KNOWN[name][0]


@settings(max_examples=300)
@given(text=TEXTS)
def test_text_streams_whole(case, text):
    _, _, tokenizer = case
    ids = tokenizer.encode(text)
    pieces, rest = stream(tokenizer, ids)
    assert "".join(pieces) + rest == tokenizer.decode(ids)


@settings(max_examples=300)
@given(data=st.data())
def test_any_tokens_stream_whole(case, data):
    _, _, tokenizer = case
    ids = data.draw(st.lists(st.integers(0, tokenizer.n_ids - 1), max_size=40))
    pieces, rest = stream(tokenizer, ids)
    assert "".join(pieces) + rest == tokenizer.decode(ids)


def test_templates_as_transformers_renders_them(case):
    name, folder, tokenizer = case
    _, word, style = KNOWN[name]
    if word is None:
        pytest.skip(f"the package of {name} has no template")
    transformers = pytest.importorskip("transformers")
    config = json.loads((folder / "tokenizer_config.json").read_text())
    reference = transformers.PreTrainedTokenizerFast(tokenizer_object=tokenizer._tokenizer)
    reference.chat_template = config["chat_template"]
    for key in ("bos_token", "eos_token", "pad_token"):
        setattr(reference, key, tokenizer.name_of(key))
    chat = ChatFormat(tokenizer, ChatTemplate.open(folder, tokenizer))
    assert chat.syntax.style == style
    assert word in chat.prompt([{"role": "user", "content": "hi"}]).text

    @settings(max_examples=200)
    @given(conversations, tools, st.booleans())
    def check(messages, tools, thinking):
        variables = {"add_generation_prompt": True, "enable_thinking": thinking}
        try:
            wanted = reference.apply_chat_template(messages, tools=tools, tokenize=False, **variables)
        except Exception:
            with pytest.raises(InputError, match="template"):
                chat.template.render(messages, tools=tools, **variables)
            return
        assert chat.template.render(messages, tools=tools, **variables) == wanted

    check()


FRAMES = {
    "qwen3": '<tool_call>\n{"name": "look", "arguments": {"a": 1}}\n</tool_call>',
    "deepseek_v3": "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>look\n```json\n"
    '{"a": 1}\n```<｜tool▁call▁end｜><｜tool▁calls▁end｜>',
}


def test_calls_are_framed_as_published_templates_write_them(case):
    """What a grammar forces is what the next prompt says, of a conversation that went on with tools."""
    name, folder, tokenizer = case
    if name not in FRAMES:
        pytest.skip(f"the package of {name} has no template")
    chat = ChatFormat.open(folder, tokenizer)
    given = Arguments({"a": 1}, '{"a": 1}')
    assert chat.call_grammars.frame.write([("look", given)]) == FRAMES[name]
    call = {"id": "c", "type": "function", "function": {"name": "look", "arguments": given}}
    calls = [{"role": "assistant", "content": "", "tool_calls": [call, call]}, {"role": "tool", "content": "x"}]
    tool = {"name": "look", "description": "looks", "parameters": {"type": "object"}}
    prompt = chat.prompt([{"role": "user", "content": "hi"}, *calls], [tool])
    assert chat.call_grammars.frame.write([("look", given), ("look", given)]) in prompt.text
    assert "looks" in prompt.text  # told as text where the template knows no tools
    if name == "qwen3":
        assert tokenizer.decode(chat.thought_end) == "\n</think>\n\n"
