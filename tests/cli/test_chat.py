"""`moeflux chat`: through pipes, and at a terminal of its own with a person's keys."""

from __future__ import annotations

import json
import os
import re
import signal
import sys

import pexpect
import pytest

from cli.test_cli import moeflux
from session.models import chat_model

LONG = ["--regex", "[ab]{100000}", "--context", "200000", "--temperature", "1"]


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return chat_model(tmp_path_factory.mktemp("models") / "model")


class TestPiped:
    def test_answers_and_nothing_else_on_stdout(self, model):
        result = moeflux("chat", model, "--regex", "[a-z]{4}", stdin="hello\n\nmore\n")
        assert re.fullmatch(r"[a-z]{4}\n[a-z]{4}\n", result.stdout)
        assert result.returncode == 0
        assert result.stderr.count("tok/s") == 2
        assert "\x1b" not in result.stderr

    def test_json(self, model):
        result = moeflux("chat", model, "--json", "-n", 4, "--regex", "[a-z]{40}", stdin="hello\nmore\n/quit\nnever\n")
        first, second = map(json.loads, result.stdout.splitlines())
        assert second["usage"]["cached"] == first["usage"]["prompt"] + 3
        assert first["usage"]["completion"] == 4

    def test_commands(self, model, tmp_path):
        talk = tmp_path / "talk.json"
        typed = ["/help", "hello", f"/save {talk}", "/stats", "/reset", f"/load {talk}", "/load /nowhere", "/save",
                 "/system Be brief.", "/dance"]  # fmt: skip
        result = moeflux("chat", model, "--regex", "[a-z]{4}", stdin="\n".join(typed))
        assert re.fullmatch(r"[a-z]{4}\n", result.stdout)
        words = ["/reset", "saved 2 messages", "2 messages,", "experts in memory", "last answer: ", "forgotten",
                 "\n2 messages\n", "/nowhere", "file name is missing", "system prompt: Be brief.",
                 "there is no /dance"]  # fmt: skip
        for word in words:
            assert word in result.stderr
        assert [m["role"] for m in json.loads(talk.read_text())["messages"]] == ["user", "assistant"]
        assert result.returncode == 0

    def test_messages_of_many_lines(self, model, tmp_path):
        talk = tmp_path / "talk.json"
        stdin = f'"""\none\n\n/two\n"""\na\\\nb\n//slash\n/save {talk}\n'
        moeflux("chat", model, "-n", 2, "--regex", "[a-z]{2}", stdin=stdin)
        said = [m["content"] for m in json.loads(talk.read_text())["messages"] if m["role"] == "user"]
        assert said == ["one\n\n/two", "a\nb", "/slash"]

    def test_a_system_prompt(self, model, tmp_path):
        talk = tmp_path / "talk.json"
        moeflux("chat", model, "--system", "Be brief.", stdin=f"/save {talk}\n")
        assert json.loads(talk.read_text())["system"] == "Be brief."

    def test_a_question_that_is_refused_does_not_end_the_conversation(self, model):
        result = moeflux("chat", model, "--context", 40, "--regex", "[a-z]{2}", stdin=f"{'word ' * 60}\nhello\n")
        assert re.fullmatch(r"[a-z]{2}\n", result.stdout)
        assert "planned for 40" in result.stderr

    def test_models_without_a_template(self, tmp_path):
        result = moeflux("chat", chat_model(tmp_path / "model", None), stdin="hello\n")
        assert (result.returncode, result.stdout) == (1, "")
        assert "chat template" in result.stderr


def heed_interrupts():
    """A shell without job control starts what runs in the background with Ctrl-C ignored, and children inherit that."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)


class TestTerminal:
    """What is seen: answers, talk and what was typed, all in one place."""

    def spawn(self, model, *args, **environment):
        env = {**os.environ, "TERM": "xterm", **environment}
        env.pop("NO_COLOR", None) if "NO_COLOR" not in environment else None
        arguments = ["-m", "moeflux", "chat", str(model), *map(str, args)]
        options = {"env": env, "encoding": "utf-8", "timeout": 60, "dimensions": (40, 200), "preexec_fn": heed_interrupts}
        return pexpect.spawn(sys.executable, arguments, **options)

    def prompt(self, child):
        """Waits until a line is being read. What is typed before that is the terminal's, and a Ctrl-D then ends nothing."""
        child.expect("> ")

    def leave(self, child):
        self.prompt(child)
        child.sendeof()
        child.expect(pexpect.EOF)
        child.close()
        assert child.exitstatus == 0

    def test_a_conversation(self, model):
        child = self.spawn(model, "--regex", "[a-z]{6}!")
        child.expect("all 32 experts in memory")
        self.prompt(child)
        child.sendline("hello")
        child.expect(r"[a-z]{6}!")
        child.expect("tok/s")
        self.prompt(child)
        child.sendline("/stats")
        child.expect("2 messages")
        self.leave(child)

    def test_ctrl_c_stops_the_answer_and_not_the_program(self, model):
        child = self.spawn(model, *LONG)
        self.prompt(child)
        for _ in range(2):
            child.sendline("hello")
            child.expect("[ab]{20}")
            child.sendintr()
            child.expect("tok/s.*stopped")
            self.prompt(child)
        child.sendline("/stats")
        child.expect("4 messages")
        self.prompt(child)
        child.sendline("/quit")
        child.expect(pexpect.EOF)
        child.close()
        assert child.exitstatus == 0

    def test_ctrl_c_at_the_prompt_drops_the_line(self, model):
        child = self.spawn(model, "--regex", "[a-z]{6}!")
        self.prompt(child)
        child.send("half a question")
        child.expect("half a question")  # echoed: the line is being read
        child.sendintr()
        child.expect("Ctrl-D or /quit leaves")
        self.prompt(child)
        child.sendline("hello")
        child.expect(r"[a-z]{6}!")
        self.prompt(child)
        child.sendline("/stats")
        child.expect("2 messages")
        self.leave(child)

    def test_history_by_the_arrow_keys(self, model):
        child = self.spawn(model, "--regex", "[a-z]{6}!")
        self.prompt(child)
        child.sendline("/system Be brief.")
        child.expect("system prompt: Be brief.")
        self.prompt(child)
        child.send("\x1b[A\r")  # up, return
        child.expect("system prompt: Be brief.")
        self.leave(child)

    @pytest.mark.parametrize("environment", [{}, {"NO_COLOR": "1"}, {"TERM": "dumb"}], ids=str)
    def test_colours(self, model, environment):
        child = self.spawn(model, "--regex", "[a-z]{6}!", **environment)
        self.prompt(child)
        seen = child.before
        child.sendline("hello")
        child.expect("tok/s")
        seen += child.before
        self.leave(child)
        assert ("\x1b[2m" in seen) is (not environment)
