"""The measuring commands, on tiny models: what they print, and how they refuse."""

from __future__ import annotations

import json

import pytest

from cli.test_cli import moeflux
from moeflux.backends.native.ops import NativeOps
from moeflux.bench import ops as bench_ops
from moeflux.bench.synthetic import write_checkpoint
from unit.test_synthetic import QUANT, QWEN


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    folder = tmp_path_factory.mktemp("bench") / "model"
    write_checkpoint(QWEN | QUANT, folder)
    return folder


@pytest.mark.parametrize("command", ["decode", "prefill"])
def test_speed(model, command):
    result = moeflux("bench", command, model, "--tokens", 4, "--repeats", 2, "--threads", 1)
    assert result.returncode == 0, result.stderr
    row = json.loads(result.stdout.splitlines()[-1])
    assert row["bench"] == command
    assert row["threads"] == 1
    assert row["tok_s"][0] >= row["tok_s"][1] > 0
    assert row["read_gb_s"][0] > 0.1
    assert row["share_of_read"][0] > 0
    assert 0 <= row["python_share"] < 1
    assert "tokens per second" in result.stdout


def test_ops(monkeypatch):
    monkeypatch.setattr(bench_ops, "POOL_BYTES", 2**25)
    monkeypatch.setattr(bench_ops, "MATRICES", {"small": (64, 128)})
    monkeypatch.setattr("moeflux.bench.limits.Limits.__init__.__defaults__", (2**22,))
    rows = [row.as_dict() for row in bench_ops.bench_ops(1, repeats=2)]
    assert [row["name"] for row in rows] == ["small", "8 experts"]
    assert all(row["gb_s"][0] > 0 and row["share_of_read"][0] > 0 for row in rows)


def test_limits_are_plausible():
    ops = NativeOps(1)
    buffer = ops.allocate(2**24)
    buffer[:] = 1
    assert 1e8 < len(buffer) / ops.time_read(buffer) < 1e13
    assert ops.multiply_rate() > 1e8


@pytest.mark.parametrize(
    ("args", "code", "words"),
    [
        (["synth", "gpt-9", "{tmp}/x"], 1, ["gpt-9", "qwen3-30b-a3b"]),
        (["synth", "deepseek-v3", "{tmp}/x", "--layers", "2"], 1, ["from 4 to 61"]),
        (["synth", "qwen3-30b-a3b", "{tmp}"], 1, ["not an empty folder"]),
        (["bench", "decode", "/nowhere"], 1, ["/nowhere"]),
        (["bench", "decode", "/nowhere", "--isa", "mmx"], 1, ["mmx", "avx2"]),
        (["bench", "decode", "/nowhere", "--threads", "0"], 2, ["--threads"]),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_wrong_arguments(tmp_path, args, code, words):
    (tmp_path / "mine").write_text("x")
    result = moeflux(*(arg.format(tmp=tmp_path) for arg in args))
    assert result.returncode == code, result.stderr
    assert "Traceback" not in result.stderr
    for word in words:
        assert word in result.stderr


def test_batch(model):
    result = moeflux("bench", "batch", model, "--tokens", 4, "--size", 1, "--size", 3, "--share", 0.5, "--repeats", 2)
    assert result.returncode == 0, result.stderr
    report = json.loads(result.stdout.splitlines()[-1])
    assert report["bench"] == "batch"
    assert 0.3 < report["share"] <= 0.5
    assert [(row["size"], row["tokens"]) for row in report["rows"]] == [(1, 4), (3, 12)]
    for row in report["rows"]:
        assert row["tok_s"][0] >= row["tok_s"][1] > 0
        assert row["bytes_per_token"] > 0
        assert 0 <= row["hit_rate"] <= 1
