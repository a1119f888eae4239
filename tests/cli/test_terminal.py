"""At a terminal of its own: what a model or a file name holds never steers it, and Ctrl-C is heard, twice if need be."""

from __future__ import annotations

import io
import os
import signal
import sys

import pexpect
import pytest

from cli.test_chat import heed_interrupts
from cli.test_cli import moeflux
from moeflux.cli import tables
from moeflux.cli.progress import PromptBar
from moeflux.cli.talk import follow, interrupts
from moeflux.cli.terminal import visible
from moeflux.core.errors import ReadError
from moeflux.session.events import Token
from moeflux.text.regions import Text

HOSTILE = r"\x1b\]0;title\x07\x1b\[31mred\x{9b}1A\rover"
DEAF = """
import moeflux.session.generate as g
g.Generation.cancel = lambda self: None
from moeflux.cli.main import main
main()
"""


class Screen(io.StringIO):
    def isatty(self):
        return True


def spawn(*args, script=None):
    start = ["-m", "moeflux"] if script is None else ["-c", script]
    env = {**os.environ, "TERM": "xterm", "NO_COLOR": "1"}
    options = {"env": env, "encoding": "utf-8", "timeout": 60, "dimensions": (40, 250), "preexec_fn": heed_interrupts}
    return pexpect.spawn(sys.executable, [*start, *map(str, args)], **options)


def ended(child):
    child.expect(pexpect.EOF)
    child.close()
    return child.before


class TestVisible:
    @pytest.mark.parametrize(
        ("text", "seen"),
        [
            ("\x1b[31m", "␛[31m"),
            ("a\tb\nc", "a\tb\nc"),
            ("a\rb\x08\x07\x7f\0", "a␍b␈␇␡␀"),
            ("\x9b1A", "\\x9b1A"),
            ("\u202eabc", "\\u202eabc"),
            ("é — 日本 שלום \u200f", "é — 日本 שלום \u200f"),
        ],
    )
    def test_for_people_only(self, text, seen):
        assert visible(text, Screen()) == seen
        assert visible(text, io.StringIO()) == text

    def test_no_control_character_is_left(self):
        everything = "".join(map(chr, range(0x110000)))
        left = {c for c in visible(everything, Screen()) if ord(c) < 32 or 0x7F <= ord(c) < 0xA0}
        assert left == {"\n", "\t"}

    def test_tables(self, monkeypatch):
        screen = Screen()
        monkeypatch.setattr(sys, "stdout", screen)
        monkeypatch.setenv("NO_COLOR", "1")
        tables.print_table(("", ""), [("[red]not markup[/x]", "\x1b]0;title\x07")])
        assert "[red]not markup[/x]" in screen.getvalue()
        assert "\x1b]" not in screen.getvalue()


@pytest.mark.parametrize("command", ["generate", "chat"])
def test_a_model_cannot_steer_the_terminal(command):
    child = spawn(command, *(["hi"] if command == "generate" else []), "--regex", HOSTILE)
    if command == "chat":
        child.expect("> ")
        child.sendline("hi")
    child.expect_exact("␛]0;title␇␛[31mred\\x9b1A␍over")
    assert "\x1b]0;" not in child.before
    if command == "chat":
        child.expect("> ")  # a line is being read: it takes the end of the input
    child.sendeof()
    ended(child)


def test_into_a_pipe_a_text_goes_as_it_is():
    result = moeflux("generate", "hi", "--regex", r"\x1b\[31mred")
    assert result.stdout == "\x1b[31mred\n"


def test_a_file_name_cannot_steer_the_terminal():
    seen = ended(spawn("inspect", "/tmp/\x1b]0;title\x07"))
    assert "error: /tmp/␛]0;title␇: no such file" in seen


class TestInterrupts:
    def test_the_first_asks_and_the_second_raises(self):
        asked = []
        before = signal.getsignal(signal.SIGINT)
        with interrupts(lambda: asked.append(1)):
            signal.raise_signal(signal.SIGINT)
            assert asked == [1]
            with pytest.raises(KeyboardInterrupt):
                signal.raise_signal(signal.SIGINT)
        assert asked == [1]
        assert signal.getsignal(signal.SIGINT) is before

    def test_generate(self):
        child = spawn("generate", "hi", "-n", 100000, "--regex", "[ab]{100000}", "--context", 200000)
        child.expect("[ab]{20}")
        child.sendintr()
        assert "tok/s" in (seen := ended(child))
        assert seen.rstrip().endswith("stopped")
        assert child.exitstatus == 130

    def test_a_second_one_where_the_first_is_not_heard(self):
        long = ["-n", 100000, "--regex", "[ab]{100000}", "--context", 200000]
        child = spawn("generate", "hi", *long, script=DEAF)
        child.expect("[ab]{20}")
        child.sendintr()
        child.expect("[ab]{20}")
        child.sendintr()
        assert ended(child).rstrip().endswith("stopped at once")
        assert child.exitstatus == 130

    def test_a_second_one_in_a_conversation_ends_the_answer_only(self):
        child = spawn("chat", "--regex", "[ab]{100000}", "--context", 200000, script=DEAF)
        child.expect("> ")
        child.sendline("hi")
        child.expect("[ab]{20}")
        child.sendintr()
        child.expect("[ab]{20}")
        child.sendintr()
        child.expect("stopped")
        child.expect("> ")
        child.sendline("/quit")
        assert "Traceback" not in ended(child)
        assert child.exitstatus == 0


class Failing:
    """An answer of two tokens and an error."""

    finish = None

    def __init__(self):
        self._tokens = [Token(1, (Text("one "),)), Token(2, (Text("two"),))]

    def __iter__(self):
        yield from self._tokens
        raise ReadError("broken", where="expert 3")

    def cancel(self):
        pass


@pytest.mark.parametrize(("quiet", "out"), [(False, "one two\n"), (True, "")])
def test_an_answer_that_fails_ends_its_line(capsys, quiet, out):
    bar, closed = PromptBar(), []
    bar.close = lambda: closed.append(1)
    with pytest.raises(ReadError):
        follow(Failing(), bar, quiet)
    assert capsys.readouterr().out == out
    assert closed
