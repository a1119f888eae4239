"""Reasoning, text and tool calls, split the same however the model cut its tokens."""

from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from moeflux.text.json_value import completed_members
from moeflux.text.regions import Splitter, Text, find_syntax
from moeflux.text.stream import TextStream
from moeflux.text.tools import CallDelta, CallEnd, CallStart
from text import tiny

TOOLS = {"look": {"properties": {"city": {"type": "string"}, "n": {"type": "integer"}, "deep": {"type": "object"}}}}


def split(family, text, *, stops=(), reasoning=False, spelled=(), schemas=TOOLS):
    """What a model that writes this text means. `spelled`: added tokens that it wrote letter by letter."""
    tokenizer = tiny.byte_level(family)
    splitter = Splitter(find_syntax(tokenizer, ""), tokenizer, reasoning=reasoning, schemas=schemas)
    stream = TextStream(tokenizer, stops, splitter)
    ids = tokenizer.encode_rendered(text)
    spelled_ids = {tokenizer.added[word]: tokenizer.encode_plain(word) for word in spelled}
    ids = [piece for id in ids for piece in spelled_ids.get(id, [id])]
    parts = [part for id in ids for part in stream.add(id)]
    return [*parts, *stream.finish()], stream


def joined(parts):
    """Neighbouring texts of a region as one; calls by their ends, checked against their pieces."""
    result, pieces = [], {}
    for part in parts:
        match part:
            case Text(text, region) if result and result[-1][0] == region:
                result[-1] = (region, result[-1][1] + text)
            case Text(text, region):
                result.append((region, text))
            case CallStart(index, name):
                pieces[index] = [name, ""]
            case CallDelta(index, text):
                pieces[index][1] += text
            case CallEnd(index, call):
                assert pieces.pop(index) == [call.name, call.arguments]
                result.append(("call", call.name, call.arguments, call.complete, call.id))
    assert not pieces
    return result


def call(name="look", arguments='{"city": "Köln"}', complete=True, id=None):
    return ("call", name, arguments, complete, id)


JSON_CALL = '<tool_call>\n{"name": "look", "arguments": {"city": "Köln"}}\n</tool_call>'
XML_CALL = "<tool_call>\n<function=look>\n<parameter=city>\nKöln\n</parameter>\n</function>\n</tool_call>"
FENCED = '<｜tool▁call▁begin｜>function<｜tool▁sep｜>look\n```json\n{"city": "Köln"}\n```<｜tool▁call▁end｜>'
NAMED = '<｜tool▁call▁begin｜>look<｜tool▁sep｜>{"city": "Köln"}<｜tool▁call▁end｜>'
KIMI_CALL = '<|tool_call_begin|>functions.look:0<|tool_call_argument_begin|>{"city": "Köln"}<|tool_call_end|>'
DS_BEGIN, DS_END = "<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>"
KIMI_BEGIN, KIMI_END = "<|tool_calls_section_begin|>", "<|tool_calls_section_end|>"

CASES = [
    ("qwen", "just text \n", [("text", "just text \n")]),
    ("qwen", "<think>\nhm 漢\n</think>\n\nyes", [("reasoning", "hm 漢"), ("text", "yes")]),
    ("qwen", f"let me see\n{JSON_CALL}", [("text", "let me see"), call()]),
    ("qwen", f"{JSON_CALL}\n{JSON_CALL}<|im_end|>", [call(), call()]),
    ("qwen", f"<think>\nhm\n</think>\n\n{XML_CALL}\ndone", [("reasoning", "hm"), call(), ("text", "done")]),
    ("qwen", f"<think>\nhm {JSON_CALL}", [("reasoning", "hm"), call()]),  # some forget to close their thoughts
    ("deepseek", f"<think>hm</think>ok{DS_BEGIN}{FENCED}\n{NAMED}{DS_END}", [
        ("reasoning", "hm"), ("text", "ok"), call(), call()]),
    ("kimi", f"ok{KIMI_BEGIN}{KIMI_CALL}{KIMI_CALL}{KIMI_END}", [
        ("text", "ok"), call(id="functions.look:0"), call(id="functions.look:0")]),
    ("bare", "<think>hm</think>", [("text", "<think>hm</think>")]),
]  # fmt: skip


