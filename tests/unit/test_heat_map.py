"""Use and residency of experts, counted and drawn."""

from __future__ import annotations

import sys

import numpy as np
import pytest

from moeflux.bench.heat_map import check_plot, draw_heat
from moeflux.bench.replay import bench_replay, measure_heat, trace_overlap
from moeflux.core.errors import OptionError
from store.test_trace import record


@pytest.fixture
def path(tmp_path):
    record().save(tmp_path / "trace.npz")
    return tmp_path / "trace.npz"


def test_use_and_residency_add_up(path):
    report = bench_replay(path, slots=[24], policies=["lru"])
    heat = measure_heat(report.trace, report.results[0])
    assert heat.use.shape == heat.residency.shape == (3, 32)
    np.testing.assert_allclose(heat.use.sum(axis=1), 4)  # every token chooses so many
    assert heat.residency.max() <= 1
    assert 20 < heat.residency.sum() <= 24
    assert heat.result == report.results[0]
    used, kept = heat.use.ravel(), heat.residency.ravel()
    assert np.corrcoef(used, kept)[0, 1] > 0.3  # what is used is kept


def test_overlap_of_a_trace_is_that_of_single_tokens(path):
    assert trace_overlap(record(overlap=1.0)) == 1.0
    assert 0.3 < trace_overlap(record(n_tokens=300)) < 0.55
    assert trace_overlap(record(n_tokens=6, prompt=6)) is None


def test_warmup_is_not_counted(path):
    whole, part = bench_replay(path, shares=[0.5]), bench_replay(path, shares=[0.5], warmup=1)
    assert whole.counted == 40
    assert part.counted == 34  # the prompt is the first step
    assert part.results[0].asked < whole.results[0].asked
    with pytest.raises(OptionError, match="leave nothing"):
        bench_replay(path, warmup=35)


def test_pictures(path, tmp_path):
    report = bench_replay(path, shares=[0.25])
    heat = measure_heat(report.trace, report.results[0])
    for name in ("heat.png", "heat.svg"):
        check_plot(tmp_path / name)
        draw_heat(report, heat, tmp_path / name)
    assert (tmp_path / "heat.png").stat().st_size > 10_000
    assert "Residency: 24 slots for 96 experts" in (tmp_path / "heat.svg").read_text()
    assert not list(tmp_path.glob(".heat*"))


def test_without_matplotlib(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    with pytest.raises(OptionError, match=r"pip install 'moeflux\[plot\]'"):
        check_plot(tmp_path / "heat.png")


@pytest.mark.parametrize("options", [{"slots": [0]}, {"shares": [0]}, {"policies": []}, {"predictions": ["luck"]}])
def test_wrong_options(path, options):
    with pytest.raises(OptionError):
        bench_replay(path, **options)
