"""Calls that a grammar forces: they parse, their arguments fit, and the template writes them as the grammar did."""

from __future__ import annotations

import json
import random
from functools import cache

import jsonschema
import numpy as np
import pytest

from moeflux import Grammar, InputError
from moeflux.sampling.constraint import Vocabulary
from moeflux.text.calls import ToolChoice
from moeflux.text.chat import ChatFormat
from moeflux.text.messages import Arguments
from moeflux.text.stream import TextStream
from moeflux.text.template import ChatTemplate
from moeflux.text.tools import CallDelta, CallEnd, CallStart
from text import tiny
from text.test_template import TEMPLATES

STYLES = {  # of calls: the tokens and the template of a family
    "json": ("qwen", "thinking"),
    "tight": ("qwen", "tools"),
    "xml": ("qwen", "xml"),
    "deepseek": ("deepseek", "deepseek"),
    "kimi": ("kimi", "kimi"),
    "told": ("qwen", "chatml"),
    "spelled": ("bare", "chatml"),
}
TOOLS = [
    {
        "name": "look",
        "parameters": {
            "type": "object",
            "properties": {
                "city": {"type": "string", "maxLength": 6},
                "n": {"type": "integer", "minimum": 0, "maximum": 99},
                "how": {"enum": ["fast", "slow"]},
                "deep": {"type": "array", "items": {"$ref": "#/$defs/flag"}, "maxItems": 2},
            },
            "required": ["city", "n"],
            "$defs": {"flag": {"type": "boolean"}},
        },
    },
    {"name": "wait", "parameters": {"type": "object", "properties": {}}},
]
ENDS = {"qwen": "<|im_end|>", "bare": "<|endoftext|>", "deepseek": "<｜end▁of▁sentence｜>", "kimi": "[EOS]"}


@cache
def style(name):
    family, source = STYLES[name]
    tokenizer = tiny.byte_level(family)
    chat = ChatFormat(tokenizer, ChatTemplate({"default": (TEMPLATES / f"{source}.jinja").read_text()}, {}, name))
    pieces = [tokenizer.piece(id) for id in range(tokenizer.n_ids)]
    end = tokenizer.added[ENDS[family]]
    return chat, Vocabulary(pieces, tokenizer.added.values(), [end], tokenizer.encode_plain), end


def schemas(*names):
    return {tool["name"]: tool["parameters"] for tool in TOOLS if not names or tool["name"] in names}


def write(name, grammar, seed, short=True):
    """Any answer that fits: tokens are drawn among those that may come, letters of ASCII where that is possible."""
    chat, vocabulary, end = style(name)
    constraint, draw, ids = vocabulary.constrain(Grammar.lark(grammar.lark, grammar.schemas)), random.Random(seed), []
    pieces = [chat.tokenizer.piece(id) for id in range(chat.tokenizer.n_ids)]
    plain = np.array([piece.isascii() and len(piece) < 4 for piece in pieces])
    plain[list(chat.tokenizer.added.values())] = True
    frame = chat.call_grammars.frame
    closing = chat.tokenizer.encode_plain(frame.xml.close if frame.xml else '"')
    for _ in range(400):
        if constraint.finished:
            return ids
        if forced := constraint.forced():
            new = forced
        else:
            allowed = constraint.allowed()[: chat.tokenizer.n_ids]
            if short and allowed[end]:
                return ids
            some = np.flatnonzero(allowed & plain) if (allowed & plain).any() else np.flatnonzero(allowed)
            new = [int(draw.choice(list(some)))]
            if draw.random() < 0.3:  # texts end some time
                new = [int(id) for id in closing if allowed[id]][:1] or new
        constraint.advance(new)
        ids += new
        if closing[1:] and new == closing[:1]:
            for id in closing[1:]:
                if not constraint.allowed()[id]:
                    break
                constraint.advance([id])
                ids.append(id)
    return None  # a text that never ended


def read(name, ids):
    chat, _, _ = style(name)
    prompt = chat.prompt([{"role": "user", "content": "?"}], TOOLS)
    stream = TextStream(chat.tokenizer, (), chat.splitter(prompt, TOOLS))
    if stream.reasoning:
        ids = [chat.tokenizer.added["</think>"], *ids]
    parts = [part for id in ids for part in stream.add(id)]
    return [*parts, *stream.finish()]


