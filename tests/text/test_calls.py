"""Tool calls that are long, broken or hostile: each character is read once, and nothing but JSON counts as complete."""

from __future__ import annotations

import json
import re
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from moeflux.text.heads import HeadScanner, read_fenced, read_tagged
from moeflux.text.json_value import MOST_LEVELS, completed_members
from moeflux.text.parameters import find_parameters
from moeflux.text.regions import Splitter, Text, find_syntax
from moeflux.text.tools import CallDelta
from text import tiny
from text.test_regions import DS_BEGIN, KIMI_BEGIN, call, joined, split

N = 20_000


def run(family, marks, texts, template=""):
    """Parts of an answer that comes in these pieces; `marks`: pieces that are marker tokens."""
    tokenizer = tiny.byte_level(family)
    splitter = Splitter(find_syntax(tokenizer, template), tokenizer, schemas={})
    parts = []
    for text in texts:
        parts += splitter.mark(tokenizer.added[text]) if text in marks else splitter.add(text)
    return joined([*parts, *splitter.finish()])


def fill(text, value):
    return text.replace("%s", value)


DS_CALL, DS_SEP, DS_DONE = "<｜tool▁call▁begin｜>", "<｜tool▁sep｜>", "<｜tool▁call▁end｜>"
DEEPSEEK, QWEN, KIMI = set(tiny.DEEPSEEK), set(tiny.QWEN), set(tiny.KIMI)


@pytest.mark.parametrize("piece", [" ", "\n", "x", "`", "{", "[", '"', "\\", "<", "\t\n "])
@pytest.mark.parametrize("start", ["", "look", "look\n", "look\n```", "look\n```json", 'look\n```json\n{"a": "'])
def test_long_deepseek_calls(start, piece):
    """Rematched from the start at each token, 500 of them took minutes."""
    (found,) = run("deepseek", DEEPSEEK, [DS_BEGIN, DS_CALL, "function", DS_SEP, start, *[piece] * N])
    assert len(found[1] if found[0] == "text" else found[2]) >= N or not piece.strip() or piece in "`x<"


@pytest.mark.parametrize("piece", [" ", "x", "{", "[", '"', "\\", "<parameter=", "</parameter>", "<parameter=a>", "\n"])
@pytest.mark.parametrize(
    "start", ["", '{"name"', '{"name": "look"', '{"name": "look", "arguments": {', "<function=", "<function=f>"]
)
def test_long_tagged_calls(start, piece):
    run("qwen", QWEN, ["<tool_call>", start, *[piece] * N, "</tool_call>"])


@pytest.mark.parametrize("piece", [" ", ":1", "functions.", "{", "[", "<|tool_call_argument_begin|>"])
def test_long_kimi_calls(piece):
    begin, sep = "<|tool_call_begin|>", "<|tool_call_argument_begin|>"
    run("kimi", KIMI, [KIMI_BEGIN, begin, *[piece] * N])
    run("kimi", KIMI, [KIMI_BEGIN, begin, "functions.look:0", sep, *[piece] * N])


def test_many_spelled_markers_in_one_text():
    text = "<think>a</think>b <" * N
    found = run("bare", (), [text], template="<think> <tool_call>")
    assert len(found) == 2 * N
    assert run("bare", (), list(text[:1900]), template="<think> <tool_call>") == found[:200]


def test_much_white_space():
    assert run("qwen", QWEN, [*["\n"] * N, "x"]) == [("text", "\n" * N + "x")]


FENCED = re.compile(r"\s*([^\n]*?)\s*\n\s*```(?:json)?\s*(?=[{\[])")
TAGGED = re.compile(r'\s*\{\s*"name"\s*:\s*("(?:[^"\\]|\\.)*")\s*,\s*"(?:arguments|parameters)"\s*:\s*(?=[{])')
FUNCTION = re.compile(r"\s*<function=([^>\n]+)>")
PARAMETER = re.compile(
    r"<parameter=([^>\n]+)>\n?(.*?)\n?(?:</parameter>(?=\s*(?:<parameter=|</function>|\Z))|(?=<parameter=|</function>|\Z))",
    re.DOTALL,
)


def pieces(*words):
    return st.lists(st.sampled_from(words), max_size=14).map("".join)


