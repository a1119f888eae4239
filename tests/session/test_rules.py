"""What an answer may be made of: thoughts up to a budget, grammars behind them, calls by choice. Logits are ours."""

from __future__ import annotations

import json

import numpy as np
import pytest

import moeflux
from moeflux import Grammar, InputError, OptionError
from moeflux.session.handle import RequestOptions
from moeflux.session.prompt import Conversation
from moeflux.session.transcripts import Transcripts
from moeflux.session.work import prepare_work
from moeflux.text.calls import ToolChoice
from moeflux.text.messages import Arguments
from moeflux.text.regions import Text
from moeflux.text.tools import CallDelta, CallEnd, CallStart
from session.models import chat_model

CONTEXT = 2048
ASKED = [{"role": "user", "content": "go"}]
TOOLS = [
    {
        "name": "look",
        "parameters": {
            "type": "object",
            "properties": {"city": {"type": "string"}, "n": {"type": "integer"}},
            "required": ["city"],
        },
    },
    {"name": "wait", "parameters": {"type": "object", "properties": {}}},
]
PERSON = Grammar.schema({"type": "object", "properties": {"age": {"type": "integer"}}, "required": ["age"]})


@pytest.fixture(scope="module", params=["thinking", "xml"])
def text(request, tmp_path_factory):
    folder = chat_model(tmp_path_factory.mktemp("models") / request.param, request.param)
    with moeflux.load(folder, context=CONTEXT) as engine:
        return engine.text


def writer_of(text, options=None, messages=ASKED, **conversation):
    work = prepare_work(text, CONTEXT, Conversation(messages, **conversation), options or RequestOptions(), Transcripts())
    return work.writer, list(work.forced)


def say(text, writer, events, script, most=400):
    """Logits that ask for a script. What must not come comes not; who is led astray ends as soon as it may."""
    tokenizer, end = text.tokenizer, text.tokenizer.added["<|im_end|>"]
    frame = text.chat.call_grammars.frame
    for _ in range(most):
        if writer.reason is not None:
            break
        written = tokenizer.decode([event.id for event in events])
        row = np.full(text.vocab, -20.0, dtype=np.float32)
        row[end] = 5.0
        for id, wanted in ((tokenizer.encode_plain('"')[0], 4.0), (tokenizer.encode_plain("}")[0], 3.0)):
            row[id] = wanted
        if frame.xml and "<parameter=" in written and not script.startswith(written):
            closing = frame.xml.close
            n = next(n for n in range(len(closing) - 1, -1, -1) if written.endswith(closing[:n]))
            row[tokenizer.encode_plain(closing[n:])[0]] = 8.0
        if script.startswith(written) and script != written:
            row[tokenizer.encode_rendered(script[len(written) :])[0]] = 20.0
        events += writer.take(row).events
    return script.removeprefix(tokenizer.decode([event.id for event in events]))


def parts_of(events):
    return [part for event in events for part in event.parts]


def said(events, region="text"):
    return "".join(part.text for part in parts_of(events) if isinstance(part, Text) and part.region == region)


def calls_of(events):
    joined, pieces = [], {}
    for part in parts_of(events):
        match part:
            case CallStart(index, name):
                pieces[index] = [name, ""]
            case CallDelta(index, piece):
                pieces[index][1] += piece
            case CallEnd(index, call):
                assert pieces.pop(index) == [call.name, call.arguments]
                joined.append((call.name, json.loads(call.arguments), call.complete))
    return joined


def no_thoughts(**more):
    return {"variables": {"enable_thinking": False}, **more}


@pytest.mark.parametrize("n", [0, 1, 5])
def test_a_budget_ends_a_thought(text, n):
    writer, events = writer_of(text, RequestOptions(reasoning_budget=n))
    say(text, writer, events, "jumps over the lazy dog " * 9)
    assert writer.usage.reasoning >= n
    ids = [event.id for event in events]
    end = ids.index(text.tokenizer.added["</think>"])
    assert end <= n + 3
    assert all(event.forced for event in events[max(n, 0) : end + 1])
    assert text.tokenizer.decode(ids[end + 1 :]).startswith("\n\n")


def test_a_budget_waits_for_a_whole_character(text):
    writer, events = writer_of(text, RequestOptions(reasoning_budget=1))
    for token in text.tokenizer.encode_plain("漢字"):
        row = np.full(text.vocab, -20.0, dtype=np.float32)
        row[token] = 20.0
        events += writer.take(row).events
        if events[-1].forced:
            break
    assert said(events, "reasoning") in ("漢", "漢字")
    assert events[-1].forced


