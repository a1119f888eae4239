"""Constrained output always fits, whatever the model would rather say: here it says nothing but noise."""

from __future__ import annotations

import json
import re

import jsonschema
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from moeflux import InputError, StateError
from moeflux.sampling.constraint import Grammar, Vocabulary
from moeflux.sampling.params import SamplingParams
from moeflux.sampling.sampler import Sampler
from sampling.schemas import any_schema
from text import tiny

TOKENIZER = tiny.byte_level("qwen")
PADDED = TOKENIZER.n_ids + 50
ENDS = [TOKENIZER.added["<|im_end|>"], TOKENIZER.added["<|endoftext|>"]]
PIECES = [TOKENIZER.piece(id) for id in range(TOKENIZER.n_ids)]
VOCABULARY = Vocabulary(PIECES, TOKENIZER.added.values(), ENDS, TOKENIZER.encode_plain)
MOST = 20_000


def noise(grammar, seed, *, params=None, force=True):
    """What a model with random logits writes, and how many of its tokens were forced."""
    random = np.random.default_rng(seed)
    constraint = VOCABULARY.constrain(grammar)
    sampler = Sampler(params or SamplingParams(temperature=1.0, seed=seed), TOKENIZER.n_ids)
    tokens, n_forced = [], 0
    while not constraint.finished and len(tokens) < MOST:
        forced = constraint.forced() if force else []
        if forced:
            n_forced += len(forced)
        else:
            forced = [sampler.sample((random.standard_normal(PADDED) * 3).astype(np.float32), constraint.allowed()).token]
            if forced[0] in ENDS:
                assert constraint.complete
                break
        constraint.advance(forced)
        tokens += forced
    assert len(tokens) < MOST
    assert not set(tokens) & set(TOKENIZER.special)
    return TOKENIZER.decode(tokens), n_forced


@settings(max_examples=1000, suppress_health_check=list(HealthCheck))
@given(any_schema, st.integers(0, 2**32 - 1))
def test_any_schema(schema, seed):
    jsonschema.Draft202012Validator.check_schema(schema)
    text, _ = noise(Grammar.schema(schema), seed)
    jsonschema.validate(json.loads(text), schema, cls=jsonschema.Draft202012Validator)


def test_text_that_a_tokenizer_would_normalise():
    """U+2F800 is another character in normal form: what is forced are its own bytes."""
    assert TOKENIZER.decode(TOKENIZER.encode_plain("\U0002f800")) != "\U0002f800"
    text, n_forced = noise(Grammar.schema({"enum": ["\U0002f800"]}), 0)
    assert json.loads(text) == "\U0002f800"
    assert n_forced > 0


@given(st.integers(0, 1000))
def test_every_way_of_sampling_stays_inside(seed):
    schema = {"type": "array", "items": {"enum": ["red", "green", 3]}, "minItems": 2, "maxItems": 4}
    for params in (SamplingParams(), SamplingParams(temperature=0.5, top_k=5), SamplingParams(temperature=2, top_p=0.3)):
        value = json.loads(noise(Grammar.schema(schema), seed, params=params)[0])
        assert 2 <= len(value) <= 4
        assert set(value) <= {"red", "green", 3}


def test_forced_tokens_change_nothing_but_the_work():
    """Where there is no choice, asking the model gives the same text."""
    schema = {
        "type": "object",
        "properties": {
            "temperature_in_celsius": {"type": "integer", "minimum": 3, "maximum": 3},
            "unit": {"const": "degrees"},
        },
        "required": ["temperature_in_celsius", "unit"],
        "additionalProperties": False,
    }
    text, n_forced = noise(Grammar.schema(schema), 0)
    assert text == noise(Grammar.schema(schema), 0, force=False)[0] == '{"temperature_in_celsius": 3, "unit": "degrees"}'
    assert n_forced >= len(TOKENIZER.encode(text)) // 2


PATTERNS = [r"[a-z]{3,8}@[a-z]{2,5}\.(com|org)", r"(ab|cd)+e", r"[0-9]{4}-[0-9]{2}", "漢字[あいう]{2}", "a*"]


@pytest.mark.parametrize("pattern", PATTERNS)
@given(seed=st.integers(0, 1000))
def test_regular_expressions(pattern, seed):
    assert re.fullmatch(pattern, noise(Grammar.regex(pattern), seed)[0])


@given(st.integers(0, 1000))
def test_grammars(seed):
    text, _ = noise(Grammar.lark('start: sum\nsum: NUMBER ("+" NUMBER)~1..4\nNUMBER: /[0-9]{1,3}/'), seed)
    assert re.fullmatch(r"\d{1,3}(\+\d{1,3}){1,4}", text)


def test_an_end_is_allowed_exactly_where_the_output_is_complete():
    constraint = VOCABULARY.constrain(Grammar.regex("ab+"))
    for text, complete in (("a", False), ("b", True), ("b", True)):
        constraint.advance(TOKENIZER.encode(text))
        assert constraint.complete is complete
        assert constraint.allowed()[ENDS].tolist() == [complete] * 2


@pytest.mark.parametrize(
    ("grammar", "words"),
    [
        (Grammar.schema('{"type": "object", "not": {}}'), r"JSON schema .*\"not\""),
        (Grammar.schema({"enum": []}), "JSON schema"),
        (Grammar.schema({"type": "strin"}), "strin"),
        (Grammar.schema({"$ref": "#/nowhere"}), "nowhere"),
        (Grammar.schema({"$ref": "#"}), "nothing fits"),
        (Grammar.schema("[1"), "JSON schema"),
        (Grammar.schema("[]"), "JSON schema"),
        (Grammar.schema({"type": "string", "pattern": "(?=a)b"}), "look-ahead"),
        (Grammar.regex("("), "regular expression .* unclosed"),
        (Grammar.lark("start: nowhere"), "grammar .* nowhere"),
    ],
    ids=lambda value: value.text[:30] if isinstance(value, Grammar) else "",
)  # fmt: skip
def test_what_cannot_be_used_is_refused_with_the_reason(grammar, words):
    with pytest.raises(InputError, match=re.compile(words, re.DOTALL)):
        VOCABULARY.constrain(grammar)


@pytest.mark.parametrize("spelled", ["<think>", "<|im_end|>", "a<tool_call>b"])
def test_text_that_spells_added_tokens_comes_out_as_text(spelled):
    text, _ = noise(Grammar.schema({"const": f"say {spelled}!"}), 0)
    assert json.loads(text) == f"say {spelled}!"


def test_a_token_that_does_not_fit_is_an_error():
    constraint = VOCABULARY.constrain(Grammar.regex("ab"))
    with pytest.raises(StateError, match="cannot go on"):
        constraint.advance(TOKENIZER.encode("b"))


def test_a_model_that_never_ends_cannot_be_constrained():
    with pytest.raises(InputError, match="ends a text"):
        Vocabulary(PIECES, (), (), TOKENIZER.encode_plain)


def test_recursive_schemas():
    tree = {"type": "object", "properties": {"next": {"$ref": "#"}}, "additionalProperties": False}
    constraint = VOCABULARY.constrain(Grammar.schema(tree))
    constraint.advance(TOKENIZER.encode_plain('{"next": {"next": {}}}'))
    assert constraint.finished
