"""Generation: what comes out, why it ends, and what it costs."""

from __future__ import annotations

import dataclasses
import json
import threading

import numpy as np
import pytest

import moeflux
from moeflux import Grammar, InputError
from moeflux.runtime import forward as runtime_forward
from moeflux.runtime.cancel import CancelFlag
from moeflux.sampling.params import SamplingParams
from moeflux.session.generate import Generation
from moeflux.session.model_text import ModelText
from moeflux.session.writer import Request
from moeflux.text.regions import Splitter, Text
from session.models import chat_model, readable

PROMPT = "The quick brown fox"


@pytest.fixture(scope="module")
def engine(tmp_path_factory):
    with moeflux.load(chat_model(tmp_path_factory.mktemp("models") / "model")) as engine:
        yield engine


@pytest.fixture
def counted(engine, monkeypatch):
    """How many tokens each forward ran."""
    sizes, forward = [], engine.forward

    def counting(*segments, **options):
        sizes.append(sum(len(segment.tokens) for segment in segments))
        return forward(*segments, **options)

    monkeypatch.setattr(engine, "forward", counting)
    return sizes


def run(engine, prompt=PROMPT, **options):
    generation = engine.generate(prompt, **options)
    tokens = list(generation)
    return tokens, generation.finish


def test_tokens_are_the_most_likely_ones_and_their_texts_join(engine):
    tokens, finish = run(engine, max_tokens=12)
    ids = engine.text.tokenizer.encode(PROMPT)
    for token in tokens:
        assert token.id == engine.score(ids)[-1][: engine.text.n_ids].argmax()
        ids.append(token.id)
    assert "".join(token.text for token in tokens) == engine.text.tokenizer.decode([token.id for token in tokens])
    assert finish.reason == "length"
    assert finish.seed is None
    assert (finish.usage.prompt, finish.usage.completion, finish.usage.cached) == (len(ids) - 12, 12, 0)
    assert 0 < finish.timings.prefill <= finish.timings.first <= finish.timings.total
    assert finish.timings.tok_s(finish.usage) > 0
    assert finish.store.asked > 0


def test_ids_without_a_tokenizer(engine, mlx, tmp_path):
    folder = chat_model(tmp_path / "model")
    (folder / "tokenizer.json").unlink()
    with moeflux.load(folder) as bare:
        assert [token.text for token in bare.generate([5, 6], max_tokens=3)] == [""] * 3
        for options in ({"stop": ["x"]}, {"grammar": Grammar.regex("a")}):
            with pytest.raises(moeflux.MissingTensorError, match=r"tokenizer\.json"):
                bare.generate([5, 6], max_tokens=3, **options)


def test_ends(engine, tmp_path):
    """Each of the three files can name an id that ends the text."""
    options = {"max_tokens": 4, "logit_bias": readable(engine.text)}
    ids = [token.id for token in run(engine, **options)[0]]
    assert len(set(ids)) > 1
    last = ids.index(ids[-1])
    for file in ("config", "generation_config", "tokenizer_config"):
        folder = chat_model(tmp_path / file)
        path = folder / f"{file}.json"
        values = json.loads(path.read_text())
        if file == "tokenizer_config":
            values["eos_token"] = engine.text.tokenizer._tokenizer.id_to_token(ids[-1])
        else:
            values["eos_token_id"] = ids[-1] if file == "config" else [1, ids[-1]]
        path.write_text(json.dumps(values))
        with moeflux.load(folder) as other:
            tokens, finish = run(other, **options)
        assert [token.id for token in tokens] == ids[:last]
        assert finish.reason == "end"
        assert finish.usage.completion == last


def test_stop_sequences_span_tokens_and_are_not_shown(engine):
    letters = readable(engine.text)
    tokens, _ = run(engine, max_tokens=30, logit_bias=letters)
    text = "".join(token.text for token in tokens)
    stop = text[9:13]
    assert all(stop not in token.text for token in tokens)
    stopped, finish = run(engine, max_tokens=30, logit_bias=letters, stop=["never", stop])
    assert "".join(token.text for token in stopped) == text[: text.index(stop)]
    assert (finish.reason, finish.stop_sequence) == ("stop_sequence", stop)
    assert len(stopped) < 30


def test_text_that_was_held_back_comes_with_the_end(engine, tmp_path):
    """The beginning of a stop sequence that never came, and then the model ends."""
    letters = readable(engine.text)
    tokens, _ = run(engine, max_tokens=3, logit_bias=letters)
    text = "".join(token.text for token in tokens[:2])
    generation = engine.generate(PROMPT, max_tokens=3, logit_bias=letters, stop=[text + "\x00never"])
    generation._writer._ends = frozenset({tokens[2].id})
    found = list(generation)
    assert "".join(token.text for token in found) == text
    assert found[-1].id == tokens[2].id
    assert generation.finish.usage.completion == 2


def test_seeds_reproduce(engine):
    def ids(**options):
        tokens, finish = run(engine, max_tokens=8, temperature=2.0, **options)
        return [token.id for token in tokens], finish.seed

    first, seed = ids()
    assert ids(seed=seed) == (first, seed)
    assert ids(seed=seed + 1)[0] != first


