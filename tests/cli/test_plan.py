"""`moeflux plan` and budgets on the command line, as a person types them."""

from __future__ import annotations

import json
import re

import pytest

from cli.test_cli import NAME, moeflux
from moeflux.bench.shapes import published_config
from moeflux.bench.synthetic import write_checkpoint
from unit.test_synthetic import QUANT, QWEN3

RATES = ("--drive", "7GB/s", "--memory", "50GB/s")


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    folder = tmp_path_factory.mktemp("plan") / "model"
    write_checkpoint(QWEN3 | QUANT, folder)
    return folder


@pytest.fixture
def big(tmp_path):
    """A published config.json without weights."""
    (tmp_path / "config.json").write_text(json.dumps(published_config("qwen3.5-397b-a17b")))
    return tmp_path


def test_of_a_model_with_weights_the_drive_is_probed(model):
    result = moeflux("plan", model, "--json", "--threads", 1)
    assert result.returncode == 0, result.stderr
    report = json.loads(result.stdout)
    assert report["plan"]["resident"]
    assert report["plan"]["n_slots"] == report["plan"]["n_experts"] == 2 * 16
    assert len(report["drive_probe"]["samples"]) in (3, 6)
    assert report["rates"]["drive"] == report["drive_probe"]["bytes_s"]
    assert report["rates"]["memory"] == report["memory_probe"]["bytes_s"] > 1e8
    table = moeflux("plan", model, "--threads", 1)
    for word in ("budget", "trunk", "100% in memory", "speed, at best", "bound by memory", "nothing to read"):
        assert word in table.stdout


def test_of_a_bare_config(big):
    result = moeflux("plan", big, "--ram", "64GB", "--context", 4096, "--prompt", 1000, *RATES)
    assert result.returncode == 0, result.stderr
    for word in (
        "64 GB", "one sequence of 4,096 tokens", "of 30,720 experts", "one token needs", "cliff", "uniform routing",
        "with locality", "an estimate", "tok/s", "bound by drive", "1,000-token prompt", "faster with",
        "a drive of 14 GB/s",
    ):  # fmt: skip
        assert word in result.stdout
    assert "as given" in result.stdout
    assert "measured" not in result.stdout
    assert "no weights here: sizes are what config.json says" in result.stderr
    file = moeflux("plan", big / "config.json", "--ram", "64GB", "--json", *RATES)
    report = json.loads(file.stdout)
    assert report["drive_probe"] is None
    assert report["memory_probe"] is None
    assert report["plan"]["forecast"]["uniform"]["tok_s"] < report["plan"]["forecast"]["local"]["tok_s"]


def test_a_config_without_quantisation_is_planned_in_4_bits(big):
    config = json.loads((big / "config.json").read_text())
    quantised = json.loads(moeflux("plan", big, "--ram", "64GB", "--json", *RATES).stdout)
    for key in ("quantization", "quantization_config"):
        del config[key]
    (big / "config.json").write_text(json.dumps(config))
    result = moeflux("plan", big, "--ram", "64GB", "--json", *RATES)
    report = json.loads(result.stdout)
    assert report["sizes"]["expert"] == quantised["sizes"]["expert"]
    assert report["sizes"]["expert_codec"] == "affine 4-bit g64"
    assert any("conversion to MLX affine 4-bit, groups of 64" in note for note in report["notes"])


def test_memory_of_a_gpu(tmp_path):
    """Triton's interpreter stands for one where there is none."""
    pytest.importorskip("torch")
    pytest.importorskip("triton")
    (tmp_path / "config.json").write_text(json.dumps(published_config("qwen3.5-35b-a3b")))
    result = moeflux("plan", tmp_path, "--ram", "60GB", "--backend", "cuda", "--vram", "12GiB", *RATES)
    assert result.returncode == 0, result.stderr
    for word in ("12.9 GB", "joined", "of 10,240", "64 more slots", "pinned", "on the GPU", "the others in host memory"):
        assert word in result.stdout
    result = moeflux("plan", tmp_path, "--ram", "60GB", "--backend", "cuda", "--vram", "1GiB", *RATES)
    assert (result.returncode, "are too little: trunk" in result.stderr) == (1, True)
    result = moeflux("plan", tmp_path, "--ram", "60GB", "--vram", "0", *RATES)
    assert (result.returncode, "GPU" in result.stdout) == (0, False)


