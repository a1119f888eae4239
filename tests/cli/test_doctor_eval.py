"""`moeflux doctor` and `moeflux eval` as a person types them."""

from __future__ import annotations

import json

import pytest

from cli.test_cli import moeflux
from session.models import chat_model


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return chat_model(tmp_path_factory.mktemp("models") / "model")


def test_doctor_with_a_model(model):
    result = moeflux("doctor", model)
    assert result.returncode == 0
    for word in ("processor", "memory", "GPU", "drive", "experts of this model", "moeflux uses", "faster with"):
        assert word in result.stdout


def test_doctor_json(model):
    report = json.loads(moeflux("doctor", model, "--json").stdout)
    assert report["drive"]["bytes_s"] > 0
    assert report["rates"]["bytes_s"] > 1e8
    assert report["budget"] < report["memory"]["total"]


def test_doctor_nowhere():
    result = moeflux("doctor", "/nowhere")
    assert (result.returncode, result.stdout) == (1, "")
    assert "/nowhere" in result.stderr


def test_eval(model, tmp_path):
    (tmp_path / "text").write_text("The quick brown fox jumps over the lazy dog. " * 5)
    table = moeflux("eval", model, "--text", tmp_path / "text", "--k", 1)
    lines = table.stdout.splitlines()
    assert [line.split("  ")[0] for line in lines[1:]] == ["as it is", "top 1"]
    assert "lossy: 1 of the model's 2" in table.stderr
    report = json.loads(moeflux("eval", model, "--text", tmp_path / "text", "--k", 1, "--json").stdout)
    assert f"{report['nats_per_token']:.4f}" in lines[1]
    assert f"{report['lossy']['loss_bits_per_character']:+.4f}" in lines[2]
    few = json.loads(moeflux("eval", model, "--text", tmp_path / "text", "--tokens", 7, "--json").stdout)
    assert few["n_tokens"] == 7
    assert "lossy" not in few


@pytest.mark.parametrize(
    ("args", "code", "word"),
    [
        (["--text", "/nowhere"], 1, "/nowhere"),
        ([], 2, "--text"),
        (["--text", "{model}/config.json", "--k", "2"], 1, "model's own is 2"),
        (["--text", "{model}/config.json", "--bits", "7"], 1, "bits"),
        (["--text", "{model}/model.safetensors"], 1, "UTF-8"),
    ],
    ids=str,
)
def test_eval_that_cannot_be(model, args, code, word):
    result = moeflux("eval", model, *(arg.format(model=model) for arg in args))
    assert (result.returncode, result.stdout) == (code, "")
    assert word in result.stderr
    assert "Traceback" not in result.stderr