def test_logprobs(engine):
    tokens, _ = run(engine, max_tokens=3, logprobs=4)
    ids = engine.text.tokenizer.encode(PROMPT)
    for token in tokens:
        logits = engine.score(ids)[-1][: engine.text.n_ids].astype(np.float64)
        exact = logits - logits.max() - np.log(np.exp(logits - logits.max()).sum())
        assert token.logprob == pytest.approx(exact[token.id], abs=1e-4)
        assert token.top[0][0] == token.id
        assert len(token.top) == 4
        ids.append(token.id)


@pytest.mark.parametrize(
    ("config", "wanted"),
    [
        ({}, SamplingParams()),
        ({"do_sample": True}, SamplingParams(temperature=1.0)),
        ({"temperature": 0.6, "top_k": 20, "top_p": 0.95}, SamplingParams(temperature=0.6, top_k=20, top_p=0.95)),
        ({"do_sample": False, "temperature": 0.6}, SamplingParams()),
        ({"do_sample": True, "min_p": 0.1, "repetition_penalty": 1.1},
         SamplingParams(temperature=1.0, min_p=0.1, repetition_penalty=1.1)),
    ],
)  # fmt: skip
def test_the_checkpoints_own_way_of_sampling(engine, tmp_path, config, wanted):
    text = ModelText(chat_model(tmp_path / "model", generation=config), engine.spec)
    assert text.defaults == wanted
    assert text.sampling(temperature=0.0).greedy
    assert text.sampling(seed=3) == dataclasses.replace(wanted, seed=3)


@pytest.mark.parametrize(
    "config", [{"temperature": -1}, {"do_sample": 1}, {"top_p": 7}, {"eos_token_id": "x"}, {"top_k": 0.5}]
)
def test_a_broken_generation_config_is_named(engine, tmp_path, config):
    text = ModelText(chat_model(tmp_path / "model", generation=config), engine.spec)
    with pytest.raises(moeflux.ConfigError, match=rf"generation_config\.json.*{next(iter(config))}"):
        _ = text.defaults, text.ends


def test_truncation_asks_for_sampling(engine):
    assert engine.text.sampling(top_p=0.9) == SamplingParams(temperature=1.0, top_p=0.9)
    with pytest.raises(moeflux.OptionError, match=r"top_k.*temperature 0"):
        engine.text.sampling(top_k=5, temperature=0.0)
    with pytest.raises(moeflux.OptionError, match="tempreture"):
        engine.generate("x", max_tokens=1, tempreture=1)


SCHEMA = {
    "type": "object",
    "properties": {
        "a_long_name_that_is_forced": {"enum": ["red", "green"]},
        "n": {"type": "integer", "minimum": 0, "maximum": 99},
    },
    "required": ["a_long_name_that_is_forced", "n"],
    "additionalProperties": False,
}


def test_constrained_output_fits_and_forced_tokens_cost_no_step(engine, counted):
    tokens, finish = run(engine, max_tokens=200, grammar=Grammar.schema(SCHEMA), temperature=1.5, seed=1)
    value = json.loads("".join(token.text for token in tokens))
    assert value["a_long_name_that_is_forced"] in ("red", "green")
    assert finish.reason == "complete"
    forced = sum(token.forced for token in tokens)
    assert finish.usage.forced == forced > 10
    assert len(counted) == len(tokens) - forced  # one forward for each token that was a choice
    fed = finish.usage.prompt + len(tokens)
    assert sum(counted) <= fed
    assert sum(counted) >= fed - forced


def test_forced_tokens_give_what_feeding_them_gives(engine):
    """The logits after a forced stretch are those of the same tokens, one by one."""
    tokens, _ = run(engine, max_tokens=200, grammar=Grammar.schema(SCHEMA), logprobs=0)
    ids = engine.text.tokenizer.encode(PROMPT)
    for token in tokens:
        if not token.forced:
            logits = engine.score(ids)[-1][: engine.text.n_ids].astype(np.float64)
            exact = logits - logits.max() - np.log(np.exp(logits - logits.max()).sum())
            assert token.logprob == pytest.approx(exact[token.id], abs=1e-4)
        ids.append(token.id)


def test_max_tokens_counts_forced_tokens_too(engine):
    tokens, finish = run(engine, max_tokens=5, grammar=Grammar.schema(SCHEMA))
    assert (len(tokens), finish.reason) == (5, "length")


def test_a_constraint_waits_for_the_end_of_reasoning(engine):
    """Inside reasoning anything goes; from the marker on, the grammar does, and markers are text."""
    text = engine.text
    answer = text.tokenizer.added["</think>"]
    splitter = Splitter(text.chat.syntax, text.tokenizer, reasoning=True)
    params = SamplingParams(temperature=1.0, seed=4, logit_bias={answer: 4.0})
    ids = text.tokenizer.encode(PROMPT)
    generation = Generation(engine, text, Request(ids, params, 400, (), Grammar.regex("(yes|no) <think>"), splitter))
    tokens = list(generation)
    parts = [part for token in tokens for part in token.parts]
    said = "".join(part.text for part in parts if isinstance(part, Text) and part.region == "text")
    assert said in ("yes <think>", "no <think>")
    at = [token.id for token in tokens].index(answer)
    assert generation.finish.usage.reasoning == at + 1
    assert generation.finish.reason == "complete"


