"""The passes over the vocabulary when a token is chosen, on every instruction set, against sorting."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

import moeflux._native as _native
from moeflux.backends.native.ops import available_isas
from moeflux.core.errors import InputError, OptionError

isas = pytest.mark.parametrize("isa", available_isas())
sizes = st.sampled_from([1, 15, 16, 17, 500, 2048, 2049, 5000, 20_001])
shapes = st.sampled_from(["even", "peaked", "ties", "same", "few", "octaves"])


def some(shape, n, seed):
    random = np.random.default_rng(seed)
    w = {
        "even": lambda: random.uniform(0.9, 1.1, n),
        "peaked": lambda: np.exp(5 * random.standard_normal(n)),
        "ties": lambda: random.integers(1, 4, n) / 4,
        "same": lambda: np.full(n, 0.3),
        "few": lambda: random.random(n) * (random.random(n) < 0.01),
        "octaves": lambda: 2.0 ** random.integers(-120, 1, n),
    }[shape]().astype(np.float32)
    w[random.integers(n)] += 0.5
    return w


@isas
@given(shapes, sizes, st.integers(0, 100), st.sampled_from([0.0, 0.05, 0.5, 0.9, 0.999]))
@example("same", 20_001, 0, 0.9)
@settings(max_examples=60)
def test_the_nucleus_is_what_sorting_gives(isa, shape, n, seed, share):
    w = some(shape, n, seed)
    bound, count = _native.nucleus(w, share, isa)
    ranked = np.sort(w)[::-1].astype(np.float64)
    held, wanted = np.cumsum(ranked), share * w.sum(dtype=np.float64)
    slack = 1e-6 * held[-1]
    assert np.float32(bound) == ranked[count - 1]
    assert held[count - 1] >= wanted - slack  # enough,
    assert count == 1 or held[count - 2] < wanted + slack  # and none too many


@isas
@given(shapes, sizes, st.integers(0, 100), st.floats(0, 1, exclude_max=True), st.sampled_from([0.0, 0.5, 0.9]))
@example("same", 20_001, 0, 1 - 2**-53, 0.9)
@settings(max_examples=60)
def test_a_draw_falls_where_a_running_sum_says(isa, shape, n, seed, point, share):
    w = some(shape, n, seed)
    bound, count = _native.nucleus(w, share, isa) if share else (0.0, -1)
    kept = np.where(w >= bound, w, 0).astype(np.float64)
    if share:
        kept[np.flatnonzero(w == np.float32(bound))[::-1][: np.count_nonzero(kept) - count]] = 0
    at = _native.draw(w.copy(), bound, count, point, isa)
    ends, slack = np.cumsum(kept), 1e-6 * kept.sum()
    assert kept[at] > 0
    assert ends[at] - kept[at] - slack <= point * ends[-1] <= ends[at] + slack


@isas
@pytest.mark.parametrize("n", [1, 17, 4099])
@pytest.mark.parametrize("temperature", [0.1, 1.0, 2.5, 1e-30])
def test_weights_are_exponentials(isa, n, temperature):
    random = np.random.default_rng(n)
    logits = (random.standard_normal(n) * 20).astype(np.float32)
    allowed = random.random(n) < 0.7
    peak, out = float(logits.max()), np.empty(n, np.float32)
    with np.errstate(over="ignore", under="ignore"):
        wanted = np.exp((logits.astype(np.float64) - peak) / temperature)
    _native.weigh(logits, None, peak, temperature, out, isa)
    np.testing.assert_allclose(out, wanted, rtol=1e-5, atol=1e-36)  # a float32 exponent is that coarse far below
    _native.weigh(logits, allowed.view(np.uint8), peak, temperature, out, isa)
    np.testing.assert_allclose(out, wanted * allowed, rtol=1e-5, atol=1e-36)


@isas
@pytest.mark.parametrize("n", [1, 17, 1024, 4099])
def test_the_sum_of_exponentials(isa, n):
    logits = (np.random.default_rng(n).standard_normal(n) * 3).astype(np.float32)
    wanted = np.exp(logits.astype(np.float64) - logits.max()).sum()
    assert _native.exp_total(logits, float(logits.max()), isa) == pytest.approx(wanted, rel=1e-6)


def test_calls_that_do_not_fit():
    w = np.ones(4, np.float32)
    with pytest.raises(InputError, match="weights has 3 elements, needs 4"):
        _native.weigh(w, None, 0.0, 1.0, np.empty(3, np.float32))
    with pytest.raises(InputError, match="allowed has 5 elements, needs 4"):
        _native.weigh(w, np.ones(5, np.uint8), 0.0, 1.0, np.empty(4, np.float32))
    for share in (-0.1, 1.0, float("nan")):
        with pytest.raises(InputError, match="share"):
            _native.nucleus(w, share)
    for point in (-0.1, 1.0, float("nan")):
        with pytest.raises(InputError, match="point"):
            _native.draw(w, 0.0, -1, point)
    for call in (lambda: _native.nucleus(w[:0], 0.5), lambda: _native.draw(w[:0], 0.0, -1, 0.5)):
        with pytest.raises(InputError, match="no weights"):
            call()
    with pytest.raises(OptionError, match="instruction set"):
        _native.nucleus(w, 0.5, "pdp11")
