"""Grammars that are large, too large, endless or no grammars: what works goes on to its end, the rest is refused at once."""

from __future__ import annotations

import json

import llguidance
import pytest

from moeflux import InputError, OptionError
from moeflux.sampling import constraint
from moeflux.sampling.constraint import Grammar
from moeflux.sampling.params import SamplingParams
from sampling.test_constraint import TOKENIZER, VOCABULARY


def write(schema, value):
    """A model writes this value, token by token, under its schema."""
    matcher = VOCABULARY.constrain(Grammar.schema(schema))
    for token in TOKENIZER.encode_plain(json.dumps(value)):
        assert matcher.allowed()[token]
        matcher.advance([token])
    assert matcher.finished


def one_key(i):
    return {
        "type": "object",
        "properties": {f"k{i}": {"type": "integer"}},
        "required": [f"k{i}"],
        "additionalProperties": False,
    }


def test_many_alternatives():
    write({"anyOf": [one_key(i) for i in range(2100)]}, {"k7": 5})


def test_many_optional_properties():
    properties = {f"k{i}": {"type": "integer"} for i in range(600)}
    write({"type": "object", "properties": properties, "additionalProperties": False}, {"k7": 5, "k90": 3})


def test_deep_values():
    """Each level is open until its end: 2,000 of them came to the engine's own limit."""
    right = VOCABULARY.constrain(Grammar.lark('start: "a" start | "b"'))
    (a,) = TOKENIZER.encode_plain("a")
    for _ in range(2500):
        right.advance([a])
    right.advance(TOKENIZER.encode_plain("b"))
    assert right.finished


def test_long_arrays():
    item = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"], "additionalProperties": False}
    write({"type": "array", "items": item, "minItems": 2000}, [{"a": i} for i in range(2500)])


ENDLESS = {"type": "object", "required": ["x"], "properties": {"x": {"$ref": "#"}}, "additionalProperties": False}


@pytest.mark.parametrize("grammar", [Grammar.schema(ENDLESS), Grammar.lark('start: "a" start')])
def test_what_never_ends_is_refused_at_once(grammar):
    with pytest.raises(InputError, match="never ends"):
        VOCABULARY.constrain(grammar)


def test_what_is_too_much_is_refused_at_once(monkeypatch):
    properties = {f"k{i}": {"type": "null"} for i in range(50)}
    schema = {"type": "object", "properties": properties, "additionalProperties": False}
    VOCABULARY.constrain(Grammar.schema(schema))
    monkeypatch.setattr(constraint, "LIMITS", llguidance.LLParserLimits(max_items_in_row=100, verbose_errors=False))
    with pytest.raises(InputError, match=r"JSON schema cannot be used.*items; max is 100"):
        VOCABULARY.constrain(Grammar.schema({**schema, "title": "another"}))


def chain(n):
    links = {f"d{i}": {"type": "array", "items": {"$ref": f"#/$defs/d{i + 1}"}} for i in range(n)}
    return {"$ref": "#/$defs/d0", "$defs": {**links, f"d{n}": {"type": "null"}}}


def test_references_that_would_end_the_process_are_refused():
    """The engine recurses along them: 3,000 of them were the end of an 8 MiB stack."""
    VOCABULARY.constrain(Grammar.schema(chain(300)))
    with pytest.raises(InputError, match=r"levels deep, the limit is 2000"):
        VOCABULARY.constrain(Grammar.schema(chain(15_000)))
    rules = "".join(f"r{i}: r{i + 1}\n" for i in range(30_000))
    with pytest.raises(InputError, match=r"30002 rules and groups, the limit is 1000"):
        VOCABULARY.constrain(Grammar.lark(f'start: r0\n{rules}r30000: "b"'))


def feed(matcher, text):
    for token in TOKENIZER.encode_plain(text):
        matcher.allowed()
        matcher.advance([token])


def test_a_limit_in_mid_answer_says_which():
    matcher = VOCABULARY.constrain(Grammar.regex("x?y?z?(w|((a{1,300}){1,300}){1,300})"))
    with pytest.raises(InputError, match=r"too much to follow.*too many expressions") as caught:
        feed(matcher, "a" * 2000)
    assert "50000" in str(caught.value)


@pytest.mark.parametrize("grammar", ["[a-z]+", '{"type": "string"}', {"type": "string"}, 5])
def test_a_grammar_says_what_it_is(grammar):
    with pytest.raises(OptionError, match=r"Grammar\.schema"):
        VOCABULARY.constrain(grammar)


def deep():
    value = {}
    for _ in range(100_000):
        value = {"items": value}
    return value


@pytest.mark.parametrize(
    "make",
    [
        lambda: Grammar.regex(5),
        lambda: Grammar.regex("\ud800"),
        lambda: Grammar.lark("start: \ud800"),
        lambda: Grammar.schema({"enum": {1, 2}}),
        lambda: Grammar.schema({"const": "\ud800"}),
        lambda: Grammar.schema({"const": float("nan")}),
        lambda: Grammar.schema(deep()),
        lambda: Grammar.schema('{"items": ' * 100_000),
        lambda: Grammar("yaml", "x"),
    ],
)
def test_what_is_no_grammar(make):
    with pytest.raises((InputError, OptionError)):
        VOCABULARY.constrain(make())


@pytest.mark.parametrize(
    "given",
    [
        {"temperature": "hot"}, {"temperature": float("nan")}, {"temperature": 10**400}, {"temperature": None},
        {"top_k": 1.5}, {"top_k": "4"}, {"top_p": [0.5]}, {"min_p": float("inf")}, {"seed": -1}, {"seed": 1.0},
        {"seed": "x"}, {"logprobs": True}, {"logprobs": 10**6}, {"logit_bias": None}, {"logit_bias": [5]},
        {"logit_bias": {"5": 1.0}}, {"logit_bias": {5: "1"}}, {"logit_bias": {5: float("nan")}}, {"logit_bias": {-1: 1.0}},
        {"repetition_penalty": 10**400}, {"presence_penalty": {}}, {"heat": 5},
    ],
    ids=str,
)  # fmt: skip
def test_what_clients_give_for_sampling(given):
    (name,) = given
    with pytest.raises(OptionError, match=name):
        SamplingParams().changed(**given)
