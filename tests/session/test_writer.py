"""One generation as a state machine: logits in, tokens to run and events out, with no engine behind it."""

from __future__ import annotations

import numpy as np
import pytest

import moeflux
from moeflux import Grammar, InputError, StateError
from moeflux.sampling.params import SamplingParams
from moeflux.session.writer import Request, Writer
from session.models import chat_model

CONTEXT = 64


@pytest.fixture(scope="module")
def text(tmp_path_factory):
    with moeflux.load(chat_model(tmp_path_factory.mktemp("models") / "model"), context=CONTEXT) as engine:
        return engine.text


def writer(text, context=CONTEXT, **options):
    return Writer(text, Request([5, 6, 7], SamplingParams(), **options), context)


def logits_for(text, token):
    row = np.zeros(text.vocab, dtype=np.float32)
    row[token] = 9.0
    return row


def write(text, one, words):
    """Gives it logits that choose the tokens of a text, until it is over."""
    turns = [one.begin()]
    for token in text.tokenizer.encode(words):
        if one.reason is None:
            turns.append(one.take(logits_for(text, token)))
    return turns


def said(turns):
    return "".join(event.text for turn in turns for event in turn.events)


def test_the_prompt_first_then_what_was_chosen(text):
    one = writer(text, max_tokens=2)
    assert one.begin().run == (5, 6, 7)
    turn = one.take(logits_for(text, 42))
    assert turn.run == (42,)
    assert [event.id for event in turn.events] == [42]
    assert one.take(logits_for(text, 43)).run == ()
    assert (one.reason, one.usage.completion) == ("length", 2)
    with pytest.raises(StateError, match="ended already"):
        one.take(logits_for(text, 44))


def test_it_begins_once(text):
    one = writer(text)
    one.begin()
    with pytest.raises(StateError, match="begun"):
        one.begin()


def test_several_forced_tokens_come_in_one_turn(text):
    """Behind the prompt, and behind a choice."""
    one = writer(text, grammar=Grammar.regex("the quick (brown|lazy) dog jumps"))
    first = one.begin()
    assert len(first.run) > 3 + 1
    assert all(event.forced for event in first.events)
    brown = text.tokenizer.encode(" brown")
    turns, i = [first], 0
    while one.reason is None:
        turns.append(one.take(logits_for(text, brown[min(i, len(brown) - 1)])))
        i += 1
    assert said(turns) in ("the quick brown dog jumps", "the quick lazy dog jumps")
    assert max(len(turn.events) for turn in turns[1:]) > 1
    assert one.reason == "complete"
    assert one.usage.forced == sum(event.forced for turn in turns for event in turn.events)


@pytest.mark.parametrize("stop", ["\n", " ", "fox"])
def test_stop_sequences_of_any_characters(text, stop):
    words = "quick\nbrown fox jumps"
    one = writer(text, stops=(stop,))
    assert said(write(text, one, words)) == words[: words.index(stop)]
    assert (one.reason, one.stop_sequence) == ("stop_sequence", stop)


def test_the_context_ends_it_and_its_last_token_need_not_be_run(text):
    one = writer(text, context=5)
    turns = write(text, one, "jumps over the lazy dog")
    assert one.reason == "context"
    assert one.usage.completion == 3
    assert sum(len(turn.run) for turn in turns) == 5
    with pytest.raises(InputError, match="prompt of 3 tokens"):
        writer(text, context=2)


def test_cancelled(text):
    one = writer(text)
    one.begin()
    one.cancel()
    assert one.reason == "cancelled"
    other = writer(text, max_tokens=1)
    other.begin()
    other.take(logits_for(text, 42))
    other.cancel()
    assert other.reason == "length"
