"""`moeflux eval MODEL --text FILE`: how well a model foretells a text, and what lossy options cost."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated, Any

import typer

from moeflux.api import load
from moeflux.cli import options as o
from moeflux.cli.progress import token_bar
from moeflux.cli.tables import print_table
from moeflux.cli.talk import opening
from moeflux.cli.terminal import say
from moeflux.core.config import EngineConfig
from moeflux.formats.checkpoint import Checkpoint, read_config
from moeflux.models.registry import read_spec
from moeflux.runtime.lossy import check_bits, fewer_experts
from moeflux.session.demo import demo_model
from moeflux.session.evaluate import Score, evaluate


def eval_text(
    text: Annotated[Path, typer.Option(parser=o.path_of, help="File with the text, in UTF-8.")],
    model: o.ModelOrDemo = None,
    tokens: Annotated[int | None, typer.Option(min=1, help="Only so many tokens of it.")] = None,
    k: Annotated[int | None, typer.Option(min=1, help="Lossy: fewer experts per token than the model's own.")] = None,
    bits: Annotated[int | None, typer.Option(min=1, help="Lossy: experts requantised to so many bits. Slow.")] = None,
    as_json: o.Json = False,
    backend: o.Backend = "auto",
    threads: o.Threads = None,
    ram: o.Ram = None,
    vram: o.Vram = None,
    context: o.Context = None,
    isa: o.Isa = "auto",
) -> None:
    """Show nats per token and bits per character of a text. Lossy options are measured beside the model as it is."""
    folder = demo_model() if model is None else model
    loading, lossy = o.engine_options(locals()), o.given(k=k, bits=bits)
    _check(EngineConfig(folder, **loading, **lossy))
    words = o.read_text(text)
    scores: dict[str, Score] = {}
    for name, options in {"as it is": {}, **({_label(lossy): lossy} if lossy else {})}.items():
        with load(folder, **loading, text="plain", **options) as engine:
            for line in (*engine.notes, opening(str(folder), engine)):
                say(line)
            with token_bar(name) as progress:
                scores[name] = evaluate(engine, engine.text.tokenizer, words, tokens, progress)
    if as_json:
        print(json.dumps(_report(scores)))
        return
    _print(scores)


def _check(config: EngineConfig) -> None:
    """What the lossy run would refuse is refused before the whole text was run without loss."""
    spec = fewer_experts(read_spec(read_config(config.model)), config.k)
    checkpoint = Checkpoint(config.model, spec.names)
    try:
        check_bits(config.bits, spec, checkpoint)
    finally:
        checkpoint.close()


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
    headings = ("", "nats/token", "perplexity", "bits/character", "loss in bits/character", "tokens", "characters")
    default = next(iter(scores.values()))
    rows = []
    for name, score in scores.items():
        loss = score.bits_per_character - default.bits_per_character
        shown = "" if score is default else f"{loss:+.4f}"
        numbers = (f"{score.nats_per_token:.4f}", f"{score.perplexity:.3f}", f"{score.bits_per_character:.4f}")
        rows.append((name, *numbers, shown, f"{score.n_tokens:,}", f"{score.n_characters:,}"))
    print_table(headings, rows, numbers=True)