def fits(call):
    schema = dict(schemas()[call.name])
    value = json.loads(call.arguments)
    if isinstance(value.get("city"), str):
        value["city"] = value["city"][:6]  # XML texts are held to no length
    jsonschema.validate(value, schema)


@pytest.mark.parametrize("name", STYLES)
@pytest.mark.parametrize("parallel", [True, False])
def test_forced_calls_parse_and_fit(name, parallel):
    chat, _, _ = style(name)
    grammar = chat.call_grammars.forced(schemas(), parallel)
    n_read = 0
    for seed in range(12):
        ids = write(name, grammar, seed, short=seed % 3 > 0)
        if ids is None:
            continue
        parts = read(name, ids)
        calls = [part.call for part in parts if isinstance(part, CallEnd)]
        assert calls
        assert all(isinstance(part, (CallStart, CallDelta, CallEnd)) for part in parts)
        assert all(call.complete for call in calls)
        assert parallel or len(calls) == 1
        for call in calls:
            fits(call)
        n_read += 1
    assert n_read >= 4


@pytest.mark.parametrize("name", STYLES)
def test_the_template_writes_calls_as_the_grammar_does(name):
    """So the next prompt begins with what the model wrote."""
    chat, _, _ = style(name)
    frame = chat.call_grammars.frame
    for arguments in ({"city": "Rom", "n": 5}, {"city": "a\nb", "n": 0, "how": "fast"}):
        calls = [{"id": f"functions.look:{i}", "function": {"name": "look", "arguments": arguments}} for i in range(2)]
        said = {"role": "assistant", "content": "", "tool_calls": calls}
        text = chat.prompt([{"role": "user", "content": "?"}, said], TOOLS, add_generation_prompt=False).text
        given = ("look", Arguments(arguments, json.dumps(arguments)))
        assert frame.write([given, given]) in text


@pytest.mark.parametrize("name", ["json", "xml", "deepseek", "kimi", "tight"])
def test_calls_that_a_model_opened_itself(name):
    chat, _, _ = style(name)
    grammars = chat.call_grammars
    assert grammars.opener is not None
    for seed in range(6):
        ids = write(name, grammars.opened(schemas("look"), True), seed)
        if ids is not None:
            parts = read(name, [grammars.opener, *ids])
            assert [part.call.complete for part in parts if isinstance(part, CallEnd)]


def test_frames_are_those_of_the_templates():
    xml = style("xml")[0].call_grammars.frame
    assert xml.begin == "<tool_call>\n<function="
    assert (xml.xml.open, xml.xml.middle, xml.xml.close) == ("<parameter=", ">\n", "\n</parameter>\n")
    assert xml.end == "</function>\n</tool_call>"
    assert style("tight")[0].call_grammars.frame.begin == '<tool_call>{"name": "'
    assert style("kimi")[0].call_grammars.frame.end == "<|tool_call_end|><|tool_calls_section_end|>"
    assert style("json")[0].call_grammars.frame.between == '}\n</tool_call>\n<tool_call>\n{"name": "'


@pytest.mark.parametrize(
    ("choice", "wanted"),
    [
        (ToolChoice(), ["look", "wait"]),
        (ToolChoice("none"), []),
        (ToolChoice("required"), ["look", "wait"]),
        (ToolChoice("required", ("wait",)), ["wait"]),
        (ToolChoice("auto", ("look",)), ["look"]),
    ],
)
def test_choices(choice, wanted):
    assert list(choice.pick(schemas())) == wanted


def test_choices_that_cannot_be_met():
    with pytest.raises(InputError, match="no tool 'fly'"):
        ToolChoice("required", ("fly",)).pick(schemas())
    with pytest.raises(InputError, match="no tools"):
        ToolChoice("required").pick({})


@pytest.mark.parametrize(("name", "wanted"), [("json", "\n</think>\n\n"), ("xml", "\n</think>\n\n")])
def test_how_thoughts_end(name, wanted):
    chat, _, _ = style(name)
    assert chat.tokenizer.decode(chat.thought_end) == wanted
    assert chat.tokenizer.decode(chat.thought_gap) == "\n\n"
    assert style("spelled")[0].thought_end is None
