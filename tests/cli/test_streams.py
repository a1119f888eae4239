"""Standard streams as shells and services leave them: closed, full, not UTF-8, a pipe that nobody reads."""

from __future__ import annotations

import os
import signal
import subprocess
import sys

import pytest

from session.models import chat_model

TINY = ("-n", "3")


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return chat_model(tmp_path_factory.mktemp("models") / "model")


@pytest.fixture(scope="module")
def text(tmp_path_factory):
    path = tmp_path_factory.mktemp("texts") / "text"
    path.write_text("The quick brown fox jumps over the lazy dog.")
    return path


def shell(command, *args, stdin=b"", **environment):
    """A line for bash; "$@" is the moeflux command with its arguments. Bytes in and out: not everything here is text."""
    arguments = [sys.executable, "-m", "moeflux", *(os.fsencode(str(arg)) for arg in args)]
    return subprocess.run(
        ["bash", "-c", command, "bash", *arguments],
        capture_output=True, input=stdin, timeout=120, env={**os.environ, **environment},
    )  # fmt: skip


def commands(model, text):
    return {
        "help": ["--help"],
        "version": ["--version"],
        "generate": ["generate", model, "The", *TINY],
        "generate --json": ["generate", model, "The", *TINY, "--json"],
        "chat": ["chat", model, *TINY],
        "eval": ["eval", model, "--text", text],
        "inspect": ["inspect", model],
        "plan": ["plan", model, "--drive", "1GB/s", "--memory", "9GB/s"],
        "doctor": ["doctor", model],
        "bench": ["bench", "io", model, "--repeats", "3", "--seconds", "0.01"],
    }


def lines(result):
    """Of talk: what a person reads when it has failed."""
    err = result.stderr.decode()
    assert "Traceback" not in err
    assert "Exception ignored" not in err
    return [line for line in err.splitlines() if line.startswith("error: ")]


@pytest.mark.parametrize("name", commands("", ""))
def test_a_full_device(model, text, name):
    result = shell('"$@" > /dev/full', *commands(model, text)[name], stdin=b"hello\nmore\n")
    assert result.returncode == 1
    assert lines(result) == ["error: stdout: No space left on device"]


@pytest.mark.parametrize("name", ["inspect", "generate", "help"])
def test_stdout_that_is_closed(model, text, name):
    result = shell('"$@" >&-', *commands(model, text)[name])
    assert result.returncode == 1
    assert lines(result) == ["error: stdout: is closed"]


@pytest.mark.parametrize("name", ["inspect", "chat", "help"])
def test_a_pipe_that_nobody_reads(model, text, name):
    reading, writing = os.pipe()
    os.close(reading)
    arguments = [sys.executable, "-m", "moeflux", *map(str, commands(model, text)[name])]
    try:
        result = subprocess.run(arguments, stdout=writing, stderr=subprocess.PIPE, input=b"hello\nmore\n", timeout=120)
    finally:
        os.close(writing)
    assert result.returncode == 141
    assert lines(result) == []


@pytest.mark.parametrize("how", ["2>&-", "2>/dev/full"])
def test_talk_that_cannot_be_heard(model, how):
    told = shell('"$@"', "generate", model, "The", *TINY)
    result = shell(f'"$@" {how}', "generate", model, "The", *TINY)
    assert (result.returncode, result.stdout) == (0, told.stdout)
    wrong = shell(f'"$@" {how}', "inspect", "/nowhere")
    assert (wrong.returncode, wrong.stdout) == (1, b"")


def test_stdin_that_is_closed(model):
    given = shell('"$@" <&-', "generate", model, "The", *TINY)
    assert (given.returncode, lines(given)) == (0, [])
    for args in (["generate", model, "-"], ["generate", model], ["chat", model]):
        result = shell('"$@" <&-', *args)
        assert (result.returncode, result.stdout) == (1, b"")
        assert "stdin: is closed" in lines(result)[0]


def test_nothing_at_all(model):
    assert shell('"$@" <&- >&- 2>&-', "generate", model, "The", *TINY).returncode == 1


@pytest.mark.parametrize(
    ("args", "stdin", "where"),
    [
        (["{model}", "caf\udce9"], b"", "argument PROMPT"),
        (["{model}", "-"], b"caf\xe9", "stdin"),
        (["{model}", "hi", "--stop", "\udcff"], b"", "option '--stop'"),
        (["{model}", "hi", "--regex", "\udcff"], b"", "option '--regex'"),
        (["{model}", "hi", "--system", "\udcff"], b"", "option '--system'"),
    ],
    ids=["prompt", "stdin", "stop", "regex", "system"],
)
def test_what_is_not_utf_8(model, args, stdin, where):
    result = shell('"$@"', "generate", *(arg.format(model=model) for arg in args), stdin=stdin, LC_ALL="C.UTF-8")
    assert (result.returncode, result.stdout) == (1, b"")
    assert lines(result) == [f"error: {where}: not a text in UTF-8"]


def test_a_message_that_is_not_utf_8_does_not_end_the_conversation(model):
    result = shell('"$@"', "chat", model, "--regex", "[a-z]{4}", stdin=b"caf\xe9\nhello\n", LC_ALL="C.UTF-8")
    assert lines(result) == ["error: stdin: not a text in UTF-8"]
    assert len(result.stdout) == len("abcd\n")
    assert result.returncode == 1  # one question got no answer


def test_a_terminal_that_knows_only_ascii(model):
    """What it cannot show is escaped."""
    args = ["generate", model, "The", "--regex", "caf\u00e9\u2014!"]
    assert shell('"$@"', *args, PYTHONIOENCODING="utf-8").stdout.decode() == "caf\u00e9\u2014!\n"
    result = shell('"$@"', *args, PYTHONIOENCODING="ascii")
    assert (result.returncode, result.stdout) == (0, b"caf\\xe9\\u2014!\n")


def test_an_endless_file_is_no_text(model, tmp_path):
    result = shell('ulimit -v 16000000; "$@" < /dev/zero', "generate", model, "-")
    assert result.returncode == 1
    assert "no text for a model" in lines(result)[0]


def test_a_closed_descriptor_is_not_given_to_a_file(model):
    """A file that is opened as number 1 or 2 would be written into by whoever prints."""
    script = (
        "import os; from moeflux.cli.streams import prepare_streams; prepare_streams();"
        "print(os.readlink('/proc/self/fd/0'), os.readlink('/proc/self/fd/2'))"
    )
    result = subprocess.run(
        ["bash", "-c", '"$@" <&- 2>&-', "bash", sys.executable, "-c", script], capture_output=True, text=True, timeout=60
    )
    assert result.stdout == "/dev/null /dev/null\n"


def test_an_interrupt_while_it_loads_is_no_traceback(model):
    command = [sys.executable, "-c", "import os, signal; from moeflux.cli import main, talk\n"
               "talk.load = lambda *_, **__: os.kill(os.getpid(), signal.SIGINT)\n"
               "main.main()", "generate", str(model), "The"]  # fmt: skip
    result = subprocess.run(
        command, capture_output=True, timeout=60, preexec_fn=lambda: signal.signal(signal.SIGINT, signal.default_int_handler)
    )
    assert result.returncode == 130
    assert lines(result) == []
