"""The measuring commands, on tiny models: what they print, and how they refuse."""

from __future__ import annotations

import json

import pytest

from cli.test_cli import NAME, moeflux
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


@pytest.mark.parametrize("command", ["decode", "prefill"])
def test_streaming(model, command):
    options = ["--share", 0.5, "--policy", "lfru", "--reader", "python", "--routing", "local"]
    result = moeflux("bench", command, model, *options, "--tokens", 40, "--repeats", 2, "--threads", 1)
    assert result.returncode == 0, result.stderr
    assert "cold: the expert store was empty" in result.stderr
    limit = {"decode": "I/O-only limit", "prefill": "sweep limit"}[command]
    for words in (
        "hit rate",
        "drive's ceiling, same run",
        f"share of the {limit}",
        "with both at once",
        "peak memory",
        "measured overlap",
    ):
        assert words in result.stdout or (command == "prefill" and words == "measured overlap")
    row = json.loads(result.stdout.splitlines()[-1])
    assert row["routing"] == "local"
    memory, s = row["memory"], row["streaming"]
    assert (s["n_slots"], s["n_experts"], s["policy"], s["reader"]) == (32, 64, "lfru", "python")
    assert 0 < s["hit_rate"] < 1
    assert s["cold"] is True
    assert 0 < s["bytes_missing_per_token"] <= s["bytes_read_per_token"]
    assert s["drive_gb_s"][0] >= s["drive_gb_s"][1] > 0
    assert s["share_of_limit"][1] >= s["share_of_drive_limit"][1] > 0
    assert s["share_of_limit_at_once"][1] >= s["share_of_limit"][1]
    assert s["at_once_gb_s"]["drive"][1] > 0
    assert s["at_once_gb_s"]["read"][1] > 0
    assert s["stall_ms_per_token"] > 0
    assert s["first"]["bytes"] > 0
    assert memory["peak"] <= memory["budget"]
    assert memory["planned"] + memory["own"] <= memory["budget"]


def test_hints_can_be_left_out(model):
    result = moeflux(
        "bench", "decode", model, "--slots", 24, "--hints", "none", "--tokens", 8, "--repeats", 1, "--threads", 1
    )
    assert result.returncode == 0, result.stderr
    s = json.loads(result.stdout.splitlines()[-1])["streaming"]
    assert (s["hints"], s["hint_width"], s["hint_precision"]) == ("none", 0, None)
    assert s["store"]["hints_issued"] == 0


def test_trace_and_replay(model, tmp_path):
    """What `--trace` saves, `replay` judges; a store that holds everything misses each expert once."""
    trace, picture = tmp_path / "trace.npz", tmp_path / "heat.png"
    options = ["--tokens", 30, "--context", 10, "--repeats", 2, "--threads", 1, "--trace", trace]
    result = moeflux("bench", "decode", model, *options)
    assert result.returncode == 0, result.stderr
    assert "routing of 100 tokens" in result.stderr
    sizes = ["--slots", "16", "--share", "0.5,1", "--policy", "lru,lfru", "--prediction", "none,perfect"]
    result = moeflux("bench", "replay", trace, *sizes, "--plot", picture)
    assert result.returncode == 0, result.stderr
    report = json.loads(result.stdout.splitlines()[-1])
    assert (report["tokens"], report["n_experts"]) == (100, 64)
    assert 0 < report["overlap"] < 0.5
    rows = {(r["n_slots"], r["policy"], r["prediction"]): r for r in report["rows"]}
    assert len(rows) == 12
    for policy in ("lru", "lfru"):
        rates = [rows[n, policy, "none"]["hit_rate"] for n in (16, 32, 64)]
        assert rates == sorted(rates)
        assert rows[64, policy, "none"]["reads"] <= 64
        assert rows[32, policy, "perfect"]["recall"] == 1
    assert picture.read_bytes()[:4] == b"\x89PNG"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["heat.png", "trace.npz"]


def test_generate_saves_a_trace(mlx, tmp_path):
    for backend in ("native", "numpy"):
        trace = tmp_path / f"{backend}.npz"
        result = moeflux("generate", mlx(NAME), "hello", "-n", 4, "--backend", backend, "--trace", trace)
        assert result.returncode == 0, result.stderr
        assert json.loads(moeflux("bench", "replay", trace).stdout.splitlines()[-1])["tokens"] >= 4