@pytest.mark.parametrize(("family", "text", "wanted"), CASES, ids=lambda value: value if isinstance(value, str) else "")
def test_each_syntax(family, text, wanted):
    assert joined(split(family, text)[0]) == wanted


def test_a_prompt_can_end_inside_reasoning():
    assert joined(split("qwen", "\nhm\n</think>\n\nyes", reasoning=True)[0]) == [("reasoning", "hm"), ("text", "yes")]


def test_spelled_markers_are_text():
    """What was written letter by letter where a token exists is a quotation, not structure."""
    text = f"say {JSON_CALL} and </think>"
    parts, _ = split("qwen", text, spelled=["<tool_call>", "</tool_call>", "</think>"])
    assert joined(parts) == [("text", text)]


@given(
    st.lists(st.sampled_from([*"<>/think \n", "<think>", "</think>", "<tool_call>", "a", "漢"]), max_size=20).map("".join)
)
def test_where_markers_are_no_tokens_their_spelling_counts(text):
    """However the text is cut: all at once, or character by character."""
    tokenizer = tiny.byte_level("bare")
    syntax = find_syntax(tokenizer, "<think> <tool_call>")
    whole, single = Splitter(syntax, tokenizer), Splitter(syntax, tokenizer)
    at_once = [*whole.add(text), *whole.finish()]
    one_by_one = [part for character in text for part in single.add(character)]
    assert joined([*one_by_one, *single.finish()]) == joined(at_once)
    lost = "".join(part.text for part in at_once if isinstance(part, Text)).replace(" ", "").replace("\n", "")
    kept = text.replace(" ", "").replace("\n", "")
    assert all(lost.count(c) == kept.count(c) for c in "a漢")


@pytest.mark.parametrize(
    ("text", "wanted"),
    [
        # a cut in the arguments, in the name, before anything
        ('<tool_call>\n{"name": "look", "arguments": {"city": "Kö', [call(arguments='{"city": "Kö', complete=False)]),
        ('<tool_call>\n{"name": "lo', [("text", '<tool_call>\n{"name": "lo')]),
        ("<tool_call>", [("text", "<tool_call>")]),
        # members in another order, arguments as a string, none at all
        ('<tool_call>{"arguments": {"n": 1}, "name": "look"}</tool_call>', [call(arguments='{"n": 1}')]),
        ('<tool_call>{"name": "look", "arguments": "{\\"n\\": 1}"}</tool_call>', [call(arguments='{"n": 1}')]),
        ('<tool_call>{"name": "look"}</tool_call>', [call(arguments="{}")]),
        # not a call
        ("<tool_call>nonsense</tool_call>!", [("text", "<tool_call>nonsense</tool_call>!")]),
        # braces, quotes and escapes inside strings
        (
            r'<tool_call>{"name": "look", "arguments": {"city": "}\"{]\\", "n": [1, {"a": "]"}]}}</tool_call>',
            [call(arguments=r'{"city": "}\"{]\\", "n": [1, {"a": "]"}]}')],
        ),
    ],
)
def test_odd_json_calls(text, wanted):
    assert joined(split("qwen", text)[0]) == wanted


def xml(*parameters, close="</parameter>\n", end="</function>\n"):
    inner = "".join(f"<parameter={name}>\n{value}\n{close}" for name, value in parameters)
    return f"<tool_call>\n<function=look>\n{inner}{end}</tool_call>"


@pytest.mark.parametrize(
    ("text", "wanted"),
    [
        (xml(("city", "5"), ("n", "5"), ("deep", '{"a": [1]}')), {"city": "5", "n": 5, "deep": {"a": [1]}}),
        (xml(("city", "two\nlines <b> & 'q'")), {"city": "two\nlines <b> & 'q'"}),
        (xml(("n", "not a number"), ("other", "7")), {"n": "not a number", "other": "7"}),
        (xml(("city", "a"), ("n", "True"), close=""), {"city": "a", "n": True}),
        (xml(("city", "has </parameter> inside")), {"city": "has </parameter> inside"}),
        (xml(), {}),
    ],
)
def test_xml_calls(text, wanted):
    ((kind, name, arguments, complete, _),) = joined(split("qwen", text)[0])
    assert (kind, name, json.loads(arguments), complete) == ("call", "look", wanted, True)


