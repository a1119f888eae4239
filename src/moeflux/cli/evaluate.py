"""`moeflux eval MODEL --text FILE`: how well a model foretells a text, and what lossy options cost."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table

from moeflux.api import load
from moeflux.cli import options as o
from moeflux.cli.talk import opening, say
from moeflux.session.demo import demo_model
from moeflux.session.evaluate import Score, evaluate


def eval_text(
    text: Annotated[Path, typer.Option(help="File with the text, in UTF-8.")],
    model: Annotated[Path | None, typer.Argument(help="Model folder; left out: the demo model.")] = None,
    tokens: Annotated[int | None, typer.Option(min=1, help="Only so many tokens of it.")] = None,
    k: Annotated[int | None, typer.Option(min=1, help="Lossy: fewer experts per token than the model's own.")] = None,
    bits: Annotated[int | None, typer.Option(min=1, help="Lossy: experts requantised to so many bits. Slow.")] = None,
    as_json: o.Json = False,
    backend: o.Backend = "auto",
    threads: o.Threads = None,
    ram: o.Ram = None,
    context: o.Context = None,
    isa: o.Isa = "auto",
) -> None:
    """Show nats per token and bits per character of a text. Lossy options are measured beside the model as it is."""
    folder = demo_model() if model is None else model
    words = o.read_text(text)
    lossy = o.given(k=k, bits=bits)
    scores: dict[str, Score] = {}
    for name, options in {"as it is": {}, **({_label(lossy): lossy} if lossy else {})}.items():
        with load(
            folder, backend=backend, threads=threads, ram=ram, context=context, isa=isa, text="plain", **options
        ) as engine:
            for note in (*engine.notes, opening(str(folder), engine)):
                say(note)
            with _bar(name) as progress:
                scores[name] = evaluate(engine, engine.text.tokenizer, words, tokens, progress)
    if as_json:
        print(json.dumps(_report(scores)))
        return
    _print(scores)


def _label(lossy: dict[str, int]) -> str:
    words = {"k": "top {}", "bits": "experts of {} bits"}
    return ", ".join(words[name].format(value) for name, value in lossy.items())


def _report(scores: dict[str, Score]) -> dict[str, Any]:
    default, *rest = scores.items()
    report: dict[str, Any] = default[1].as_dict()
    for name, score in rest:
        loss = score.bits_per_character - default[1].bits_per_character
        report["lossy"] = {"what": name, **score.as_dict(), "loss_bits_per_character": loss}
    return report


def _print(scores: dict[str, Score]) -> None:
    table = Table(box=None, pad_edge=False)
    for column in ("", "nats/token", "perplexity", "bits/character", "loss in bits/character", "tokens", "characters"):
        table.add_column(column, justify="left" if not column else "right", no_wrap=True)
    default = next(iter(scores.values()))
    for name, score in scores.items():
        loss = score.bits_per_character - default.bits_per_character
        shown = "" if score is default else f"{loss:+.4f}"
        numbers = (f"{score.nats_per_token:.4f}", f"{score.perplexity:.3f}", f"{score.bits_per_character:.4f}")
        table.add_row(name, *numbers, shown, f"{score.n_tokens:,}", f"{score.n_characters:,}")
    console = Console(highlight=False)
    console.width = max(console.width, 120)
    console.print(table)


class _bar:
    """Tokens done, where a person is watching."""

    def __init__(self, title: str) -> None:
        columns = (TextColumn(title), BarColumn(), TextColumn("{task.completed}/{task.total} tokens"), TimeRemainingColumn())
        hidden = not sys.stderr.isatty()
        self._bar = Progress(*columns, console=Console(stderr=True), transient=True, disable=hidden)
        self._task = self._bar.add_task(title, total=None)

    def __enter__(self) -> Any:
        self._bar.start()
        return lambda done, total: self._bar.update(self._task, completed=done, total=total)

    def __exit__(self, *_: object) -> None:
        self._bar.stop()
