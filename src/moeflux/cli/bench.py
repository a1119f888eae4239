"""`moeflux bench …`: a table for people, one JSON line last for machines."""

from __future__ import annotations

import json
import sys
import tempfile
from collections.abc import Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.table import Table

import moeflux
from moeflux.api import Engine, load
from moeflux.bench.batch import SIZES, bench_batch
from moeflux.bench.io import bench_io
from moeflux.bench.ops import bench_ops
from moeflux.bench.peers import SHAPES, Models, bench_peers, peer_version
from moeflux.bench.speed import SpeedRow, bench_decode, bench_prefill
from moeflux.cli.options import Ram, Threads
from moeflux.cli.progress import byte_bar
from moeflux.core.config import EngineConfig
from moeflux.core.units import format_bytes
from moeflux.runtime.inspect import inspect_model

app = typer.Typer(help="Measure speed, beside the machine's limits measured in the same run.", no_args_is_help=True)

Model = Annotated[Path, typer.Argument(help="Model folder.")]
Isa = Annotated[str, typer.Option(help="auto, avx512_vnni, avx2 or generic.")]
Repeats = Annotated[int, typer.Option(min=1, help="Measurements; best and median are shown.")]


@app.command()
def ops(
    threads: Threads = None, isa: Isa = "auto", tokens: Annotated[int, typer.Option(min=1)] = 1, repeats: Repeats = 7
) -> None:
    """Kernels at the shapes of Qwen3.5-35B-A3B, weights streamed from memory."""
    n = EngineConfig(Path(), threads=threads, isa=isa).n_threads
    rows = [row.as_dict() for row in bench_ops(n, isa, tokens, repeats)]
    table = [
        (r["name"], r["shape"], _pair(r["gb_s"], ".1f"), _pair(r["read_gb_s"], ".1f"), _pair(r["share_of_read"], ".0%"),
         _pair(r["gmac_s"], ".0f"), _pair(r["share_of_multiply"], ".0%"))
        for r in rows
    ]  # fmt: skip
    print(f"{n} threads, {tokens} token{'s' if tokens > 1 else ''} per call; best / median of {repeats}", file=sys.stderr)
    _print(("kernel", "shape", "GB/s", "read GB/s", "of read", "GMAC/s", "of int8 rate"), table)
    print(json.dumps({"bench": "ops", "rows": rows}))


@app.command()
def io(
    model: Model,
    repeats: Annotated[int, typer.Option(min=3, help="Measurements; best and median are shown.")] = 5,
    seconds: Annotated[float, typer.Option(min=0.01, max=10, help="Of each measurement.")] = 0.5,
) -> None:
    """The drive's ceiling with the model's own experts, cold, past and through the page cache."""
    report = bench_io(model, repeats, seconds)
    records = f"{report.reads_per_expert} reads of {format_bytes(report.expert_bytes)} in all per expert"
    _notes((f"io: {report.model_type}, random experts, {records}; best / median of {repeats}", *report.notes))
    rows = [row.as_dict() for row in report.rows]
    table = [
        ("O_DIRECT" if r["direct"] else "buffered", str(r["n_readers"]), _pair(r["gb_s"], ".2f"),
         _pair(r["expert_ms"], ".2f"), "cold" if r["cold"] else "NOT COLD")
        for r in rows
    ]  # fmt: skip
    _print(("reader", "readers", "GB/s", "ms per expert", "page cache"), table)
    print(json.dumps(report.as_dict()))


@app.command()
def decode(
    model: Model,
    threads: Threads = None,
    isa: Isa = "auto",
    ram: Ram = None,
    tokens: Annotated[int, typer.Option(min=1, help="Tokens per measurement.")] = 16,
    context: Annotated[int, typer.Option(min=1, help="Tokens before them.")] = 32,
    repeats: Repeats = 5,
) -> None:
    """Decode speed, token by token."""
    n = context + tokens * (repeats + 1)
    with (
        byte_bar("loading") as progress,
        load(model, threads=threads, isa=isa, ram=ram, context=n, progress=progress) as engine,
    ):
        _notes(engine.notes)
        _report(bench_decode(engine, tokens, context, repeats))


@app.command()
def prefill(
    model: Model,
    threads: Threads = None,
    isa: Isa = "auto",
    ram: Ram = None,
    tokens: Annotated[int, typer.Option(min=2, help="Length of the prompt.")] = 512,
    repeats: Repeats = 5,
) -> None:
    """Prefill speed of a whole prompt."""
    with (
        byte_bar("loading") as progress,
        load(model, threads=threads, isa=isa, ram=ram, context=tokens, progress=progress) as engine,
    ):
        _notes(engine.notes)
        _report(bench_prefill(engine, tokens, repeats))


