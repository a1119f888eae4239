"""Losses against the plain sum over all logits, in any windows; lossy options change the model and say so."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest

import moeflux
from moeflux.plan import text_size
from moeflux.session.evaluate import evaluate
from session.models import CHECKPOINT, chat_model

TEXT = "The quick brown fox, Größe 漢字! " * 6


@pytest.fixture(scope="module")
def engine(tmp_path_factory):
    with moeflux.load(chat_model(tmp_path_factory.mktemp("models") / "model")) as engine:
        yield engine


def plain(engine, ids):
    logits = engine.score(ids[:-1]).astype(np.float64)
    logits -= logits.max(axis=1, keepdims=True)
    logits -= np.log(np.exp(logits).sum(axis=1, keepdims=True))
    return -logits[np.arange(len(ids) - 1), ids[1:]].sum()


def test_one_window(engine, monkeypatch):
    ids = engine.text.tokenizer.encode(TEXT)
    score = evaluate(engine, engine.text.tokenizer, TEXT)
    assert score.n_tokens == len(ids) - 1
    assert score.n_characters == len(TEXT) - len(engine.text.tokenizer.decode(ids[:1]))
    assert score.nats == pytest.approx(plain(engine, ids), rel=1e-6)
    assert score.bits_per_character == pytest.approx(score.nats / np.log(2) / score.n_characters)
    assert score.perplexity == pytest.approx(np.exp(score.nats / score.n_tokens))
    monkeypatch.setattr(text_size, "TURN_ROWS", 7)
    assert evaluate(engine, engine.text.tokenizer, TEXT).nats == pytest.approx(score.nats, rel=1e-9)


def test_windows_foretell_every_token_once(engine, monkeypatch):
    monkeypatch.setattr(engine, "plan", dataclasses.replace(engine.plan, context=16))
    ids, seen = engine.text.tokenizer.encode(TEXT), []
    score = evaluate(engine, engine.text.tokenizer, TEXT, progress=lambda *now: seen.append(now))
    monkeypatch.undo()
    parts = [plain(engine, ids[start : start + 17]) for start in range(0, len(ids) - 1, 16)]
    assert score.nats == pytest.approx(sum(parts), rel=1e-6)
    assert seen[-1] == (len(ids) - 1, len(ids) - 1)
    assert len(seen) == len(parts)


def test_some_tokens_only(engine):
    ids = engine.text.tokenizer.encode(TEXT)
    score = evaluate(engine, engine.text.tokenizer, TEXT, max_tokens=10)
    assert score.n_tokens == 10
    assert score.nats == pytest.approx(plain(engine, ids[:11]), rel=1e-6)
    with pytest.raises(moeflux.InputError, match="foretells nothing"):
        evaluate(engine, engine.text.tokenizer, "a")


class TestLossy:
    def score(self, **options):
        with moeflux.load(CHECKPOINT, **options) as engine:
            return engine.score(range(3, 60)), engine.notes

    @pytest.mark.parametrize("backend", ["native", "numpy"])
    def test_fewer_experts(self, tmp_path, backend):
        """The same bits as from a checkpoint that says so itself."""
        own, _ = self.score(backend=backend)
        fewer, notes = self.score(k=1, backend=backend)
        folder = chat_model(tmp_path / "model")
        config = (folder / "config.json").read_text()
        assert '"num_experts_per_tok": 2' in config
        (folder / "config.json").write_text(config.replace('"num_experts_per_tok": 2', '"num_experts_per_tok": 1'))
        with moeflux.load(folder, backend=backend) as engine:
            np.testing.assert_array_equal(fewer, engine.score(range(3, 60)))
        assert notes[0] == "lossy: 1 of the model's 2 experts per token"
        assert np.abs(fewer - own).max() > 0.1

    def test_fewer_bits(self):
        own, _ = self.score()
        scores = {bits: self.score(bits=bits) for bits in (2, 3)}
        reference, _ = self.score(bits=2, backend="numpy")
        assert scores[2][1][0] == "lossy: experts requantised to 2 bits"
        far = {bits: np.abs(logits - own).mean() for bits, (logits, _) in scores.items()}
        assert far[2] > far[3] > 0
        assert np.abs(scores[2][0] - reference).mean() < 0.2 * far[2]

    def test_their_states_are_not_taken_for_the_whole_models(self):
        identities = set()
        for options in ({}, {"k": 1}, {"bits": 2}, {"bits": 3}, {"k": 1, "bits": 2}):
            with moeflux.load(CHECKPOINT, **options) as engine:
                identities.add(engine.identity)
        assert len(identities) == 5

    REFUSED = ({"k": 2}, {"k": 0}, {"k": 1.0}, {"bits": 4}, {"bits": 7}, {"bits": 1}, {"bits": True})

    @pytest.mark.parametrize("options", REFUSED, ids=str)
    def test_what_would_not_be_less_is_refused(self, options):
        with pytest.raises(moeflux.OptionError, match=next(iter(options))) as caught:
            moeflux.load(CHECKPOINT, **options)
        assert caught.value.hint