def test_a_cut_xml_call_keeps_what_was_complete():
    text = "<tool_call><function=look><parameter=city>Rome</parameter><parameter=n>1"
    ((_, name, arguments, complete, _),) = joined(split("qwen", text)[0])
    assert (name, completed_members(arguments), complete) == ("look", {"city": "Rome"}, False)


def test_names_and_arguments_come_early():
    """A client sees a call begin and its arguments grow; it does not wait for the end."""
    parts, _ = split("qwen", JSON_CALL)
    kinds = [type(part).__name__ for part in parts]
    assert kinds[0] == "CallStart"
    assert kinds.count("CallDelta") > 3


@given(st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=4), inner, max_size=3),
    max_leaves=8,
))  # fmt: skip
@pytest.mark.parametrize("family", ["qwen", "deepseek", "kimi"])
def test_any_arguments_come_through(family, value):
    arguments = json.dumps({"value": value}, ensure_ascii=False)
    texts = {
        "qwen": f'<tool_call>{{"name": "look", "arguments": {arguments}}}</tool_call>',
        "deepseek": f"{DS_BEGIN}<｜tool▁call▁begin｜>look<｜tool▁sep｜>{arguments}<｜tool▁call▁end｜>{DS_END}",
        "kimi": f"{KIMI_BEGIN}<|tool_call_begin|>functions.look:1<|tool_call_argument_begin|>{arguments}<|tool_call_end|>",
    }
    markers = [text for text in tiny.FAMILIES[family] if text in arguments]
    if not markers:
        ((_, name, found, complete, _),) = joined(split(family, texts[family])[0])
        assert (name, complete) == ("look", True)
        assert json.loads(found) == json.loads(tiny.byte_level(family).decode(tiny.byte_level(family).encode(arguments)))


def test_stops_count_in_text_only():
    parts, stream = split("qwen", "<think>STOP</think>\n\none STOP two", stops=["STOP"])
    assert joined(parts) == [("reasoning", "STOP"), ("text", "one ")]
    assert stream.stopped_by == "STOP"


def test_what_could_have_been_a_stop_comes_before_what_follows():
    parts, stream = split("qwen", f"end ST{JSON_CALL}", stops=["STOP"])
    assert joined(parts) == [("text", "end ST"), call()]
    assert stream.stopped_by is None


def test_special_tokens_are_not_shown():
    assert joined(split("qwen", "one<|im_start|> two<|im_end|>")[0]) == [("text", "one two")]


@pytest.mark.parametrize(
    ("stop", "text", "wanted"),
    [
        ("\n", "one\ntwo", [("text", "one")]),
        ("\n\n", "one\ntwo\n\nthree", [("text", "one\ntwo")]),
        ("\n", "<think>a\nb</think>\n\none\ntwo", [("reasoning", "a\nb"), ("text", "one")]),
        ("\n", f"let me see\n{JSON_CALL}", [("text", "let me see")]),
        (" ", "one two", [("text", "one")]),
        (".\n", "one.\ntwo", [("text", "one")]),
    ],
)
def test_white_space_stops(stop, text, wanted):
    parts, stream = split("qwen", text, stops=[stop])
    assert joined(parts) == wanted
    assert stream.stopped_by == stop


def test_white_space_stops_at_once():
    """Nothing has to follow: a model that writes nothing but line ends is stopped by the first one."""
    tokenizer = tiny.byte_level("qwen")
    stream = TextStream(tokenizer, "\n", Splitter(find_syntax(tokenizer, ""), tokenizer))
    for token in tokenizer.encode_rendered("one\n"):
        assert stream.stopped_by is None
        stream.add(token)
    assert stream.stopped_by == "\n"
    assert stream.add(tokenizer.encode_rendered("x")[0]) == ()
    assert stream.finish() == ()


def test_framing_is_no_stop():
    parts, stream = split("qwen", f"<think>a</think>\n\n{JSON_CALL}\n{JSON_CALL}", stops=["\n"])
    assert joined(parts) == [("reasoning", "a"), call(), call()]
    assert stream.stopped_by is None
