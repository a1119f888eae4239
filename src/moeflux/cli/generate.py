"""`moeflux generate MODEL PROMPT`: the continuation on stdout as it comes, one closing line on stderr."""

from __future__ import annotations

import sys
import time
from pathlib import Path
from typing import Annotated

import typer

from moeflux.api import load
from moeflux.cli.options import Context, Isa, Ram, Threads, Trace
from moeflux.cli.progress import byte_bar
from moeflux.cli.tracing import check_trace, tracing


def generate(
    model: Annotated[Path, typer.Argument(help="Model folder.")],
    prompt: Annotated[str, typer.Argument(help="Text to continue; - reads it from stdin.")],
    max_tokens: Annotated[int, typer.Option("--max-tokens", "-n", min=1, help="Stop after this many tokens.")] = 128,
    backend: Annotated[str, typer.Option(help="auto, native or numpy.")] = "auto",
    threads: Threads = None,
    ram: Ram = None,
    context: Context = None,
    isa: Isa = "auto",
    trace: Trace = None,
) -> None:
    """Continue a text, always with the most likely token."""
    check_trace(trace)
    text = sys.stdin.read() if prompt == "-" else prompt
    with (
        byte_bar("loading") as progress,
        load(model, backend=backend, threads=threads, ram=ram, context=context, isa=isa, progress=progress) as engine,
        tracing(engine, trace),
    ):
        for note in engine.notes:
            print(note, file=sys.stderr)
        print(f"{model}: {engine.spec.model_type}, {engine.config.resolved_backend} backend", file=sys.stderr)
        start = time.perf_counter()
        first, n = start, 0
        for token in engine.generate(text, max_tokens=max_tokens):
            n += 1
            if n == 1:
                first = time.perf_counter()
            print(token.text, end="", flush=True)
        print()
        print(_closing(n, start, first, time.perf_counter()), file=sys.stderr)


def _closing(n: int, start: float, first: float, end: float) -> str:
    if n == 0:
        return "no tokens: the text ended at once"
    speed = f", {(n - 1) / (end - first):.3g} tok/s" if n > 1 else ""
    return f"{n} token{'s' if n > 1 else ''}, first after {first - start:.2f} s{speed}"