def scan(reading, text, cut):
    """What is found, and where the body begins."""
    scanner, at = HeadScanner(reading), 0
    for piece in (text[:cut], text[cut:]):
        if not scanner.done:
            at += scanner.take(piece)
    return (scanner.head.name, at) if scanner.head else None


@given(pieces("look", " ", "\n", "```", "json", "{", "[", "`", "x"), st.integers(0, 30))
def test_fenced_heads_as_an_expression_finds_them(text, cut):
    found = FENCED.match(text)
    wanted = (found[1].strip(), found.end()) if found and found[1].strip() else None
    assert scan(read_fenced, text, cut) == wanted


HEADS = pieces("{", '"name"', " ", "\n", ":", '"lo"', '"\\""', ",", '"arguments"', '"parameters"', "<function=", ">", "f")
MOSTLY = st.builds(lambda text, n: '{"name": "look", "arguments": {'[:n] + text, HEADS, st.integers(0, 40))


@given(HEADS | MOSTLY, st.integers(0, 30))
def test_tagged_heads_as_an_expression_finds_them(text, cut):
    json, xml = TAGGED.match(text), FUNCTION.match(text)
    wanted = None
    if json and (name := json[1][1:-1].replace('\\"', '"').strip()):
        wanted = (name, json.end())
    elif xml and xml[1].strip():
        wanted = (xml[1].strip(), xml.end() - 1)
    assert scan(read_tagged, text, cut) == wanted


@given(pieces("<parameter=", "a", ">", "\n", "</parameter>", "</function>", " ", "b"))
def test_parameters_as_an_expression_finds_them(text):
    wanted = [(name.strip(), value) for name, value in PARAMETER.findall(text)]
    assert list(find_parameters(text)) == wanted


@pytest.mark.parametrize("value", ["NaN", "Infinity", "-Infinity", "[1, NaN]", '{"b": -Infinity}', "1e999", "01", "'x'"])
@pytest.mark.parametrize("text", [
    '<tool_call>{"name": "look", "arguments": {"a": %s}}</tool_call>',
    f"{DS_BEGIN}{DS_CALL}look{DS_SEP}{{\"a\": %s}}{DS_DONE}",
    f"{DS_BEGIN}{DS_CALL}function{DS_SEP}look\n```json\n{{\"a\": %s}}\n```{DS_DONE}",
])  # fmt: skip
def test_what_is_not_json_is_not_complete(text, value):
    arguments = fill('{"a": %s}', value)
    family = "deepseek" if DS_CALL in text else "qwen"
    assert joined(split(family, fill(text, value))[0]) == [call(arguments=arguments, complete=False)]


def test_numbers_that_are_not_json_stay_text_in_xml():
    text = "<tool_call><function=look><parameter=n>NaN</parameter></function></tool_call>"
    assert joined(split("qwen", text)[0]) == [call(arguments='{"n": "NaN"}')]
    whole = '<tool_call>{"arguments": {"n": NaN}, "name": "look"}</tool_call>'
    assert joined(split("qwen", whole)[0]) == [("text", whole)]


@pytest.mark.parametrize("n", [MOST_LEVELS + 1, 500, 990, 20_000])
def test_deep_brackets(n):
    deep = "[" * n + "]" * n
    texts = {
        "qwen": fill('<tool_call>{"name": "look", "arguments": {"a": %s}}</tool_call>', deep),
        "deepseek": f'{DS_BEGIN}{DS_CALL}look{DS_SEP}{{"a": {deep}}}{DS_DONE}',
    }
    for family, text in texts.items():
        assert joined(split(family, text)[0]) == [call(arguments=fill('{"a": %s}', deep), complete=False)]
    other = f'<tool_call>{{"arguments": {deep}, "name": "look"}}</tool_call>'
    assert joined(split("qwen", other)[0]) == [("text", other)]
    xml = f"<tool_call><function=look><parameter=deep>{deep}</parameter></function></tool_call>"
    assert joined(split("qwen", xml)[0]) == [call(arguments=fill('{"deep": "%s"}', deep))]


def test_a_sane_depth_is_complete():
    deep = "[" * 100 + "]" * 100
    text = fill('<tool_call>{"name": "look", "arguments": {"a": %s}}</tool_call>', deep)
    assert joined(split("qwen", text)[0]) == [call(arguments=fill('{"a": %s}', deep))]


