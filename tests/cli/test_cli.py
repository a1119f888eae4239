"""Commands as a person types them, in a process of their own: stdout is data, stderr is talk, exit codes mean something."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

NAME = "qwen3_5_moe_vl_fused-4bit-f32"


def moeflux(*args, stdin=None):
    command = [sys.executable, "-m", "moeflux", *map(str, args)]
    return subprocess.run(command, capture_output=True, text=True, input=stdin, timeout=120)


def test_help_lists_the_commands():
    result = moeflux("--help")
    assert result.returncode == 0
    assert "inspect" in result.stdout
    assert "generate" in result.stdout


def test_version_names_the_instruction_set():
    result = moeflux("--version")
    assert result.returncode == 0
    assert any(isa in result.stdout for isa in ("avx512_vnni", "avx_vnni", "avx2", "generic"))


def test_generate_writes_only_text_to_stdout(mlx):
    result = moeflux("generate", mlx(NAME), "hello", "--max-tokens", 5)
    assert result.returncode == 0
    assert "tok/s" in result.stderr
    assert "tok/s" not in result.stdout
    piped = moeflux("generate", mlx(NAME), "-", "-n", 5, stdin="hello")
    assert piped.stdout == result.stdout


def test_inspect_json(mlx):
    result = moeflux("inspect", mlx(NAME), "--json")
    report = json.loads(result.stdout)
    assert report["model_type"] == "qwen3_5_moe"
    assert report["layout"] == "mlx"
    assert report["sizes"]["expert"] == 3 * (64 * 128 // 2 + 2 * 64 * 2 * 4)
    assert report["sizes"]["streamed_per_token"] == 4 * 2 * report["sizes"]["expert"]


def test_inspect_table(mlx):
    result = moeflux("inspect", mlx(NAME))
    assert result.returncode == 0
    for word in ("3 gated delta net, 1 gated attention", "affine 4-bit g64", "streamed per token", "block by block"):
        assert word in result.stdout


def test_inspect_of_a_bare_config_equals_that_of_the_files(mlx, tmp_path):
    """Where config.json says everything, the files hold what it predicts."""
    (tmp_path / "config.json").write_text((mlx(NAME) / "config.json").read_text())
    bare = json.loads(moeflux("inspect", tmp_path, "--json").stdout)
    files = json.loads(moeflux("inspect", mlx(NAME), "--json").stdout)
    assert bare["layout"] is None
    assert bare["sizes"] == files["sizes"]


@pytest.mark.parametrize(
    ("args", "code", "words"),
    [
        (["inspect", "/nowhere"], 1, ["/nowhere", "no such file"]),
        (["inspect"], 2, ["model", "Missing argument"]),
        (["inspect", "{model}/tokenizer.json"], 1, ["model_type"]),
        (["generate", "/nowhere", "hi"], 1, ["/nowhere"]),
        (["generate", "{model}", "hi", "--max-tokens", "0"], 2, ["--max-tokens"]),
        (["generate", "{model}", "hi", "--backend", "abacus"], 1, ["abacus", "numpy", "hint"]),
        (["generate", "{model}", ""], 1, ["no tokens"]),
        (["frobnicate"], 2, ["frobnicate"]),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_wrong_arguments(mlx, args, code, words):
    result = moeflux(*(arg.format(model=mlx(NAME)) for arg in args))
    assert result.returncode == code
    assert result.stdout == ""
    assert "Traceback" not in result.stderr
    for word in words:
        assert word in result.stderr
