"""`moeflux generate [MODEL] [PROMPT]`: the continuation on stdout as it comes, what it took on stderr."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Annotated, Any

import typer

from moeflux.api import Engine
from moeflux.cli import options as o
from moeflux.cli.progress import PromptBar
from moeflux.cli.talk import closing, dim, interrupts, opened, say
from moeflux.cli.tracing import check_trace, tracing
from moeflux.core.config import TextUse
from moeflux.core.errors import OptionError
from moeflux.session.chat import Answer
from moeflux.session.events import Token
from moeflux.session.generate import Generation
from moeflux.text.regions import Text
from moeflux.text.tools import CallEnd

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
    context: o.Context = None,
    isa: o.Isa = "auto",
    slots: o.Slots = None,
    trace: o.Trace = None,
) -> None:
    """Continue a text. Without a model, with the one that comes with moeflux."""
    if logprobs is not None and not as_json:
        raise OptionError("shows in JSON only", where="option '--logprobs'", hint="add --json")
    if thinking is not None and not (chat or system):
        raise OptionError("needs the chat template", where="option '--thinking'", hint="add --chat")
    check_trace(trace)
    folder, text = _model_and_prompt(model, prompt)
    wanted: dict[str, Any] = {
        "max_tokens": max_tokens, "stop": stop or (), "grammar": o.read_grammar(schema, regex, grammar),
        **o.given(temperature=temperature, top_k=top_k, top_p=top_p, min_p=min_p, repetition_penalty=repetition_penalty,
                  presence_penalty=presence_penalty, frequency_penalty=frequency_penalty, seed=seed, logprobs=logprobs),
    }  # fmt: skip
    use: TextUse = "all" if wanted["grammar"] else "plain"
    with opened(folder, backend, threads, ram, context, isa, slots, use) as engine, tracing(engine, trace):
        bar = PromptBar()
        lead = text if prompt is model is None and text == DEMO_PROMPT else ""  # nobody has seen it yet
        if chat or system:
            asked = engine.chat(system=system, thinking=thinking)
            stream: Generation | Answer = asked.ask(text, progress=bar.callback, **wanted)
        else:
            stream = engine.generate(text, progress=bar.callback, **wanted)
        _run(engine, stream, as_json, bar, lead)


def _run(engine: Engine, stream: Generation | Answer, as_json: bool, bar: PromptBar, lead: str) -> None:
    """`lead`: shown before the first token, when no bar is on its line any more."""
    tokens: list[Token] = []
    with interrupts(stream.cancel):
        for token in stream:
            if lead and not tokens and not as_json:
                bar.close()
                print(lead, end="")
            tokens.append(token)
            if not as_json:
                show(token)
    bar.close()
    finish = stream.finish
    assert finish is not None
    print(json.dumps(_report(engine, stream, tokens)) if as_json else "")
    say(closing(finish, engine.plan.drive_bytes_s))
    if finish.reason == "cancelled":
        raise typer.Exit(130)


def show(token: Token) -> None:
    """The answer to stdout; reasoning and tool calls are not the answer."""
    for part in token.parts:
        match part:
            case Text(text, "reasoning"):
                print(dim(text), end="", file=sys.stderr, flush=True)
            case Text(text):
                print(text, end="", flush=True)
            case CallEnd(_, call):
                say(f"\ncalls {call.name}({call.arguments})")


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


def _model_and_prompt(model: str | None, prompt: str | None) -> tuple[Path | None, str]:
    """One argument alone is a model where it looks like one, else a prompt for the demo model."""
    if prompt is None and model is not None and not _is_path(model):
        model, prompt = None, model
    if prompt is None and sys.stdin.isatty() and model is not None:
        raise OptionError("there is no text to continue", where="argument PROMPT", hint="give a text, or - for stdin")
    text = prompt
    if prompt == "-" or (prompt is None and not sys.stdin.isatty()):
        text = sys.stdin.read()
    if model is None and prompt is None and not text:
        return None, DEMO_PROMPT
    return None if model is None else Path(model), text or ""


def _is_path(word: str) -> bool:
    return word.startswith(("/", "./", "../", "~")) or Path(word).exists()