@pytest.mark.parametrize("text", [
    '<tool_call>{"name": "\\q", "arguments": {}}</tool_call>',
    '<tool_call>{"name": "\\ud800", "arguments": {}}</tool_call>',
    '<tool_call>{"arguments": {}, "name": "\\ud800"}</tool_call>',
    '<tool_call>{"name": "", "arguments": {}}</tool_call>',
    f"{DS_BEGIN}{DS_CALL}function{DS_SEP}\n```json\n{{}}\n```{DS_DONE}",
])  # fmt: skip
def test_names_that_are_none_make_no_call(text):
    parts, _ = split("deepseek" if DS_CALL in text else "qwen", text)
    assert joined(parts) == [("text", text.removeprefix(DS_BEGIN))]


def test_a_second_separator_is_part_of_what_is_written():
    text = f'{DS_BEGIN}{DS_CALL}look{DS_SEP}{{"a": "{DS_SEP}"}}{DS_DONE}'
    assert joined(split("deepseek", text)[0]) == [call(arguments=f'{{"a": "{DS_SEP}"}}')]


def test_halves_of_pairs_stay_escaped():
    text = '<tool_call>{"arguments": {"a": "\\ud800"}, "name": "look"}</tool_call>'
    parts, _ = split("qwen", text)
    assert joined(parts) == [call(arguments='{"a": "\\ud800"}')]
    assert all(part.text.encode() for part in parts if isinstance(part, Text))


XML_PIECES = pieces("<parameter=", "city", "n", ">", "\n", "</parameter>", "</function>", " ", "b", "<", '"', "\\", "漢")
SCHEMA = {"look": {"properties": {"city": {"type": "string"}, "n": {"type": "integer"}}}}


@given(XML_PIECES, st.lists(st.integers(0, 80), max_size=5))
def test_xml_arguments_grow_while_they_are_written(body, cuts):
    """However they are cut: the deltas join to the end's arguments, and what has come is always the beginning of them."""
    tokenizer = tiny.byte_level("qwen")

    def parts(*texts):
        splitter = Splitter(find_syntax(tokenizer, ""), tokenizer, schemas=SCHEMA)
        opened = splitter.mark(tokenizer.added["<tool_call>"])
        found = [*opened, *(part for text in texts for part in splitter.add(text))]
        return [*found, *splitter.mark(tokenizer.added["</tool_call>"]), *splitter.finish()]

    text = f"<function=look>{body}</function>"
    edges = [0, *sorted(min(cut, len(text)) for cut in cuts), len(text)]
    cut = parts(*(text[a:b] for a, b in pairwise(edges)))
    assert joined(cut) == joined(parts(text))
    (found,) = joined(cut)
    wanted = {}
    for name, value in PARAMETER.findall(f"{body}</function>"):
        wanted.setdefault(name.strip(), value)
    assert {name: str(value) for name, value in json.loads(found[2]).items() if name != "n"} == {
        name: value for name, value in wanted.items() if name != "n"
    }
    assert found[3]


def test_xml_texts_are_told_before_they_end():
    tokenizer = tiny.byte_level("qwen")
    splitter = Splitter(find_syntax(tokenizer, ""), tokenizer, schemas=SCHEMA)
    list(splitter.mark(tokenizer.added["<tool_call>"]))
    told = [*splitter.add("<function=look>\n<parameter=city>\nThe long way to"), *splitter.add(" Rome")]
    assert "".join(part.text for part in told if isinstance(part, CallDelta)) == '{"city": "The long way to Rome'


@pytest.mark.parametrize(
    ("text", "wanted"),
    [
        ('{"a": 1, "b": "x"}', {"a": 1, "b": "x"}),
        ('{"a": 1, "b": "x', {"a": 1}),
        ('{"a": "x, y", "b": [1, 2', {"a": "x, y"}),
        ('{"a": "x"', {"a": "x"}),
        ('{"a": 12', {}),
        ('{"a": {"b": 1, "c": 2}, "d', {"a": {"b": 1, "c": 2}}),
        ('{"a": "\\"', {}),
        ("{", {}),
        ("", {}),
        ("[1]", {}),
    ],
)
def test_members_that_are_whole(text, wanted):
    assert completed_members(text) == wanted