@app.command()
def batch(
    model: Model,
    threads: Threads = None,
    ram: Ram = None,
    share: Annotated[float | None, typer.Option(min=0.001, max=1, help="Of the experts in memory, at most.")] = None,
    size: Annotated[list[int] | None, typer.Option(min=1, help="Sequences at once; several may be given.")] = None,
    tokens: Annotated[int, typer.Option(min=1, help="Tokens per sequence and measurement.")] = 16,
    context: Annotated[int, typer.Option(min=1, help="Tokens before them.")] = 32,
    vocabulary: Annotated[int | None, typer.Option(min=1, help="Draw tokens from so many only: locality.")] = None,
    repeats: Annotated[int, typer.Option(min=1, help="Measurements; best and median are shown.")] = 3,
) -> None:
    """Decode speed of several sequences at once, and what a token costs the drive."""
    sizes = tuple(size or SIZES)
    inspected = inspect_model(model)
    slots = None if share is None else max(1, int(share * inspected.sizes.n_experts))
    config = EngineConfig(model, threads=threads, ram=ram, slots=slots, context=context + tokens, sequences=max(sizes))
    with byte_bar("loading") as progress, Engine(config, progress) as engine:
        plan = engine.plan
        _notes((*engine.notes, f"batch: {plan.n_slots} of {plan.n_experts} experts in memory; best / median of {repeats}"))
        rows = [row.as_dict() for row in bench_batch(engine, sizes, tokens, context, repeats, vocabulary)]
    table = [
        (str(r["size"]), _pair(r["tok_s"], ".2f"), _pair(r["step_ms"], ".1f"), format_bytes(round(r["bytes_per_token"])),
         f"{r['hit_rate']:.0%}")
        for r in rows
    ]  # fmt: skip
    _print(("sequences", "tokens per second", "ms per step", "read per token", "hits"), table)
    about = {"share": plan.share, "context": context, "vocabulary": vocabulary, "repeats": repeats}
    print(json.dumps({"bench": "batch", "model_type": inspected.model_type, **about, "rows": rows}))


@app.command()
def peers(
    shape: Annotated[str, typer.Argument(help=f"One of: {', '.join(SHAPES)}.")],
    layers: Annotated[int | None, typer.Option(min=1, help="Only the first N layers.")] = None,
    threads: Threads = None,
    tokens: Annotated[int, typer.Option(min=2, help="Length of the prompt for prefill.")] = 512,
    decode: Annotated[int, typer.Option(min=1, help="Tokens per decode measurement.")] = 32,
    repeats: Annotated[int, typer.Option(min=1, help="Rounds; each loads both models and measures twice.")] = 3,
    folder: Annotated[
        Path | None, typer.Option("--dir", help="Keep both models here and use them again; else a temporary folder.")
    ] = None,
    peer_python: Annotated[
        Path, typer.Option(help="Python that has llama-cpp-python; the running one by default.", show_default=False)
    ] = Path(sys.executable),
) -> None:
    """Compare with llama.cpp on random weights of one shape, alternating in one run."""
    n = EngineConfig(Path(), threads=threads).n_threads
    Models.of(shape, layers, Path())  # refuses before anything is run or written
    version = peer_version(peer_python)
    temporary = tempfile.TemporaryDirectory(prefix="moeflux-peers-") if folder is None else nullcontext(str(folder))
    with temporary as place:
        models = Models.of(shape, layers, Path(place))
        todo = f"about {format_bytes(models.missing)} to write" if models.missing else "both models are there"
        print(f"{place}: {todo}; 4.5 bits per weight for both", file=sys.stderr)
        with byte_bar("writing") as progress:
            models.write(progress)
        report = bench_peers(models, peer_python, n, tokens, decode, repeats, lambda text: print(text, file=sys.stderr))
    _notes((f"{shape}, {models.layers} layers, {n} threads, head in 4 bits for both; tokens per second, best / median",))
    rows = [row.as_dict() for row in report.rows]
    table = [
        (r["kind"], _pair(r["ours_tok_s"], ".2f"), _pair(r["llama_cpp_tok_s"], ".2f"), _pair(r["ratio"], ".2f"))
        for r in rows
    ]
    _print(("", "moeflux", "llama.cpp", "ratio"), table)
    _notes((report.warning,) if report.warning else ())
    about = {"shape": shape, "layers": models.layers, "threads": n, "tokens": tokens, "decode": decode, "rounds": repeats}
    versions = {"moeflux": moeflux.__version__, "llama_cpp_python": version["version"], "system": version["system"]}
    print(json.dumps({"bench": "peers", **about, "versions": versions, "others": report.others, "rows": rows}))


def _report(row: SpeedRow) -> None:
    d = row.as_dict()
    title = f"{row.kind}: {row.model_type}, {row.layers} layers, {row.threads} threads, {row.isa}; best / median"
    print(title, file=sys.stderr)
    table = [
        ("tokens per second", _pair(d["tok_s"], ".2f")),
        ("weights touched per token", format_bytes(row.bytes_per_token)),
        ("state touched per token", format_bytes(row.state_bytes_per_token)),
        ("weights per second", f"{_pair(d['gb_s'], '.1f')} GB"),
        ("memory read, same run", f"{_pair(d['read_gb_s'], '.1f')} GB/s"),
        ("share of the bandwidth", _pair(d["share_of_read"], ".0%")),
        ("  of it for weights", _pair(d["share_of_read_weights_only"], ".0%")),
        ("share of the int8 rate", _pair(d["share_of_multiply"], ".1%")),
        ("Python's share of the time", f"{row.python_share:.1%}"),
    ]
    if row.kind == "prefill":  # weights are used for many tokens at a time, so bytes say nothing
        table = [table[0], *table[-2:]]
    _print(("", ""), table)
    print(json.dumps(d))


def _notes(notes: Sequence[str]) -> None:
    for note in notes:
        print(note, file=sys.stderr)


def _pair(values: Sequence[float], spec: str) -> str:
    return " / ".join(format(value, spec) for value in values)


def _print(headings: Sequence[str], rows: Sequence[Sequence[Any]]) -> None:
    table = Table(*headings, box=None, pad_edge=False, show_header=any(headings))
    for row in rows:
        table.add_row(*row)
    console = Console(highlight=False)
    console.width = max(console.width, 120)  # a pipe has no width, and wrapped numbers are hard to read
    console.print(table)