def test_the_context_is_an_end(tmp_path):
    with moeflux.load(chat_model(tmp_path / "model"), context=20) as engine:
        tokens, finish = run(engine, [5] * 15)
        assert (len(tokens), finish.reason) == (6, "context")  # the last token need not be run
        tokens, finish = run(engine, [5] * 15, grammar=Grammar.regex("a{50}"))
        assert finish.reason == "context"
        with pytest.raises(InputError, match=r"prompt of 21 tokens.* 20"):
            engine.generate([5] * 21)


def test_cancel_between_tokens(engine):
    generation = engine.generate(PROMPT, max_tokens=50)
    first = next(generation)
    generation.cancel()
    assert list(generation) == []
    assert generation.finish.reason == "cancelled"
    assert generation.finish.usage.completion == 1
    assert first.id == run(engine, max_tokens=1)[0][0].id


def test_cancel_from_another_thread(engine):
    generation = engine.generate(PROMPT, logit_bias=readable(engine.text))
    next(generation)
    other = threading.Thread(target=generation.cancel)
    other.start()
    other.join()
    assert list(generation) == []
    assert (generation.finish.reason, generation.finish.usage.completion) == ("cancelled", 1)


def test_what_was_held_back_is_told_when_cancelled(engine):
    letters = readable(engine.text)
    text = "".join(token.text for token in run(engine, max_tokens=2, logit_bias=letters)[0])
    generation = engine.generate(PROMPT, logit_bias=letters, stop=[text + "\x00never"])
    assert next(generation).text + next(generation).text == ""
    generation.cancel()
    list(generation)
    assert "".join(part.text for part in generation.finish.parts) == text


class TestPrefill:
    @pytest.fixture
    def small(self, engine, monkeypatch):
        monkeypatch.setattr(engine, "plan", dataclasses.replace(engine.plan, chunk_tokens=8))
        return engine

    def test_progress(self, small):
        seen = []
        sequence = small.sequence()
        logits = small.prefill(sequence, list(range(3, 25)), seen.append)
        assert [p.done for p in seen] == [0, 8, 16, 22]
        assert {p.total for p in seen} == {22}
        assert seen[0].eta_s is None
        assert seen[1].eta_s > 0 == seen[-1].eta_s
        assert seen[-1].bytes_read >= seen[0].bytes_read == 0
        np.testing.assert_array_equal(logits, small.score(range(3, 25))[-1])
        assert sequence.tokens == list(range(3, 25))

    def test_cancelled_between_chunks_the_sequence_stays_usable(self, small):
        sequence, tokens, flag = small.sequence(), list(range(3, 40)), CancelFlag()
        with pytest.raises(moeflux.CancelledError, match="16 of 37"):
            small.prefill(sequence, tokens, lambda now: flag.set() if now.done == 16 else None, flag)
        assert sequence.tokens == tokens[:16]
        logits = small.prefill(sequence, tokens[16:])
        np.testing.assert_array_equal(logits, small.score(tokens)[-1])

    @pytest.mark.parametrize("error", [moeflux.CancelledError("now"), moeflux.ReadError("the drive is gone")])
    def test_what_ends_inside_of_a_chunk_leaves_the_whole_chunks_before_it(self, small, monkeypatch, error):
        sequence, tokens, calls, run = small.sequence(), list(range(3, 40)), [], runtime_forward.forward

        def ending(model, batch, *rest):
            calls.append(1)
            out = run(model, batch, *rest)
            if len(calls) == 3:  # as when the last layer fails
                del sequence.tokens[16:]
                sequence.mark_broken("it ended")
                raise error
            return out

        with monkeypatch.context() as patch:
            patch.setattr("moeflux.runtime.engine.forward", ending)
            with pytest.raises(type(error)):
                small.prefill(sequence, tokens)
        assert sequence.tokens == tokens[:16]
        np.testing.assert_array_equal(small.prefill(sequence, tokens[16:]), small.score(tokens)[-1])

    def test_refused_before_anything_is_run(self, small):
        sequence = small.sequence()
        for tokens in ([], [5] * 9 + [99999]):
            with pytest.raises(InputError):
                small.prefill(sequence, tokens)
        with pytest.raises(InputError, match="planned for"):
            small.prefill(sequence, [5] * (small.plan.context + 1))
        assert len(sequence) == 0

    def test_cancelled_generation(self, small):
        seen = []
        generation = small.generate(list(range(3, 60)), progress=lambda p: (seen.append(p), generation.cancel()))
        assert list(generation) == []
        assert (generation.finish.reason, generation.finish.usage.completion) == ("cancelled", 0)
        assert len(seen) == 1
