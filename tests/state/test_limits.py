"""States, forwards and logits beyond the plan: refused before anything changes; what was planned always fits."""

from __future__ import annotations

import json

import numpy as np
import pytest

import moeflux
from conftest import DATA
from moeflux import BudgetError, InputError, Segment
from moeflux.session.session import Session
from state.families import HYBRID, PLAIN, opened, text

CONTEXT = 512


@pytest.fixture(params=[PLAIN, HYBRID])
def engine(request):
    """With nothing left over beside what was planned."""
    with moeflux.load(DATA / "mlx" / request.param, threads=1, context=CONTEXT, sequences=2) as engine:
        engine.states.limit = engine.plan.memory.states
        yield engine


def test_more_sequences_than_planned(engine):
    sequences = []

    def go_on():
        for branch in range(100):
            sequences.append(engine.sequence())
            engine.prefill(sequences[-1], text(300, branch))

    with pytest.raises(BudgetError, match="more for states"):
        go_on()
    assert 2 <= len(sequences) < 10
    assert engine.states.used <= engine.states.limit
    sequences.clear()
    assert engine.states.used == 0


def test_what_was_planned_fits(engine):
    """Both sequences as long as the context, with checkpoints, back and forth."""
    sessions = [Session(engine, anchor_every=64) for _ in range(2)]
    for branch, session in enumerate(sessions):
        for turn in range(4):
            session.sync([*text(100, branch), *text(CONTEXT - 100, branch + turn, first=100)])
    assert all(len(session.sequence) == CONTEXT for session in sessions)
    assert engine.states.used <= engine.states.limit
    assert engine.state_bytes(CONTEXT) * 2 <= engine.states.limit


def test_what_one_more_costs(engine):
    before = engine.state_room
    session = Session(engine, anchor_every=None)
    session.sync(text(300))
    assert 0 < before - engine.state_room <= engine.state_bytes(300)
    assert engine.state_bytes(300) == engine.state_bytes(512) < engine.state_bytes(513)


def test_a_refused_forward_changes_nothing(engine):
    one = engine.sequence()
    engine.prefill(one, text(256))
    blocker = engine.states.take(engine.state_room)
    with pytest.raises(BudgetError):
        engine.forward(Segment(one, text(5, first=256)))
    assert len(one) == 256
    assert one.usable
    del blocker
    (logits,) = engine.forward(Segment(one, text(5, first=256)))
    np.testing.assert_array_equal(logits[0], engine.score(text(261))[-1])


def test_checkpoints_give_way_to_tokens():
    with moeflux.load(DATA / "mlx" / HYBRID, threads=1, context=CONTEXT) as engine:
        sequence = engine.sequence()
        for at in range(0, 200, 20):
            engine.prefill(sequence, text(20, first=at))
            sequence.checkpoint()
        assert len(sequence.checkpoints) == 10
        engine.states.limit = engine.states.used
        engine.prefill(sequence, text(200, first=200))  # the next block
        assert len(sequence.checkpoints) < 10
        assert engine.states.used <= engine.states.limit


def test_a_forward_beyond_the_plan():
    engine = opened(PLAIN)
    many = text(engine.plan.chunk_tokens + 1)
    with pytest.raises(InputError, match=f"{len(many)} tokens in one forward, but memory is planned for {len(many) - 1}"):
        engine.forward(Segment(engine.sequence(), many, "none"))
    with pytest.raises(InputError, match="rows of logits at once"):
        engine.forward(Segment(engine.sequence(), many[: engine.plan.logit_rows + 1], "all"))


def test_logits_a_few_rows_at_a_time():
    engine, tokens = opened(PLAIN), text(300)
    seen = []
    (nothing,) = engine.forward(Segment(engine.sequence(), tokens, "all", take=lambda at, rows: seen.append((at, rows))))
    assert nothing is None
    assert [at for at, _ in seen] == [0, 128, 256]
    np.testing.assert_array_equal(np.concatenate([rows for _, rows in seen]), engine.score(tokens))


def test_logits_that_do_not_fit():
    with moeflux.load(DATA / "mlx" / PLAIN, threads=1, context=8192) as engine:
        engine.states.limit = 2 * 2**20
        with pytest.raises(BudgetError, match="logits of 8000 tokens"):
            engine.score(text(8000))
        kept = engine.score(text(100))
        assert kept.shape[0] == 100


@pytest.mark.parametrize("use", ["none", "plain"])
def test_text_that_was_not_planned_for(use, tmp_path):
    from session.models import chat_model

    with moeflux.load(chat_model(tmp_path / "model"), threads=1, text=use) as engine:
        memory = engine.plan.memory
        assert (memory.text > 0) == (use == "plain")
        assert memory.constraints == 0
        with pytest.raises(BudgetError, match="constrained output" if use == "plain" else "planned for text"):
            list(engine.generate("a", max_tokens=1, grammar=moeflux.Grammar.regex("a")))
        assert len(list(engine.generate([1, 2, 3], max_tokens=2))) <= 2
        if use == "none":
            with pytest.raises(BudgetError, match="text"):
                engine.chat()


def test_a_broken_tokenizer_is_told_of_when_text_is_asked_for(tmp_path):
    from session.models import chat_model

    folder = chat_model(tmp_path / "model")
    (folder / "tokenizer.json").write_text(json.dumps({"version": "1.0"}))
    with moeflux.load(folder, threads=1) as engine:
        assert engine.score([1, 2]).shape[0] == 2
        with pytest.raises(moeflux.FormatError, match="not a tokenizer"):
            engine.generate("hello")
