"""`moeflux generate` as a person types it: what goes where, which options do what, and the demo model."""

from __future__ import annotations

import json
import re
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import pytest

from cli.test_cli import moeflux
from moeflux.cli.generate import _model_and_prompt
from moeflux.cli.talk import closing
from moeflux.session.events import Finish, Timings, Usage
from moeflux.store.stats import StoreStats
from session.models import chat_model

WITH_DEMO = """
import sys, pathlib, moeflux.session.demo as demo
demo.FOLDER = pathlib.Path(sys.argv.pop(1))
from moeflux.cli.main import main
main()
"""


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return chat_model(tmp_path_factory.mktemp("models") / "model", "thinking")


def with_demo(folder, *args, stdin=""):
    """The command in an installation whose demo model is in this folder."""
    command = [sys.executable, "-c", WITH_DEMO, str(folder), *map(str, args)]
    return subprocess.run(command, capture_output=True, text=True, input=stdin, timeout=120)


def test_one_line_before_and_one_after(model):
    result = moeflux("generate", model, "The quick", "-n", 6)
    before, after = result.stderr.splitlines()
    assert re.fullmatch(
        rf"{model}: qwen3_5_moe, native backend \(\w+\), \d+ threads, [\d.]+ GB: all 32 experts in memory", before
    )
    words = r"6 tokens, [\d,.]+ tok/s, first after [\d.]+ s, 100% of experts found in memory, 0 B read, cut at its limit"
    assert re.fullmatch(words, after)
    assert "\x1b" not in result.stdout + result.stderr


def test_a_budget_that_does_not_hold_everything(model):
    smallest = moeflux("generate", model, "x", "--ram", "1MB").stderr
    ram = re.search(r"works is (\S+);", smallest)[1]
    free = moeflux("generate", model, "The quick brown", "-n", 20)
    tight = moeflux("generate", model, "The quick brown", "-n", 20, "--ram", ram)
    assert tight.stdout == free.stdout


def test_closing_lines():
    store = StoreStats(**dict.fromkeys(StoreStats.__dataclass_fields__, 0))
    busy = replace(store, asked=200, hits=150, misses=50, bytes_demand=400_000_000)
    usage, timings = Usage(10, 0, 41, 0, 0), Timings(1.0, 1.0, 2.0)
    assert closing(Finish("end", usage, timings, busy, None), 4e8) == (
        "41 tokens, 40 tok/s, first after 1.00 s, 75% of experts found in memory, 400 MB read (50% of the drive's limit)"
    )
    assert closing(Finish("end", usage, timings, busy, None), None).endswith("400 MB read")
    one = replace(usage, completion=1)
    assert closing(Finish("stop_sequence", one, timings, busy, None, "x"), None).startswith("1 token, first after 1.00 s")
    none = replace(usage, completion=0)
    assert closing(Finish("end", none, timings, store, None), None) == "no tokens: the text ended at once"
    assert closing(Finish("cancelled", none, timings, store, None), None) == "stopped before the first token"


def test_seeds_and_temperature(model):
    def text(*options):
        return moeflux("generate", model, "The", "-n", 8, *options).stdout

    assert text("--temperature", 1.5, "--seed", 3) == text("--temperature", 1.5, "--seed", 3)
    assert text("--temperature", 1.5, "--seed", 3) != text("--temperature", 1.5, "--seed", 4)
    assert text("--top-k", 1) == text()


def test_json(model):
    result = moeflux("generate", model, "The quick", "-n", 5, "--json", "--logprobs", 2, "--temperature", 1)
    report = json.loads(result.stdout)
    assert report["usage"] == {"prompt": 2, "cached": 0, "completion": 5, "reasoning": 0, "forced": 0, "kept": 0}
    assert report["finish_reason"] == "length"
    assert report["timings"]["tok_s"] > 0
    assert len(report["tokens"]) == 5
    assert [len(token["top"]) for token in report["tokens"]] == [2] * 5
    again = json.loads(
        moeflux("generate", model, "The quick", "-n", 5, "--json", "--temperature", 1, "--seed", report["seed"]).stdout
    )
    assert again["text"] == report["text"]


def test_output_that_must_fit(model, tmp_path):
    (tmp_path / "schema.json").write_text('{"type": "object", "properties": {"n": {"enum": [1, 2]}}, "required": ["n"]}')
    (tmp_path / "grammar.lark").write_text('start: "yes" | "no"')
    value = json.loads(moeflux("generate", model, "The", "--schema", tmp_path / "schema.json", "-n", 100).stdout)
    assert value["n"] in (1, 2)
    assert re.fullmatch("[a-c]{5}\n", moeflux("generate", model, "The", "--regex", "[a-c]{5}").stdout)
    assert moeflux("generate", model, "The", "--grammar", tmp_path / "grammar.lark").stdout in ("yes\n", "no\n")


