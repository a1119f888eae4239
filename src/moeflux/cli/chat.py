"""`moeflux chat [MODEL]`: a conversation. Answers go to stdout, the rest to stderr; Ctrl-C stops an answer, Ctrl-D all."""

from __future__ import annotations

import contextlib
import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any

import typer

from moeflux.api import Engine
from moeflux.cli import options as o
from moeflux.cli.progress import PromptBar
from moeflux.cli.streams import check_text, read_line, stdin_is_terminal
from moeflux.cli.talk import closing, follow, opened
from moeflux.cli.terminal import colours, say
from moeflux.core.errors import InputError, MoefluxError
from moeflux.core.units import format_bytes
from moeflux.session.chat import Answer, Chat
from moeflux.session.demo import demo_model
from moeflux.session.events import Finish

HELP = """\
/help            this
/reset           forget the conversation, keep the system prompt
/system [TEXT]   show or set the system prompt, and begin anew
/save FILE       write the conversation to a file
/load FILE       go on with one that was saved
/stats           what the model has done so far
/quit            leave (or Ctrl-D)
A line that ends with \\ goes on in the next one; \"\"\" alone begins and ends a message of many lines.
Ctrl-C stops an answer."""


def chat(
    model: o.ModelOrDemo = None,
    max_tokens: Annotated[int | None, typer.Option("--max-tokens", "-n", min=1, help="Of one answer.")] = None,
    system: o.System = None,
    thinking: o.Thinking = None,
    temperature: o.Temperature = None,
    top_k: o.TopK = None,
    top_p: o.TopP = None,
    min_p: o.MinP = None,
    repetition_penalty: o.Repetition = None,
    presence_penalty: o.Presence = None,
    frequency_penalty: o.Frequency = None,
    seed: o.Seed = None,
    stop: o.Stop = None,
    schema: o.SchemaFile = None,
    regex: o.Regex = None,
    grammar: o.GrammarFile = None,
    as_json: Annotated[bool, typer.Option("--json", help="One JSON object per answer on stdout, instead of text.")] = False,
    backend: o.Backend = "auto",
    threads: o.Threads = None,
    ram: o.Ram = None,
    vram: o.Vram = None,
    context: o.Context = None,
    isa: o.Isa = "auto",
    slots: o.Slots = None,
) -> None:
    """Talk with a model; without one, with the one that comes with moeflux. /help says what else you can type."""
    arguments = locals()
    wanted, loading = o.asked(arguments), o.engine_options(arguments)
    o.check_answer(demo_model() if model is None else model, wanted, loading, system)
    if sys.stdin is None:
        raise InputError("is closed: there is nobody to talk with", where="stdin")
    with opened(model, loading, "all" if wanted["grammar"] else "plain") as engine:
        talk = _Talk(engine, engine.chat(system=system, thinking=thinking), wanted, as_json)
        if stdin_is_terminal():
            with contextlib.suppress(ImportError):
                import readline  # noqa: F401 (gives input() line editing and history)
            say("/help lists commands")
        talk.run()
    if talk.failures and not stdin_is_terminal():
        raise typer.Exit(1)


class _Talk:
    def __init__(self, engine: Engine, chat: Chat, wanted: dict[str, Any], as_json: bool) -> None:
        self._engine, self._chat, self._wanted, self._as_json = engine, chat, wanted, as_json
        self._last: Finish | None = None
        self.failures = 0  # questions that got no answer
        self._commands: dict[str, Callable[[str], None]] = {
            "help": lambda _: say(HELP),
            "reset": self._reset,
            "system": self._system,
            "save": self._save,
            "load": self._load,
            "stats": self._stats,
        }

    def run(self) -> None:
        while (message := read_message()) is not None:
            if message in ("/quit", "/exit"):
                return
            try:
                self._take(message)
            except MoefluxError as error:
                self.failures += not _is_command(message)
                say(f"error: {error}")
            except KeyboardInterrupt:
                say("stopped")

    def _take(self, message: str) -> None:
        check_text(message, "stdin")
        if _is_command(message):
            name, _, rest = message[1:].partition(" ")
            command = self._commands.get(name)
            if command is None:
                say(f"there is no /{name}; /help lists commands, and //{name} says it to the model")
            else:
                command(rest.strip())
        elif message.strip():
            self._ask(message.removeprefix("/") if message.startswith("//") else message)

    def _ask(self, message: str) -> None:
        bar = PromptBar()
        answer = self._chat.ask(message, progress=bar.callback, **self._wanted)
        follow(answer, bar, self._as_json)
        assert answer.finish is not None
        self._last = answer.finish
        if self._as_json:
            print(json.dumps(_report(answer)), flush=True)
        say(closing(answer.finish, self._engine.plan.drive_bytes_s))

    def _reset(self, _: str) -> None:
        self._chat.reset()
        say("forgotten")

    def _system(self, text: str) -> None:
        if text:
            self._chat.system = text
            self._chat.reset()
        say(f"system prompt: {self._chat.system or 'none'}")

    def _save(self, name: str) -> None:
        self._chat.save(_file(name))
        say(f"saved {len(self._chat.messages)} messages")

    def _load(self, name: str) -> None:
        self._chat.load(_file(name))
        say(f"{len(self._chat.messages)} messages")

    def _stats(self, _: str) -> None:
        plan, store = self._engine.plan, self._engine.stats()
        say(f"{len(self._chat.messages)} messages, {self._chat.n_tokens:,} of {plan.context:,} tokens of context")
        say(f"{store.slots_used:,} of {plan.n_experts:,} experts in memory, {format_bytes(store.bytes_resident)}")
        say(
            f"{store.asked:,} experts asked for, {store.hit_rate:.0%} found in memory, {format_bytes(store.bytes_read)} read"
        )
        if self._last:
            say(f"last answer: {closing(self._last, plan.drive_bytes_s)}")


def _is_command(message: str) -> bool:
    return message.startswith("/") and not message.startswith("//")


def read_message() -> str | None:
    """What a person typed; None at the end. Ctrl-C drops what was typed so far."""
    try:
        line = _line("> ")
        while line.endswith("\\"):
            line = line[:-1] + "\n" + _line("… ")
        if line.strip() != '"""':
            return line
        lines = []
        while (line := _line("… ")).strip() != '"""':
            lines.append(line)
        return "\n".join(lines)
    except EOFError:
        return None
    except KeyboardInterrupt:
        say("\nCtrl-D or /quit leaves")
        return ""


def _line(prompt: str) -> str:
    """The prompt goes where a person sees it, and never into a pipe."""
    if not stdin_is_terminal():
        return read_line()
    if sys.stdout.isatty():
        return input(f"\001\x1b[1m\002{prompt}\001\x1b[0m\002" if colours(sys.stdout) else prompt)
    print(prompt, end="", file=sys.stderr, flush=True)
    return input()


def _report(answer: Answer) -> dict[str, Any]:
    assert answer.finish is not None
    calls = [{"name": call.name, "arguments": call.arguments, "complete": call.complete} for call in answer.calls]
    return {"text": answer.text, "reasoning": answer.reasoning, "tool_calls": calls, **answer.finish.as_dict()}


def _file(name: str) -> Path:
    if not name:
        raise MoefluxError("a file name is missing", hint="/save talk.json")
    return Path(name).expanduser()