def test_a_grammar_holds_behind_the_thought(text):
    writer, events = writer_of(text, RequestOptions(grammar=PERSON))
    say(text, writer, events, 'well, {"age": ...</think>\n\n{"age": 5}')
    assert said(events, "reasoning") == 'well, {"age": ...'
    assert json.loads(said(events)) == {"age": 5}
    assert writer.reason == "complete"
    ids = [event.id for event in events]
    assert text.tokenizer.decode(ids).count("</think>\n\n{") == 1


def test_budget_and_grammar(text):
    writer, events = writer_of(text, RequestOptions(grammar=PERSON, reasoning_budget=4))
    say(text, writer, events, "jumps over the lazy dog " * 9)
    assert said(events, "reasoning")
    assert isinstance(json.loads(said(events))["age"], int) or writer.reason == "length"


def test_thoughts_may_begin_where_they_are_asked_for(text):
    options = RequestOptions(grammar=PERSON)
    prefilled = [*ASKED, {"role": "assistant", "content": "Here:"}]
    for thinking, wanted in ((True, "hm"), (None, "")):
        variables = {} if thinking is None else {"enable_thinking": thinking}
        writer, events = writer_of(text, options, prefilled, variables=variables)
        say(text, writer, events, '<think>hm</think>\n\n{"age": 7}')
        assert said(events, "reasoning") == wanted
        assert "age" in json.loads(said(events))


def test_required_calls_are_forced(text):
    writer, events = writer_of(text, tools=TOOLS, choice=ToolChoice("required"), **no_thoughts())
    say(text, writer, events, "I would rather talk")
    ((name, _, complete), *_) = calls_of(events)
    assert (name in ("look", "wait"), complete) == (True, True)
    assert said(events) == ""


def test_a_named_tool(text):
    writer, events = writer_of(text, tools=TOOLS, choice=ToolChoice("required", ("wait",), False), **no_thoughts())
    say(text, writer, events, "I would rather look")
    assert calls_of(events) == [("wait", {}, True)]
    assert writer.reason == "complete"


def test_thoughts_come_before_a_forced_call(text):
    writer, events = writer_of(text, tools=TOOLS, choice=ToolChoice("required", ("wait",)))
    say(text, writer, events, "let me think</think>")
    assert said(events, "reasoning") == "let me think"
    assert calls_of(events)[0] == ("wait", {}, True)


def written(text, *calls):
    """Calls as this model's template writes them."""
    made = [{"id": "c", "function": {"name": name, "arguments": arguments}} for name, arguments in calls]
    said = {"role": "assistant", "content": "", "tool_calls": made}
    whole = text.chat.prompt([*ASKED, said], TOOLS, add_generation_prompt=False).text
    return whole[whole.index("<tool_call>") : whole.rindex("</tool_call>") + len("</tool_call>")]


def test_the_model_chooses(text):
    script = "Well.\n" + written(text, ("look", {"city": "Rom", "n": 5})) + "\n" + written(text, ("wait", {}))
    writer, events = writer_of(text, tools=TOOLS, **no_thoughts())
    say(text, writer, events, script)
    assert calls_of(events) == [("look", {"city": "Rom", "n": 5}, True), ("wait", {}, True)]
    assert said(events) == "Well."
    assert writer.reason == "end"


@pytest.mark.parametrize("city", ['O\'Neil "Q"', "<b> & </b>", "🙂 漢字", "two\nlines", "back\\slash"])
def test_arguments_of_any_characters(text, city):
    """As one token after the other, each of which must be one that may come."""
    writer, events = writer_of(text, tools=TOOLS, **no_thoughts())
    given = Arguments({"city": city}, json.dumps({"city": city}, ensure_ascii=False))
    wanted = text.tokenizer.encode_rendered(text.chat.call_grammars.frame.write([("look", given)])).copy()
    while wanted and writer.reason is None:
        row = np.full(text.vocab, -20.0, dtype=np.float32)
        row[wanted[0]] = 20.0
        new = writer.take(row).events
        events += new
        written, left = (text.tokenizer.decode(ids) for ids in ([event.id for event in new], wanted))
        assert left.startswith(written) or "\ufffd" in written
        wanted = wanted[1:] if len(new) == 1 else text.tokenizer.encode_rendered(left.removeprefix(written))
    assert calls_of(events) == [("look", {"city": city}, True)]


def test_a_call_that_was_begun_is_a_good_one(text):
    """Names that are none and arguments that do not fit cannot be written."""
    writer, events = writer_of(text, tools=TOOLS, **no_thoughts())
    say(text, writer, events, "<tool_call>I do not know how")
    ((name, _, complete), *_) = calls_of(events)
    assert name in ("look", "wait")
    assert complete


