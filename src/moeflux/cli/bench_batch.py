"""`moeflux bench batch MODEL`."""

from __future__ import annotations

import json
from typing import Annotated

import typer

from moeflux.api import Engine
from moeflux.bench.batch import SIZES, bench_batch
from moeflux.bench.room import make_room
from moeflux.cli.bench_speed import Routing, Share, Slots, check_routing
from moeflux.cli.options import Model, Ram, Threads, numbers
from moeflux.cli.progress import byte_bar
from moeflux.cli.tables import pair, print_table
from moeflux.cli.terminal import note
from moeflux.core.config import EngineConfig
from moeflux.core.units import format_bytes


def batch(
    model: Model,
    threads: Threads = None,
    ram: Ram = None,
    slots: Slots = None,
    share: Share = None,
    routing: Routing = "uniform",
    together: Annotated[bool, typer.Option(help="With local routing: all sequences are about the same at a time.")] = False,
    size: Annotated[list[str] | None, typer.Option(help="Sequences at once, such as 1,4,16; may be given again.")] = None,
    tokens: Annotated[int, typer.Option(min=1, help="Tokens per sequence and measurement.")] = 16,
    context: Annotated[int, typer.Option(min=1, help="Tokens before them.")] = 32,
    repeats: Annotated[int, typer.Option(min=1, help="Measurements; best and median are shown.")] = 3,
) -> None:
    """Decode speed of several sequences at once, and what a token costs the drive."""
    sizes = numbers(size, "option 'size'", "number of sequences") if size else SIZES
    check_routing(routing)
    config = EngineConfig(model, threads=threads, ram=ram, slots=slots, context=context + tokens, sequences=max(sizes))
    room = make_room(config, share)
    with byte_bar("loading") as progress, Engine(room.config, progress) as engine:
        plan = engine.plan
        note(*engine.notes, f"{plan.n_slots} of {plan.n_experts} experts in memory; best / median of {repeats}")
        rows = [row.as_dict() for row in bench_batch(engine, sizes, tokens, context, repeats, routing, together)]
        about = {
            "model_type": engine.spec.model_type,
            "share": plan.share,
            "context": context,
            "routing": routing,
            "together": together,
        }

    table = [
        (str(r["size"]), pair(r["tok_s"], ".2f"), pair(r["speed_up"] or (), ".2f"), pair(r["step_ms"], ".1f"),
         f"{r['asked_per_step']:.0f}", f"{r['hit_rate']:.0%}", format_bytes(round(r["bytes_per_token"])))
        for r in rows
    ]  # fmt: skip
    titles = ("sequences", "tokens per second", "times one", "ms per step", "experts per step", "hits", "read per token")
    print_table(titles, table)
    print(json.dumps({"bench": "batch", **about, "repeats": repeats, "rows": rows}))
