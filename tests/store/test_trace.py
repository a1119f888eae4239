"""Routing traces: recorded, saved, loaded with suspicion, and replayed."""

from __future__ import annotations

import numpy as np
import pytest

from moeflux.core.errors import FormatError, OptionError, ReadError, StateError
from moeflux.store.policy import Residency, layer_floor
from moeflux.store.replay import replay
from moeflux.store.trace import RoutingTrace, TraceRecorder


def record(n_tokens=40, layers=(0, 2, 3), n_experts=32, k=4, overlap=0.4, seed=0, prompt=6) -> RoutingTrace:
    """A prompt in one step, then token by token, with some of the experts of the token before."""
    rng = np.random.default_rng(seed)
    recorder = TraceRecorder("synthetic", layers, n_experts, k)
    last = {layer: rng.choice(n_experts, k, replace=False) for layer in layers}
    for step in range(n_tokens - prompt + 1):
        n = prompt if step == 0 else 1
        recorder.begin(rng.integers(0, 1000, n))
        for layer in layers:
            rows = []
            for _ in range(n):
                kept = last[layer][rng.random(k) < overlap]
                fresh = rng.permutation(np.setdiff1d(np.arange(n_experts), kept))[: k - len(kept)]
                last[layer] = np.concatenate([kept, fresh])
                rows.append(last[layer])
            recorder.record(layer, np.array(rows))
    return recorder.trace()


def test_a_trace_survives_its_file(tmp_path):
    trace = record()
    assert trace.ids.shape == (40, 3, 4)
    assert trace.steps.tolist() == [0] * 6 + list(range(1, 35))
    path = tmp_path / "trace.npz"
    trace.save(path)
    trace.save(path)
    assert list(tmp_path.iterdir()) == [path]
    again = RoutingTrace.load(path)
    assert (again.model, again.n_experts, again.layers) == ("synthetic", 32, (0, 2, 3))
    for name in ("ids", "tokens", "steps"):
        np.testing.assert_array_equal(getattr(again, name), getattr(trace, name))


def test_a_step_that_failed_is_left_out():
    recorder = TraceRecorder("m", [0, 1], 8, 2)
    with pytest.raises(StateError, match="no step"):
        recorder.record(0, np.zeros((1, 2), np.int64))
    recorder.begin([5])
    recorder.record(0, np.array([[1, 2]]))
    recorder.begin([6])
    for layer in (0, 1):
        recorder.record(layer, np.array([[3, 4]]))
    for layer, ids in ((7, [[1, 2]]), (0, [[1]]), (0, [[1, 2], [1, 2]])):
        with pytest.raises(StateError, match="belong"):
            recorder.record(layer, np.array(ids))
    trace = recorder.trace()
    assert trace.tokens.tolist() == [6]
    assert trace.ids.tolist() == [[[3, 4], [3, 4]]]
    assert len(TraceRecorder("m", [0], 8, 2).trace()) == 0


def test_files_that_are_no_traces(tmp_path):
    path = tmp_path / "trace.npz"
    with pytest.raises(ReadError):
        RoutingTrace.load(path)
    for junk in (b"", b"PK\x03\x04", b"junk" * 100):
        path.write_bytes(junk)
        with pytest.raises(FormatError):
            RoutingTrace.load(path)
    record().save(path)
    with np.load(path) as stored:
        whole = {name: stored[name] for name in stored.files}
    path.write_bytes(path.read_bytes()[:-100])
    with pytest.raises(FormatError):
        RoutingTrace.load(path)
    breaks = {
        "format": np.int64(2),
        "ids": whole["ids"].astype(np.int32),
        "layers": whole["layers"][:2],
        "tokens": whole["tokens"][1:],
        "steps": whole["steps"][::-1].copy(),
        "n_experts": np.int64(3),
        "decodes": whole["decodes"][1:],
    }
    for name, value in breaks.items():
        np.savez(path, **{**whole, name: value})
        with pytest.raises(FormatError, match="not a routing trace"):
            RoutingTrace.load(path)
    np.savez(path, **{key: value for key, value in whole.items() if key != "decodes"})
    np.testing.assert_array_equal(RoutingTrace.load(path).decodes, np.bincount(whole["steps"])[whole["steps"]] == 1)
    for name in whole.keys() - {"decodes"}:
        np.savez(path, **{key: value for key, value in whole.items() if key != name})
        with pytest.raises(FormatError, match=name):
            RoutingTrace.load(path)


def test_replay_counts():
    trace = record(n_tokens=200, prompt=1)
    everything = replay(trace, 96)
    distinct = sum(len(np.unique(trace.ids[:, layer])) for layer in range(3))
    assert (everything.asked, everything.asked - everything.hits) == (200 * 3 * 4, distinct)
    half, little = replay(trace, 48), replay(trace, 12)
    assert 1 > everything.hit_rate > half.hit_rate > little.hit_rate > 0
    assert half.recall == half.hints_issued == 0


def test_replay_is_the_residency():
    trace = record(n_tokens=60, prompt=1, seed=4)
    memory, misses = Residency(3, 32, 30, layer_floor(30, 3, 4)), 0
    for row in trace.ids:
        memory.next_token()
        misses += sum(len(memory.access(layer, sorted(ids))) for layer, ids in enumerate(row))
    assert replay(trace, 30).asked - replay(trace, 30).hits == misses


def test_predictions():
    trace = record(n_tokens=300, prompt=1, overlap=0.5)
    previous, perfect = replay(trace, 20, prediction="previous"), replay(trace, 20, prediction="perfect")
    assert 0.4 < previous.recall < 0.65
    assert perfect.recall == 1
    assert perfect.precision > 0.99
    assert perfect.hit_rate > 0.6 > previous.hit_rate
    assert perfect.hits - replay(trace, 20).hits > 100
    with pytest.raises(OptionError, match="perfect"):
        replay(trace, 20, prediction="dice")


def test_warmup_is_not_counted():
    trace = record(n_tokens=100, prompt=1)
    late = replay(trace, 96, warmup=90)
    assert late.asked == 10 * 12
    assert late.hit_rate > replay(trace, 96).hit_rate
