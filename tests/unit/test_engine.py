"""The Python interface: what it takes, what it refuses and why."""

from __future__ import annotations

import dataclasses
import re

import numpy as np
import pytest

import moeflux
from moeflux import Segment
from moeflux.core.units import parse_bytes

NAME = "qwen3_moe-4bit-f32"


@pytest.fixture(params=["native", "numpy"])
def engine(mlx, request):
    with moeflux.load(mlx(NAME), backend=request.param) as engine:
        yield engine


REFUSED = [
    {"ram": "8GiB", "backend": "numpy"},
    {"ram": "banana"},
    {"ram": -1},
    {"ram": 1.5},
    {"context": 0},
    {"context": 2.5},
    {"threads": 2, "backend": "numpy"},
    {"isa": "generic", "backend": "numpy"},
    {"threads": 0},
    {"threads": True},
    {"isa": "mmx"},
    {"kv": "int4"},
    {"ring": 1},
    {"ring": 2, "backend": "native"},
    {"ring": -1},
    {"ring": -1, "backend": "numpy"},
    {"ring": 1.5, "backend": "numpy"},
    {"ring": True, "backend": "numpy"},
]


@pytest.mark.parametrize("options", REFUSED, ids=str)
def test_options_that_would_do_nothing_are_refused(mlx, options):
    with pytest.raises(moeflux.OptionError, match=next(iter(options))) as caught:
        moeflux.load(mlx(NAME), **options)
    assert caught.value.hint


def test_unknown_backend(mlx):
    with pytest.raises(moeflux.OptionError, match="numpy"):
        moeflux.load(mlx(NAME), backend="abacus")


def test_a_budget_below_the_floor_is_refused(mlx):
    with pytest.raises(moeflux.BudgetError, match=r"1 MB is too small: process .* trunk .* state .* scratch") as caught:
        moeflux.load(mlx(NAME), ram="1MB")
    enough = re.search(r"works is (\S+);", caught.value.hint)[1]
    with moeflux.load(mlx(NAME), ram=enough) as engine:
        assert engine.plan.memory.total <= engine.plan.budget == parse_bytes(enough)


def test_a_sequence_stays_within_its_context(mlx):
    with moeflux.load(mlx(NAME), context=8) as engine:
        assert engine.plan.context == 8
        sequence = engine.sequence()
        engine.forward(Segment(sequence, [1, 2, 3, 4, 5, 6, 7]))
        with pytest.raises(moeflux.InputError, match=r"9 tokens, .* planned for 8"):
            engine.forward(Segment(sequence, [8, 9]))
        engine.forward(Segment(sequence, [8]))
        assert len(sequence) == 8
        with pytest.raises(moeflux.InputError, match="context"):
            engine.score(range(9))


def test_options_are_keywords_only(mlx):
    with pytest.raises(TypeError):
        moeflux.load(mlx(NAME), "numpy")


@pytest.mark.parametrize("ids", [[], [0, 512], [-1], [1.5], ["a"], [True]], ids=str)
def test_bad_tokens_are_refused(engine, ids):
    with pytest.raises(moeflux.InputError):
        engine.score(ids)
    with pytest.raises(moeflux.InputError):
        engine.generate(ids, max_tokens=3)


@pytest.mark.parametrize("n", [-1, 1.5, True])
def test_bad_max_tokens_is_refused(engine, n):
    with pytest.raises(moeflux.InputError, match="max_tokens"):
        engine.generate([1], max_tokens=n)


def test_score_takes_numpy_ids(engine):
    logits = engine.score(np.array([5, 6, 7]))
    assert logits.shape == (3, 512)
    assert logits.dtype == np.float32


def test_generate_streams_text_and_ids(engine):
    tokens = engine.generate("the quick brown fox", max_tokens=6)
    first = next(tokens)
    rest = list(tokens)
    assert len(rest) == 5
    again = list(engine.generate("the quick brown fox", max_tokens=6))
    assert [first, *rest] == again


def test_generate_stops_at_end_of_text(engine, mlx, tmp_path):
    """Whatever token comes second is made an end-of-text id."""
    import shutil

    ids = [token.id for token in engine.generate([5, 6], max_tokens=3)]
    folder = shutil.copytree(mlx(NAME), tmp_path / "model")
    (folder / "generation_config.json").write_text(f'{{"eos_token_id": [{ids[1]}]}}')
    with moeflux.load(folder, backend=engine.config.backend) as other:
        assert [token.id for token in other.generate([5, 6], max_tokens=3)] == ids[: ids.index(ids[1])]


def test_long_prompts_run_in_chunks(engine, monkeypatch):
    prompt = list(range(3, 40))
    whole = [token.id for token in engine.generate(prompt, max_tokens=3)]
    logits = engine.score(prompt)
    monkeypatch.setattr(engine, "plan", dataclasses.replace(engine.plan, chunk_tokens=10))
    assert [token.id for token in engine.generate(prompt, max_tokens=3)] == whole
    np.testing.assert_array_equal(engine.score(prompt), logits)


def test_closed_engines_say_so(mlx):
    engine = moeflux.load(mlx(NAME))
    engine.close()
    engine.close()
    with pytest.raises(moeflux.ClosedError):
        engine.score([1])


def test_engines_do_not_touch_each_other(mlx):
    with moeflux.load(mlx(NAME)) as one, moeflux.load(mlx("deepseek_v3-4bit-f32")) as two:
        a, b = one.sequence(), two.sequence()
        mixed = [(one.forward(Segment(a, [t]))[0], two.forward(Segment(b, [t]))[0]) for t in (5, 6, 7)]
    with moeflux.load(mlx(NAME)) as one:
        np.testing.assert_array_equal(np.concatenate([pair[0] for pair in mixed]), one.score([5, 6, 7]))


def test_a_sequence_stands_once_in_a_batch(engine):
    sequence = engine.sequence()
    with pytest.raises(moeflux.StateError, match="twice"):
        engine.forward(Segment(sequence, [1]), Segment(sequence, [2]))
    engine.forward(Segment(sequence, [1]))
    assert len(sequence) == 1


def test_a_refused_batch_changes_nothing(engine):
    good, bad = engine.sequence(), engine.sequence()
    with pytest.raises(moeflux.InputError):
        engine.forward(Segment(good, [1]), Segment(bad, [9999]))
    assert len(good) == 0
    (logits,) = engine.forward(Segment(good, [5]))
    np.testing.assert_array_equal(logits, engine.score([5]))


def test_a_failed_run_breaks_only_its_sequences(engine, monkeypatch):
    hurt, other = engine.sequence(), engine.sequence()
    engine.forward(Segment(hurt, [1]), Segment(other, [1]))
    with monkeypatch.context() as patch:
        patch.setattr(engine.model.experts, "acquire", _fail)
        patch.setattr(engine.model.runner, "stream", None)
        with pytest.raises(OSError, match="the drive is gone"):
            engine.forward(Segment(hurt, [2]))
    with pytest.raises(moeflux.StateError, match="the drive is gone"):
        engine.forward(Segment(hurt, [2]))
    (logits,) = engine.forward(Segment(other, [2]))
    np.testing.assert_array_equal(logits[0], engine.score([1, 2])[1])


def _fail(*_):
    raise OSError("the drive is gone")


def test_sequences_count_their_bytes(engine):
    sequence = engine.sequence()
    assert sequence.nbytes == 0
    engine.forward(Segment(sequence, list(range(300))))
    assert sequence.nbytes == 4 * 2 * 512 * 2 * 32 * 2  # layers, keys and values, two blocks, heads, head size, bf16
