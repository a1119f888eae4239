"""Prompts scored by the worker: the engine's own log-probabilities, in company, in chunks, and when steps are run again."""

from __future__ import annotations

import numpy as np
import pytest

import moeflux
from moeflux.core.errors import OptionError, ReadError
from moeflux.runtime import forward as runtime_forward
from moeflux.session.events import Scored
from moeflux.session.handle import RequestOptions
from moeflux.session.prefixes import PrefixStore
from moeflux.session.prompt import Conversation
from moeflux.session.worker import Worker
from session.models import chat_model


@pytest.fixture(scope="module")
def engine(tmp_path_factory):
    folder = chat_model(tmp_path_factory.mktemp("models") / "model")
    with moeflux.load(folder, context=512, sequences=3, prefixes="64MB") as engine:
        yield engine


def prompt(seed, n):
    return [int(id) for id in np.random.default_rng(seed).integers(3, 250, n)]


def wanted(engine, ids):
    """Of every token but the first, from whole logits, computed here."""
    logits = engine.score(ids)[:, : engine.text.n_ids].astype(np.float64)
    logits -= logits.max(-1, keepdims=True)
    logprobs = logits - np.log(np.exp(logits).sum(-1, keepdims=True))
    return logprobs, [logprobs[at, id] for at, id in enumerate(ids[1:])]


def scored(handle):
    (event,) = [event for event in handle.events() if isinstance(event, Scored)]
    return event.tokens


def check(engine, ids, tokens, n_top, best=True):
    logprobs, own = wanted(engine, ids)
    assert [token.id for token in tokens] == ids
    assert tokens[0].logprob is None
    assert [token.logprob for token in tokens[1:]] == pytest.approx(own, abs=1e-4)
    for row, token in zip(logprobs, tokens[1:] if best else (), strict=False):
        assert len(token.top) == n_top
        assert token.top[0][0] == int(row.argmax())
        assert token.top[0][1] == pytest.approx(float(row.max()), abs=1e-4)


@pytest.mark.parametrize("n", [1, 2, 40, 300])
def test_a_prompt_of_any_length(engine, n):
    ids = prompt(n, n)
    with Worker(engine, engine.text) as worker:
        tokens = scored(worker.submit(ids, RequestOptions(max_tokens=0, score=2)))
    check(engine, ids, tokens, 2)


def test_in_company_and_with_the_prompt_known(engine):
    ids, store = prompt(0, 120), PrefixStore(engine)
    with Worker(engine, engine.text, store) as worker:
        worker.submit(ids, RequestOptions(max_tokens=2)).result(30)
        kept = store.lengths
        one, none = {"max_tokens": 1, "score": 1}, {"max_tokens": 0, "score": 1}
        asked = ((ids, one), (prompt(1, 60), {"max_tokens": 4}), (ids[:50], none))
        handles = [worker.submit(one, RequestOptions(**options)) for one, options in asked]
        check(engine, ids, scored(handles[0]), 1)
        check(engine, ids[:50], scored(handles[2]), 1)
        handles[1].result(30)
        finish = handles[0].result(30)
        assert finish.usage.cached == 0
        assert finish.usage.completion == 1
    assert set(kept) <= set(store.lengths)
    assert len(ids[:50]) not in store.lengths  # what is only scored is not kept


def test_a_step_that_is_run_again_scores_the_same(engine, monkeypatch):
    run, failures = runtime_forward.forward, [2, 5]
    calls = 0

    def unsteady(*arguments):
        nonlocal calls
        calls += 1
        logits = run(*arguments)
        if calls in failures:
            raise ReadError("the drive failed for once")
        return logits

    ids = [prompt(seed, 90) for seed in range(2)]
    with Worker(engine, engine.text) as worker:
        monkeypatch.setattr("moeflux.runtime.engine.forward", unsteady)
        handles = [worker.submit(one, RequestOptions(max_tokens=1, score=0)) for one in ids]
        results = [list(handle.events()) for handle in handles]
        monkeypatch.undo()
    found = [(one, event) for one, events in zip(ids, results, strict=True) for event in events if isinstance(event, Scored)]
    assert found
    for one, event in found:
        check(engine, one, event.tokens, 0, best=False)


def test_what_cannot_be_scored(engine):
    with Worker(engine, engine.text) as worker:
        talk = Conversation([{"role": "user", "content": "x"}])
        for asked, options in ((talk, {"score": 1}), ("x", {"score": 1, "grammar": moeflux.Grammar.regex("a")})):
            with pytest.raises(OptionError):
                worker.submit(asked, RequestOptions(max_tokens=1, **options))
    for bad in (-1, 101, True, 1.5):
        with pytest.raises(OptionError):
            RequestOptions(score=bad)
