"""`moeflux generate [MODEL] [PROMPT]`: the continuation on stdout as it comes, what it took on stderr."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Annotated, Any

import typer

from moeflux.api import Engine
from moeflux.cli import options as o
from moeflux.cli.progress import PromptBar
from moeflux.cli.streams import check_text, read_stdin, stdin_is_terminal
from moeflux.cli.talk import closing, follow, opened
from moeflux.cli.terminal import say
from moeflux.cli.tracing import tracing
from moeflux.core.errors import OptionError, ReadError
from moeflux.session.chat import Answer
from moeflux.session.demo import demo_model
from moeflux.session.events import Token
from moeflux.session.generate import Generation

DEMO_PROMPT = "Once upon a time"


def generate(
    model: Annotated[str | None, typer.Argument(help="Model folder; left out: the demo model.")] = None,
    prompt: Annotated[str | None, typer.Argument(help="Text to continue; - or nothing reads it from stdin.")] = None,
    max_tokens: Annotated[int, typer.Option("--max-tokens", "-n", min=1, help="Stop after this many tokens.")] = 128,
    chat: Annotated[bool, typer.Option("--chat", help="Ask through the chat template instead of continuing.")] = False,
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
    logprobs: Annotated[int | None, typer.Option(help="With --json: so many alternatives per token.")] = None,
    as_json: o.Json = False,
    backend: o.Backend = "auto",
    threads: o.Threads = None,
    ram: o.Ram = None,
    vram: o.Vram = None,
    context: o.Context = None,
    isa: o.Isa = "auto",
    slots: o.Slots = None,
    trace: o.Trace = None,
) -> None:
    """Continue a text. Without a model, with the one that comes with moeflux.

    One argument alone is a model folder if it begins with / ~ or ., if it is one word with a / in it, or if there is
    something of that name. Anything else is a text for the demo model.
    """
    arguments = locals()
    if logprobs is not None and not as_json:
        raise OptionError("shows in JSON only", where="option '--logprobs'", hint="add --json")
    if thinking is not None and not (chat or system is not None):
        raise OptionError("needs the chat template", where="option '--thinking'", hint="add --chat")
    wanted, loading = o.asked(arguments), o.engine_options(arguments)
    o.check_output("trace", trace)
    folder, words = _model_and_prompt(model, prompt)
    o.check_answer(demo_model() if folder is None else folder, wanted, loading, system)
    text = _read_prompt(words, folder is None)
    with opened(folder, loading, "all" if wanted["grammar"] else "plain") as engine, tracing(engine, trace):
        bar = PromptBar()
        lead = text if prompt is model is None and text == DEMO_PROMPT and not as_json else ""  # nobody has seen it yet
        if chat or system is not None:
            asked = engine.chat(system=system, thinking=thinking)
            stream: Generation | Answer = asked.ask(text, progress=bar.callback, **wanted)
        else:
            stream = engine.generate(text, progress=bar.callback, **wanted)
        _run(engine, stream, as_json, bar, lead)


def _run(engine: Engine, stream: Generation | Answer, as_json: bool, bar: PromptBar, lead: str) -> None:
    """`lead`: shown before the first token, when no bar is on its line any more."""
    try:
        tokens = follow(stream, bar, as_json, lead)
    except KeyboardInterrupt:
        say("stopped at once")
        raise typer.Exit(130) from None
    finish = stream.finish
    assert finish is not None
    if as_json:
        print(json.dumps(_report(engine, stream, tokens)), flush=True)
    say(closing(finish, engine.plan.drive_bytes_s))
    if finish.reason == "cancelled":
        raise typer.Exit(130)


def _report(engine: Engine, stream: Generation | Answer, tokens: list[Token]) -> dict[str, Any]:
    assert stream.finish is not None
    report: dict[str, Any] = {
        "model": str(engine.config.model),
        "model_type": engine.spec.model_type,
        "backend": engine.config.resolved_backend,
        "text": "".join(token.text for token in tokens),
        **stream.finish.as_dict(),
    }
    if isinstance(stream, Answer):
        calls = [{"name": call.name, "arguments": call.arguments, "complete": call.complete} for call in stream.calls]
        report |= {"reasoning": stream.reasoning, "tool_calls": calls}
    if any(token.logprob is not None for token in tokens):
        report["tokens"] = [{"id": t.id, "logprob": t.logprob, "top": t.top, "forced": t.forced} for t in tokens]
    return report


def _model_and_prompt(model: str | None, prompt: str | None) -> tuple[Path | None, str | None]:
    """One argument alone is a model where it looks like one, else a prompt for the demo model. No prompt: it is on stdin."""
    if prompt is None and model is not None and not _is_path(model):
        model, prompt = None, model
    if model == "":
        raise OptionError("is empty", where="argument MODEL", hint="name a folder, or leave it out for the demo model")
    if prompt is None and model is not None and not os.path.exists(model):
        hint = "is it a text for the demo model? Then give it on stdin: moeflux generate - < FILE"
        raise ReadError("no such file or folder", where=model, hint=hint)
    if prompt is None and model is not None and stdin_is_terminal():
        raise OptionError("there is no text to continue", where="argument PROMPT", hint="give a text, or - for stdin")
    return None if model is None else Path(model), prompt


def _is_path(word: str) -> bool:
    """Rather once too often: a folder that was mistyped must not become a text for another model."""
    one_word = len(word.split()) == 1
    return word.startswith(("/", "~", ".")) or ("/" in word and one_word) or os.path.exists(word)


def _read_prompt(prompt: str | None, demo: bool) -> str:
    if prompt is not None and prompt != "-":
        return check_text(prompt, "argument PROMPT")
    nothing = prompt is None and demo and (sys.stdin is None or stdin_is_terminal())
    text = "" if nothing else read_stdin()
    return DEMO_PROMPT if prompt is None and demo and not text else text