def test_ops(monkeypatch):
    monkeypatch.setattr(bench_ops, "POOL_BYTES", 2**25)
    monkeypatch.setattr(bench_ops, "MATRICES", {"small": (64, 128)})
    monkeypatch.setattr("moeflux.bench.limits.Limits.__init__.__defaults__", (2**22,))
    rows = [row.as_dict() for row in bench_ops.bench_ops(1, ("avx2", "generic"), (1, 3), repeats=2)]
    assert [row["name"] for row in rows] == ["small"] * 4 + ["8 experts"] * 4
    assert [(row["tokens"], row["isa"]) for row in rows[:4]] == [(1, "avx2"), (1, "generic"), (3, "avx2"), (3, "generic")]
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
        (["bench", "decode", "/nowhere", "--hints", "tea"], 1, ["tea", "lookahead"]),
        (["bench", "decode", "{model}", "--routing", "tea"], 1, ["tea", "uniform"]),
        (["bench", "decode", "{model}", "--share", "2"], 1, ["--slots"]),
        (["bench", "decode", "{model}", "--trace", "/nowhere/x.npz"], 1, ["/nowhere/x.npz", "folder"]),
        (["bench", "decode", "{model}", "--trace", "/dev/null"], 1, ["/dev/null", "a device"]),
        (["bench", "replay", "/nowhere.npz"], 1, ["/nowhere.npz", "No such file"]),
        (["bench", "replay", "{tmp}/mine"], 1, ["not a routing trace"]),
        (["bench", "replay", "{tmp}/mine", "--slots", "many"], 1, ["--slots", "many"]),
        (["bench", "replay", "{tmp}/mine", "--plot", "{tmp}/x.txt"], 1, [".png"]),
        (["bench", "peers", "qwen3-30b-a3b", "--cap", "much"], 1, ["--cap", "much"]),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_wrong_arguments(model, tmp_path, args, code, words):
    (tmp_path / "mine").write_text("x")
    result = moeflux(*(arg.format(tmp=tmp_path, model=model) for arg in args))
    assert result.returncode == code, result.stderr
    assert "Traceback" not in result.stderr
    for word in words:
        assert word in result.stderr


def test_batch(model):
    result = moeflux("bench", "batch", model, "--tokens", 4, "--size", "3,1", "--size", 3, "--share", 0.5, "--repeats", 2)
    assert result.returncode == 0, result.stderr
    report = json.loads(result.stdout.splitlines()[-1])
    assert report["bench"] == "batch"
    assert 0.3 < report["share"] <= 0.5
    assert [(row["size"], row["tokens"]) for row in report["rows"]] == [(1, 4), (3, 12)]
    for row in report["rows"]:
        assert row["tok_s"][0] >= row["tok_s"][1] > 0
        assert row["bytes_per_token"] > 0
        assert 0 <= row["hit_rate"] <= 1
        assert row["asked_per_step"] > 0
    assert report["rows"][0]["speed_up"] == [1, 1]
    refused = moeflux("bench", "batch", model, "--size", "4,0")
    assert refused.returncode != 0
    assert "option 'size'" in refused.stderr


def test_prefix(model, tmp_path):
    """That it finishes says that the logits were the same bits all three ways."""
    options = ("--tokens", 200, "--share", 0.5, "--keep", "64MiB", "--folder", tmp_path)
    result = moeflux("bench", "prefix", model, *options)
    assert result.returncode == 0, result.stderr
    report = json.loads(result.stdout.splitlines()[-1])
    assert (report["bench"], report["tokens"], report["shared"]) == ("prefix", 200, 180)
    assert [report[f"{way}_computed"] for way in ("cold", "memory", "disk")] == [200, 20, 20]
    assert report["kept_bytes"] > 0
    assert list(tmp_path.iterdir()) == []
    refused = moeflux("bench", "prefix", model, "--shared", 1.5)
    assert refused.returncode != 0
    assert "option 'shared'" in refused.stderr


def test_serve():
    """Needs a tokenizer and a template, so with the demo model."""
    result = moeflux("bench", "serve", "--clients", 2, "--tokens", 8, "--samples", 1, "--threads", 1)
    assert result.returncode == 0, result.stderr
    row = json.loads(result.stdout.splitlines()[-1])
    assert row["bench"] == "serve"
    for way in ("worker", "server"):
        assert all(row[way][name] > 0 for name in ("first_ms", "token_ms", "together_tok_s", "cpu_first_ms"))
    assert row["first_overhead_ms"] == pytest.approx(row["server"]["first_ms"] - row["worker"]["first_ms"])
    assert "HTTP costs" in result.stdout
