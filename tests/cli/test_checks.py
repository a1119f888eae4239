"""Whatever can be known to be wrong is said before anything is loaded."""

from __future__ import annotations

import os

import pytest
from typer.testing import CliRunner

from moeflux.cli import bench_batch, bench_speed, evaluate, talk
from moeflux.cli.main import app
from moeflux.core.errors import MoefluxError
from session.models import chat_model


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return chat_model(tmp_path_factory.mktemp("models") / "model")


@pytest.fixture
def nothing_loads(monkeypatch):
    def load(*_, **__):
        raise AssertionError("loaded before all options were checked")

    for module in (talk, evaluate):
        monkeypatch.setattr(module, "load", load)
    for module in (bench_speed, bench_batch):
        monkeypatch.setattr(module, "Engine", load)


def refused(*args):
    result = CliRunner().invoke(app, [str(arg) for arg in args])
    assert isinstance(result.exception, (MoefluxError, SystemExit)), result.exception
    assert result.exit_code in (1, 2)
    return f"{result.exception} {result.stderr}"


ANSWERS = [
    (["--temperature", "nan"], "temperature"),
    (["--temperature", "-1"], "temperature"),
    (["--temperature", "0", "--top-k", "5"], "top_k"),
    (["--top-p", "7"], "top_p"),
    (["--min-p", "-1"], "min_p"),
    (["--seed", "-1"], "seed"),
    (["--repetition-penalty", "0"], "repetition_penalty"),
    (["--stop", ""], "stop sequence"),
    (["--regex", "("], "unclosed"),
    (["--schema", "{tmp}/nowhere"], "nowhere"),
    (["--schema", "{tmp}"], "directory"),
    (["--schema", ""], "empty"),
    (["--schema", "{tmp}/broken"], "JSON schema"),
    (["--schema", "{tmp}/unknown"], "nonsense"),
    (["--grammar", "{tmp}/empty"], "Empty grammar"),
    (["--grammar", "{tmp}/bytes"], "UTF-8"),
    (["--ram", "banana"], "ram"),
    (["--isa", "abacus"], "abacus"),
    (["--threads", "99999"], "threads"),
    (["--context", "99999999999999"], "context"),
    (["--slots", "0"], "slots"),
]


@pytest.fixture
def files(tmp_path):
    (tmp_path / "broken").write_text("{")
    (tmp_path / "unknown").write_text('{"type": "nonsense"}')
    (tmp_path / "empty").touch()
    (tmp_path / "bytes").write_bytes(b"\xff\xfe")
    (tmp_path / "text").write_text("The quick brown fox jumps.")
    return tmp_path


@pytest.mark.parametrize("command", [["generate", "{model}", "hi"], ["chat", "{model}"]], ids=["generate", "chat"])
@pytest.mark.parametrize(("options", "word"), ANSWERS, ids=lambda value: " ".join(value) if isinstance(value, list) else "")
def test_options_of_answers(nothing_loads, model, files, command, options, word):
    args = [arg.format(model=model, tmp=files) for arg in (*command, *options)]
    assert word in refused(*args)


@pytest.mark.parametrize(
    ("args", "word"),
    [
        (["generate", "{model}", "hi", "--trace", "/nowhere/file"], "--trace"),
        (["generate", "{model}", "hi", "--trace", "{tmp}"], "--trace"),
        (["generate", "{model}", "hi", "--logprobs", "-1", "--json"], "logprobs"),
        (["eval", "{model}", "--text", "{tmp}/text", "--k", "2"], "model's own is 2"),
        (["eval", "{model}", "--text", "{tmp}/text", "--bits", "7"], "bits"),
        (["eval", "{model}", "--text", "{tmp}/text", "--ram", "banana", "--k", "1"], "ram"),
        (["eval", "{model}", "--text", "{tmp}/bytes"], "UTF-8"),
        (["eval", "{model}", "--text", ""], "empty"),
        (["bench", "decode", "{model}", "--routing", "nonsense"], "routing"),
        (["bench", "prefill", "{model}", "--routing", "nonsense"], "routing"),
        (["bench", "batch", "{model}", "--routing", "nonsense"], "routing"),
        (["bench", "decode", "{model}", "--trace", "/nowhere/file"], "--trace"),
        (["bench", "prefix", "{model}", "--shared", "nan"], "nan is no share"),
        (["bench", "prefix", "{model}", "--folder", "/dev/null"], "--folder"),
        (["bench", "prefix", "{model}", "--keep", "banana"], "--keep"),
        (["bench", "replay", "{tmp}/text", "--slots", "9" * 30], "too many"),
        (["bench", "ops", "--tokens", "99999999999"], "option 'tokens'"),
        (["plan", "{model}", "--prompt", "9" * 20], "--prompt"),
        (["plan", "{model}", "--threads", "9" * 20], "--threads"),
        (["plan", ""], "empty"),
        (["inspect", ""], "empty"),
        (["doctor", ""], "empty"),
        (["doctor", "{tmp}/text"], "is a file"),
        (["chat", ""], "empty"),
        (["generate", "", "hi"], "empty"),
        (["synth", "qwen3.5-35b-a3b", ""], "empty"),
    ],
    ids=lambda value: " ".join(value)[:60] if isinstance(value, list) else "",
)
def test_options_of_commands(nothing_loads, model, files, args, word):
    assert word in refused(*(arg.format(model=model, tmp=files) for arg in args))


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write everywhere")
def test_a_folder_that_cannot_be_written_in(nothing_loads, model, tmp_path):
    tmp_path.chmod(0o500)
    assert "--trace" in refused("generate", model, "hi", "--trace", tmp_path / "file")


def test_names_of_special_tokens_wait_for_the_model(model, files):
    """Only the model knows them."""
    (files / "lark").write_text('start: <|im_end|> "a"')
    result = CliRunner().invoke(app, ["generate", str(model), "hi", "--grammar", str(files / "lark"), "-n", "2"])
    assert "unknown special token" not in str(result.exception)