def test_the_cliff_is_warned_of(big):
    report = json.loads(moeflux("plan", big, "--ram", "64GB", "--json", *RATES).stdout)
    below = report["plan"]["cliff_budget"] - 10**9
    result = moeflux("plan", big, "--ram", below, *RATES)
    assert result.returncode == 0
    assert "an LRU cache has no hits" in result.stderr


def test_the_smallest_budget_can_be_typed(mlx):
    refused = moeflux("generate", mlx(NAME), "hello", "--ram", "1MB")
    assert refused.returncode == 1
    assert refused.stdout == ""
    enough = re.search(r"works is (\S+);", refused.stderr)[1]
    result = moeflux("generate", mlx(NAME), "hello", "-n", 3, "--ram", enough)
    assert result.returncode == 0, result.stderr
    assert moeflux("plan", mlx(NAME), "--ram", enough, *RATES).returncode == 0


def test_a_budget_of_more_than_there_is(model):
    result = moeflux("plan", model, "--ram", "900TB", *RATES)
    assert result.returncode == 0
    assert "more than the" in result.stderr


@pytest.mark.parametrize(
    ("args", "code", "words"),
    [
        (["plan", "{model}", "--ram", "1MB"], 1, ["1 MB is too small", "trunk", "scratch", "smallest that works is"]),
        (["plan", "{model}", "--ram", "0"], 1, ["0 B is too small"]),
        (["plan", "{model}", "--ram", "banana"], 1, ["--ram", "banana", "24GiB"]),
        (["plan", "{model}", "--ram", "-5GB"], 1, ["--ram", "-5GB"]),
        (["plan", "{model}", "--context", "0"], 2, ["--context"]),
        (["plan", "{model}", "--context", "1e3"], 2, ["--context"]),
        (["plan", "{model}", "--context", "2000000000000", "--ram", "8GB"], 1, ["state for 2000000000000 tokens"]),
        (["plan", "{model}", "--prompt", "0"], 2, ["--prompt"]),
        (["plan", "{model}", "--drive", "fast"], 1, ["--drive", "fast"]),
        (["plan", "{model}", "--drive", "0GB/s"], 1, ["--drive", "moves nothing"]),
        (["plan", "{model}", "--memory", "7GB/h"], 1, ["--memory", "7GB/h"]),
        (["plan", "{bare}"], 1, ["no weights", "--drive 7GB/s"]),
        (["plan", "{bare}/config.json"], 1, ["no weights", "--drive 7GB/s"]),
        (["plan", "{bare}", "--drive", "7GB/s", "--ram", "1GB"], 1, ["1 GB is too small"]),
        (["plan", "/nowhere"], 1, ["/nowhere", "no such file"]),
        (["plan", "{empty}"], 1, ["config.json"]),
        (["plan"], 2, ["model"]),
        (["generate", "{model}", "hi", "--ram", "banana"], 1, ["'ram'", "banana"]),
        (["generate", "{model}", "hi", "--context", "0"], 2, ["--context"]),
        (["bench", "decode", "{model}", "--ram", "1MB"], 1, ["1 MB is too small"]),
        (["bench", "io", "/nowhere"], 1, ["/nowhere"]),
        (["bench", "io", "{bare}"], 1, ["no weights"]),
        (["bench", "io", "{model}", "--repeats", "2"], 2, ["--repeats"]),
        (["bench", "io", "{model}", "--seconds", "nan"], 2, ["--seconds"]),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)  # fmt: skip
def test_wrong_arguments(model, big, tmp_path, args, code, words):
    (tmp_path / "nothing").mkdir()
    result = moeflux(*(arg.format(model=model, bare=big, empty=tmp_path / "nothing") for arg in args))
    assert result.returncode == code, result.stderr
    assert result.stdout == ""
    assert "Traceback" not in result.stderr
    for word in words:
        assert word in result.stderr


def test_bench_io(model):
    result = moeflux("bench", "io", model, "--repeats", 3, "--seconds", 0.05)
    assert result.returncode == 0, result.stderr
    report = json.loads(result.stdout.splitlines()[-1])
    assert report["bench"] == "io"
    assert report["reads_per_expert"] == 9
    assert {row["n_readers"] for row in report["rows"]} == {1, 2, 4, 8, 16}
    for row in report["rows"]:
        assert row["gb_s"][0] >= row["gb_s"][1] > 0
        assert row["expert_ms"][0] <= row["expert_ms"][1]
        assert row["samples"] == 3
    assert "cold" in result.stdout.splitlines()[1].lower()
    assert "random experts" in result.stderr
