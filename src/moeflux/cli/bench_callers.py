"""`moeflux bench beside MODEL` and `moeflux bench cancel MODEL`: several callers on one engine."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Annotated

import typer

from moeflux.api import Engine
from moeflux.bench.beside import bench_beside
from moeflux.bench.cancelling import bench_cancel
from moeflux.bench.room import make_room
from moeflux.cli.bench_speed import Routing, Share, Slots, check_routing
from moeflux.cli.options import Model, Ram, Threads
from moeflux.cli.progress import byte_bar, token_bar
from moeflux.cli.tables import pair, print_table
from moeflux.cli.terminal import note
from moeflux.core.config import EngineConfig


def beside(
    model: Model,
    threads: Threads = None,
    ram: Ram = None,
    slots: Slots = None,
    share: Share = None,
    routing: Routing = "uniform",
    tokens: Annotated[int, typer.Option(min=512, help="Of the prompt.")] = 4096,
    repeats: Annotated[int, typer.Option(min=1, help="Measurements; best and median are shown.")] = 1,
    slices: Annotated[bool, typer.Option(help="Also in slices of 16 tokens, as a comparison.")] = True,
) -> None:
    """A prompt beside one sequence that decodes: how much longer it takes, and what of its rate the other keeps."""
    check_routing(routing)
    config = EngineConfig(model, "native", threads, ram, slots=slots, context=2 * tokens, sequences=2)
    room = make_room(config, share)
    with byte_bar("loading") as loading, Engine(room.config, loading) as engine:
        note(*engine.notes, f"{engine.plan.n_slots} of {engine.plan.n_experts} experts in memory")
        ways = ("turns", "slices") if slices else ("turns",)
        with token_bar("measuring") as progress:
            report = bench_beside(engine, tokens, repeats, routing, ways, progress).as_dict()
        about = {"model_type": engine.spec.model_type, "share": engine.plan.share, "chunk": engine.plan.chunk_tokens}
    prompt, decode = report["prompt_alone_s"], report["decode_alone_tok_s"]
    note(f"alone: the prompt {pair(prompt, '.1f')} s, decoding {pair(decode, '.2f')} tok/s; best / median of {repeats}")
    rows = [(r["way"], pair(r["prompt_times_alone"], ".2f"), pair(r["decode_share"], ".0%")) for r in report["rows"]]
    print_table(("together in", "prompt, times alone", "decoding, share of alone"), rows)
    print(json.dumps({"bench": "beside", **about, "routing": routing, "repeats": repeats, **report}))


def cancel(
    model: Model,
    threads: Threads = None,
    ram: Ram = None,
    slots: Slots = None,
    share: Share = None,
    context: Annotated[int, typer.Option(min=1, help="Tokens that memory is kept for.")] = 8192,
    tokens: Annotated[int, typer.Option(min=1, help="In the chunk, whatever the plan has scratch for.")] = 4096,
    samples: Annotated[int, typer.Option(min=1, help="Forwards that are cancelled.")] = 50,
) -> None:
    """How soon a forward over a chunk of a prompt hears that it is cancelled."""
    room = make_room(EngineConfig(model, "native", threads, ram, slots=slots, context=context), share)
    with byte_bar("loading") as loading, Engine(room.config, loading) as engine:
        note(*engine.notes, f"{engine.plan.n_slots} of {engine.plan.n_experts} experts in memory")
        engine.plan = replace(engine.plan, chunk_tokens=tokens)
        with token_bar("cancelling") as progress:
            r = bench_cancel(engine, samples, progress=progress).as_dict()
        about = {"model_type": engine.spec.model_type, "share": engine.plan.share}
    row = (f"{r['tokens']:,}", f"{r['layer_ms']:.0f}", f"{r['p50_ms']:.1f}", f"{r['p99_ms']:.1f}", f"{r['max_ms']:.1f}")
    print_table(("tokens in the chunk", "ms per layer", "heard after ms, p50", "p99", "at most"), [row])
    print(json.dumps({"bench": "cancel", **about, **r}))