def test_one_call_only(text):
    script = written(text, ("look", {"city": "Rom"})) + "\n" + written(text, ("wait", {}))
    writer, events = writer_of(text, tools=TOOLS, choice=ToolChoice(parallel=False), **no_thoughts())
    rest = say(text, writer, events, script)
    assert calls_of(events) == [("look", {"city": "Rom"}, True)]
    assert writer.reason == "complete"
    assert rest


def test_no_calls_though_tools_are_told(text):
    writer, events = writer_of(text, tools=TOOLS, choice=ToolChoice("none"), **no_thoughts())
    say(text, writer, events, "<tool_call>", most=3)
    assert text.tokenizer.added["<tool_call>"] not in [event.id for event in events]
    told = prepare_work(text, CONTEXT, Conversation(ASKED, TOOLS), RequestOptions(), Transcripts())
    banned = prepare_work(
        text, CONTEXT, Conversation(ASKED, TOOLS, choice=ToolChoice("none")), RequestOptions(), Transcripts()
    )
    assert told.run == banned.run


def test_tools_that_were_loaded_can_be_called(text):
    late = ({"type": "function", "function": {"name": "dig", "parameters": {"type": "object", "properties": {}}}},)
    writer, events = writer_of(text, tools=TOOLS, loaded=late, choice=ToolChoice("required", ("dig",)), **no_thoughts())
    say(text, writer, events, "")
    assert calls_of(events)[0][0] == "dig"


def test_schemas_that_cannot_be_followed_are_left_open(text, caplog):
    odd = [{"name": "odd", "parameters": {"type": "object", "properties": {"a": {"type": "array", "not": {}}}}}]
    writer, events = writer_of(text, tools=odd, choice=ToolChoice("required"), **no_thoughts())
    assert "odd" in caplog.text
    say(text, writer, events, "")
    assert calls_of(events)[0][0] == "odd"


@pytest.mark.parametrize("calls", [True, False])
def test_a_call_or_an_answer_that_fits(text, calls):
    """With tools and a grammar the model may call instead of answering."""
    script = written(text, ("wait", {})) if calls else '{"age": 5}'
    for thought in ("", "hm</think>\n\n"):
        more = {} if thought else no_thoughts()
        writer, events = writer_of(text, RequestOptions(grammar=PERSON), tools=TOOLS, **more)
        say(text, writer, events, thought + script)
        assert calls_of(events) == ([("wait", {}, True)] if calls else [])
        assert said(events) == ("" if calls else '{"age": 5}')


def test_many_tools(text):
    """More than a grammar can name with all their parameters: arguments are then any."""
    inner = {f"p{i}": {"type": "integer"} for i in range(30)}
    many = tuple({"name": f"tool_{i}", "parameters": {"type": "object", "properties": inner}} for i in range(60))
    writer, events = writer_of(text, loaded=many, **no_thoughts())
    say(text, writer, events, written(text, ("tool_7", {"p0": 1})))
    assert calls_of(events) == [("tool_7", {"p0": 1}, True)]
    writer, events = writer_of(text, loaded=many, choice=ToolChoice("required", ("tool_9",)), **no_thoughts())
    say(text, writer, events, "")
    assert calls_of(events)[0][0] == "tool_9"


def test_what_cannot_be(text):
    with pytest.raises(InputError, match="both be a call and fit"):
        writer_of(text, RequestOptions(grammar=PERSON), tools=TOOLS, choice=ToolChoice("required"))
    with pytest.raises(InputError, match="no tool 'fly'"):
        writer_of(text, tools=TOOLS, choice=ToolChoice("required", ("fly",)))
    with pytest.raises(OptionError, match="number of tokens"):
        RequestOptions(reasoning_budget=-1)


def test_nothing_is_said_where_nothing_is_wanted(text):
    writer, events = writer_of(text, RequestOptions(max_tokens=0, grammar=PERSON), **no_thoughts())
    assert events == []
    turn = writer.take(np.zeros(text.vocab, dtype=np.float32))
    assert (turn.run, turn.events, writer.reason) == ((), (), "length")


def test_reasons_of_an_end(text):
    n = len(prepare_work(text, CONTEXT, Conversation(ASKED), RequestOptions(), Transcripts()).run)
    work = prepare_work(text, n + 3, Conversation(ASKED), RequestOptions(), Transcripts())
    say(text, work.writer, [], "jumps over the lazy dog")
    assert work.writer.reason == "context"
