"""`moeflux bench …`: a table for people, one JSON line last for machines."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer

from moeflux.backends.native.ops import available_isas
from moeflux.bench.io import bench_io
from moeflux.bench.ops import bench_ops
from moeflux.cli.bench_batch import batch
from moeflux.cli.bench_callers import beside, cancel
from moeflux.cli.bench_peers import peers
from moeflux.cli.bench_prefix import prefix
from moeflux.cli.bench_replay import replay
from moeflux.cli.bench_serve import serve
from moeflux.cli.bench_speed import decode, prefill
from moeflux.cli.options import Model, Repeats, Threads, numbers
from moeflux.cli.tables import pair, print_table
from moeflux.cli.terminal import note
from moeflux.core.config import EngineConfig
from moeflux.core.units import format_bytes

app = typer.Typer(help="Measure speed, beside the machine's limits measured in the same run.", no_args_is_help=True)


@app.command()
def ops(
    threads: Threads = None,
    isa: Annotated[
        str, typer.Option(help="auto, avx512_vnni, avx_vnni, avx2 or generic; all: every one of this machine.")
    ] = "auto",
    tokens: Annotated[list[str] | None, typer.Option(help="Per call, such as 1,16,512; may be given again.")] = None,
    repeats: Repeats = 7,
) -> None:
    """Kernels at the shapes of Qwen3.5-35B-A3B, weights streamed from memory."""
    isas = available_isas() if isa == "all" else (isa,)
    n = EngineConfig(Path(), threads=threads, isa=isas[0]).n_threads
    counts = numbers(tokens or ["1"], "option 'tokens'", "number of tokens", most=65536)
    rows = [row.as_dict() for row in bench_ops(n, isas, counts, repeats)]
    table = [
        (r["name"], r["shape"], str(r["tokens"]), r["isa"], pair(r["gb_s"], ".1f"), pair(r["read_gb_s"], ".1f"),
         pair(r["share_of_read"], ".0%"),
         pair(r["gmac_s"], ".0f"), pair(r["share_of_multiply"], ".0%"))
        for r in rows
    ]  # fmt: skip
    note(f"{n} threads; best / median of {repeats}")
    print_table(("kernel", "shape", "tokens", "isa", "GB/s", "read GB/s", "of read", "GMAC/s", "of int8 rate"), table)
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
    note(f"io: {report.model_type}, random experts, {records}; best / median of {repeats}", *report.notes)
    rows = [row.as_dict() for row in report.rows]
    table = [
        ("O_DIRECT" if r["direct"] else "buffered", str(r["n_readers"]), pair(r["gb_s"], ".2f"),
         pair(r["expert_ms"], ".2f"), "cold" if r["cold"] else "NOT COLD")
        for r in rows
    ]  # fmt: skip
    print_table(("reader", "readers", "GB/s", "ms per expert", "page cache"), table)
    print(json.dumps(report.as_dict()))


app.command()(decode)
app.command()(prefill)
app.command()(batch)
app.command()(beside)
app.command()(cancel)
app.command()(prefix)
app.command()(replay)
app.command()(peers)
app.command()(serve)