def test_stop(model):
    text = moeflux("generate", model, "The", "--regex", "[a-z]{12}").stdout.strip()
    result = moeflux("generate", model, "The", "--regex", "[a-z]{12}", "--stop", "!", "--stop", text[5:8])
    assert result.stdout.strip() == text[: text.index(text[5:8])]
    assert f"stop {text[5:8]!r}" in result.stderr


def test_chat_through_the_template(model):
    plain = json.loads(moeflux("generate", model, "hi", "-n", 5, "--json").stdout)
    asked = json.loads(moeflux("generate", model, "hi", "-n", 5, "--json", "--chat").stdout)
    system = json.loads(moeflux("generate", model, "hi", "-n", 5, "--json", "--system", "Be brief.", "--no-thinking").stdout)
    assert plain["usage"]["prompt"] < asked["usage"]["prompt"] < system["usage"]["prompt"]
    assert asked["usage"]["reasoning"] == 5
    assert (system["usage"]["reasoning"], system["reasoning"]) == (0, "")


def test_reasoning_is_not_the_answer(model):
    result = moeflux("generate", model, "hi", "-n", 5, "--chat")
    assert result.stdout == "\n"
    assert len(result.stderr.splitlines()) >= 2


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["--schema", "/nowhere.json"], ["/nowhere.json"]),
        (["--schema", "{model}/config.json", "--regex", "a"], ["--schema", "--regex", "only one"]),
        (["--regex", "("], ["regular expression", "unclosed"]),
        (["--top-p", "7"], ["top_p"]),
        (["--temperature", "0", "--top-k", "5"], ["top_k", "temperature 0"]),
        (["--logprobs", "3"], ["--json"]),
        (["--thinking"], ["--chat"]),
        (["--stop", ""], ["stop sequence"]),
        (["--context", "1"], ["context", "2 tokens"]),
    ],
    ids=lambda value: " ".join(value),
)
def test_options_that_are_wrong(model, options, words):
    result = moeflux("generate", model, "The quick", *(option.format(model=model) for option in options))
    assert result.returncode == 1
    assert result.stdout == ""
    assert "Traceback" not in result.stderr
    for word in words:
        assert word in result.stderr


class TestDemo:
    def test_it_is_used_where_no_model_is_named_and_says_so(self, model):
        named = moeflux("generate", model, "Hello there", "-n", 5)
        result = with_demo(model, "generate", "Hello there", "-n", 5)
        assert result.stdout == named.stdout
        assert "the demo model" in result.stderr
        assert "the demo model" not in named.stderr

    def test_without_anything_it_tells_a_story(self, model):
        result = with_demo(model, "generate", "-n", 5)
        assert result.stdout.startswith("Once upon a time")
        assert json.loads(with_demo(model, "generate", "-n", 5, "--json").stdout)["text"] in result.stdout

    def test_from_stdin(self, model):
        assert (
            with_demo(model, "generate", "-n", 5, stdin="Hello").stdout
            == with_demo(model, "generate", "Hello", "-n", 5).stdout
        )
        assert (
            with_demo(model, "generate", "-", "-n", 5, stdin="Hello").stdout
            == with_demo(model, "generate", "Hello", "-n", 5).stdout
        )

    @pytest.mark.parametrize("word", ["/nowhere", "./nowhere", "~/modles/x", "modles/x", ".", "/no where"])
    def test_what_looks_like_a_path_is_a_model(self, model, word):
        """A folder that was mistyped must not become a text for the demo model."""
        result = with_demo(model, "generate", word, stdin="x")
        assert (result.returncode, result.stdout) == (1, "")
        assert word == "." or ("no such file" in result.stderr and "moeflux generate - <" in result.stderr)

    @pytest.mark.parametrize("words", ["and / or", "no/path at all", "a" * 5000, "Hello"])
    def test_anything_else_is_a_text(self, words):
        assert _model_and_prompt(words, None) == (None, words)

    def test_a_folder_that_is_there_is_a_model(self, tmp_path, monkeypatch):
        (tmp_path / "model").mkdir()
        monkeypatch.chdir(tmp_path)
        monkeypatch.setattr(sys, "stdin", None)
        assert _model_and_prompt("model", None) == (Path("model"), None)
        assert _model_and_prompt("model", "text") == (Path("model"), "text")

    def test_where_there_is_none(self, tmp_path):
        for command in ("generate", "chat"):
            result = with_demo(tmp_path, command)
            assert result.returncode == 1
            assert "demo model is not part of this installation" in result.stderr
            assert "hint" in result.stderr


def test_an_interrupt_ends_the_text_and_still_says_what_it_took(model):
    command = [sys.executable, "-m", "moeflux", "generate", str(model), "The", "-n", "100000", "--regex", "[ab]{100000}"]
    command += ["--context", "200000", "--temperature", "1"]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    assert process.stdout.read(20)
    process.send_signal(signal.SIGINT)
    start = time.monotonic()
    out, err = process.communicate(timeout=60)
    assert process.returncode == 130
    assert time.monotonic() - start < 30
    assert set(out) <= set("ab\n")
    assert "tok/s" in err
    assert err.rstrip().endswith("stopped")
