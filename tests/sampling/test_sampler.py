"""Sampling against the plain way: the same tokens are possible, with the same probabilities."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from moeflux import OptionError
from moeflux.sampling import choose as room
from moeflux.sampling.choose import choose, largest
from moeflux.sampling.params import SamplingParams
from moeflux.sampling.sampler import Sampler
from sampling.plain import distribution

TINY = 1e-5  # rounding of float32 sums, in probability

logits = st.integers(0, 2**32 - 1).flatmap(
    lambda seed: st.builds(
        lambda n, spread, ties: _logits(seed, n, spread, ties),
        st.integers(1, 700), st.sampled_from([0.0, 0.5, 3.0, 30.0]), st.booleans(),
    )
)  # fmt: skip
sampled = st.builds(
    SamplingParams,
    temperature=st.floats(0.05, 3),
    top_k=st.sampled_from([0, 1, 2, 10, 50, 1000]),
    top_p=st.sampled_from([1.0, 0.99931, 0.90317, 0.51137, 0.05171]),
    min_p=st.sampled_from([0.0, 0.01, 0.3, 1.0]),
)
tokens = st.lists(st.integers(0, 30), max_size=12)
penalties = st.builds(
    SamplingParams,
    temperature=st.just(1.0),
    repetition_penalty=st.sampled_from([1.0, 0.7, 1.3]),
    presence_penalty=st.sampled_from([0.0, -1.5, 2.0]),
    frequency_penalty=st.sampled_from([0.0, -0.5, 0.3]),
    logit_bias=st.dictionaries(st.integers(0, 30), st.floats(-20, 20, width=32), max_size=4),
)


def _logits(seed, n, spread, ties):
    x = (np.random.default_rng(seed).standard_normal(n) * spread).astype(np.float32)
    return np.round(x) if ties else x


def check(pick, p):
    """Laid along 0 to 1 in order of id, each token must have its stretch."""
    ends = np.cumsum(p)
    for draw in (0.0, 0.1, 0.37, 0.5, 0.61, 0.9, 1 - 2**-53):
        token = pick(draw)
        assert p[token] > 0 or _at_a_boundary(p, token)
        assert ends[token] - p[token] - TINY <= draw <= ends[token] + TINY


def _at_a_boundary(p, token):
    """Where a sum in another order ends a hair earlier or later, the set differs by a token of hardly any weight."""
    return np.sort(p[p > 0])[0] < TINY


@given(logits, sampled)
@pytest.mark.parametrize("few", [4096, 16], ids=["sorted", "halved"])
def test_truncation_and_draws(few, logits, params):
    """With a small limit for sorting, the paths for large vocabularies run too."""
    keep, group = room.SORTED, room.GROUP
    try:
        room.SORTED, room.GROUP = few, min(group, few // 4)
        check(lambda draw: choose(logits, params, draw), distribution(logits, params))
    finally:
        room.SORTED, room.GROUP = keep, group


@given(logits, st.integers(1, 800))
def test_largest(logits, k):
    wanted = sorted(range(len(logits)), key=lambda id: (-logits[id], id))[:k]
    assert largest(logits, min(k, len(logits))).tolist() == sorted(wanted)


@given(st.integers(0, 1000), penalties, tokens, tokens)
def test_penalties_and_bias(seed, params, prompt, said):
    logits = _logits(seed, 31, 3.0, False)
    changed = Sampler(params, 31, prompt)
    changed.note(said)
    x = changed._processors.apply(logits)
    p = np.exp(x.astype(np.float64) - x.max())
    np.testing.assert_allclose(p / p.sum(), distribution(logits, params, prompt, said), atol=1e-5)


@given(logits, sampled | st.just(SamplingParams()), st.integers(0, 2**32), st.data())
def test_only_allowed_tokens(logits, params, seed, data):
    allowed = np.random.default_rng(data.draw(st.integers(0, 100))).random(len(logits)) < data.draw(st.floats(0, 1))
    allowed[data.draw(st.integers(0, len(logits) - 1))] = True
    sampler = Sampler(SamplingParams(**{**vars(params), "seed": seed}), len(logits))
    p = distribution(logits, params, allowed=allowed)
    for _ in range(3):
        token = sampler.sample(logits, allowed).token
        assert allowed[token]
        assert p[token] > 0 or _at_a_boundary(p, token)


MANY = [
    SamplingParams(), SamplingParams(temperature=1.0), SamplingParams(temperature=1.0, top_p=0.9),
    SamplingParams(temperature=0.7, top_k=40), SamplingParams(temperature=0.7, top_k=3000, min_p=0.01),
]  # fmt: skip


@pytest.mark.parametrize("params", MANY, ids=str)
@pytest.mark.parametrize("which", ["every third", "likely", "unlikely", "hopeless"])
def test_a_large_vocabulary_gives_what_the_allowed_part_alone_gives(which, params):
    logits = _logits(1, 20_000, 3.0, False)
    order = np.sort(logits)
    allowed = {
        "every third": np.arange(20_000) % 3 == 0,
        "likely": logits > order[10_000],
        "unlikely": logits < order[10_000],
        "hopeless": logits < order[10_000],
    }[which]
    if which == "hopeless":
        logits = np.where(allowed, logits - 200, logits)
    ids = np.flatnonzero(allowed)
    p = distribution(logits[ids], params)
    check(lambda draw: int(np.searchsorted(ids, choose(logits, params, draw, allowed))), p)
    assert all(allowed[choose(logits, params, draw, allowed)] for draw in np.linspace(0, 1, 50, endpoint=False))


@settings(max_examples=30)
@given(st.sampled_from([SamplingParams(temperature=0.8, top_k=40, top_p=0.95), SamplingParams(temperature=1.3, min_p=0.05)]))
def test_frequencies_over_many_draws(params):
    """Chi-square over the distribution, with a fixed seed."""
    logits = _logits(3, 200, 2.0, False)
    p = distribution(logits, params)
    sampler = Sampler(SamplingParams(**{**vars(params), "seed": 11}), 200)
    n = 4000
    counts = np.bincount([sampler.sample(logits).token for _ in range(n)], minlength=200)
    assert counts[p == 0].sum() == 0
    common = p * n >= 5
    statistic = float(((counts[common] - p[common] * n) ** 2 / (p[common] * n)).sum())
    assert statistic < common.sum() + 5 * np.sqrt(2 * common.sum())


def test_seeds_reproduce_and_no_seed_differs():
    logits = _logits(0, 1000, 0.0, False)

    def run(seed):
        sampler = Sampler(SamplingParams(temperature=1, seed=seed), 1000)
        return [sampler.sample(logits).token for _ in range(8)], sampler.seed

    assert run(7) == run(7)
    assert run(7)[0] != run(8)[0]
    again, seed = run(None)
    assert run(None)[0] != again
    assert run(seed)[0] == again


@given(logits, st.integers(0, 20))
def test_logprobs_are_of_the_models_own_distribution(logits, n):
    params = SamplingParams(temperature=0.3, top_k=3, logprobs=n, repetition_penalty=2.0, seed=1)
    choice = Sampler(params, len(logits), [0]).sample(logits)
    exact = logits.astype(np.float64)
    exact -= exact.max()
    exact -= np.log(np.exp(exact).sum())
    assert choice.logprob == pytest.approx(exact[choice.token], abs=1e-4)
    wanted = sorted(range(len(logits)), key=lambda id: (-logits[id], id))[:n]
    assert [id for id, _ in choice.top] == wanted
    np.testing.assert_allclose([value for _, value in choice.top], exact[wanted], atol=1e-4)


def test_ids_without_a_meaning_are_never_chosen():
    logits = np.zeros(10, dtype=np.float32)
    logits[9] = 100
    assert Sampler(SamplingParams(), 8).sample(logits).token == 0
    assert Sampler(SamplingParams(temperature=1, seed=0), 8).sample(logits).token < 8


@pytest.mark.parametrize(
    "options",
    [
        {"temperature": -1}, {"temperature": float("nan")}, {"temperature": "1"}, {"temperature": True},
        {"top_k": -1}, {"top_k": 1.5}, {"top_p": 0}, {"top_p": 1.1}, {"min_p": -0.1}, {"min_p": 2},
        {"repetition_penalty": 0}, {"presence_penalty": float("inf")}, {"frequency_penalty": 1000},
        {"logit_bias": {-1: 1.0}}, {"logit_bias": {1: float("nan")}}, {"logit_bias": {"a": 1.0}},
        {"seed": -1}, {"seed": 2**64}, {"seed": 0.5}, {"logprobs": 101}, {"logprobs": -1},
    ],
    ids=str,
)  # fmt: skip
def test_values_that_mean_nothing_are_refused(options):
    with pytest.raises(OptionError, match=next(iter(options))):
        SamplingParams(**options)


def test_bias_of_a_token_that_is_not_there():
    with pytest.raises(OptionError, match="logit_bias"):
        Sampler(SamplingParams(logit_bias={50: 1.0}), 50)


@given(st.integers(0, 1000), st.sampled_from([1, 3, 20]), st.booleans())
def test_asking_for_logprobs_changes_no_choice(seed, top_k, ties):
    """Where the largest logits were looked for already, top-k starts from them."""
    logits = _logits(seed, 2000, 2.0, ties)
    with_some = Sampler(SamplingParams(temperature=1.0, top_k=top_k, seed=seed, logprobs=20), 2000)
    without = Sampler(SamplingParams(temperature=1.0, top_k=top_k, seed=seed), 2000)
    assert [with_some.sample(logits).token for _ in range(5)] == [without.sample(logits).token for _ in range(5)]
