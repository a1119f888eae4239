"""`moeflux bench decode MODEL` and `moeflux bench prefill MODEL`."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated, Any

import typer

from moeflux.api import Engine
from moeflux.bench.room import MemoryUse, make_room
from moeflux.bench.routing import TokenStream
from moeflux.bench.speed import WARM_UP, SpeedRow, bench_decode, bench_prefill
from moeflux.bench.streaming import Streaming
from moeflux.cli.options import Isa, Model, Ram, Repeats, Threads, Trace, check_output
from moeflux.cli.progress import byte_bar
from moeflux.cli.tables import pair, percent, print_table
from moeflux.cli.terminal import note
from moeflux.cli.tracing import tracing
from moeflux.core.config import EngineConfig
from moeflux.core.units import format_bytes

Slots = Annotated[int | None, typer.Option(min=1, help="Experts in memory at most; makes the budget if --ram is not given.")]
Share = Annotated[float | None, typer.Option(help="Share of the experts in memory, like 0.5, instead of --slots.")]
Hints = Annotated[str, typer.Option(help="How experts are foreseen: none, previous, lookahead or both.")]
Policy = Annotated[str, typer.Option(help="Which expert makes room: lru or lfru.")]
Reader = Annotated[str, typer.Option(help="native or python.")]
Scales = Annotated[str, typer.Option(help="Of all experts: kept in memory, streamed with each expert, or auto.")]
Routing = Annotated[
    str, typer.Option(help="Tokens: uniform (any expert alike), or local (topics of a synthetic checkpoint).")
]
Line = tuple[str, str]


def decode(
    model: Model,
    threads: Threads = None,
    isa: Isa = "auto",
    ram: Ram = None,
    slots: Slots = None,
    share: Share = None,
    hints: Hints = "both",
    policy: Policy = "lfru",
    reader: Reader = "native",
    scales: Scales = "auto",
    routing: Routing = "uniform",
    tokens: Annotated[int, typer.Option(min=1, help="Tokens per measurement.")] = 16,
    context: Annotated[int, typer.Option(min=1, help="Tokens before them.")] = 32,
    repeats: Repeats = 5,
    trace: Trace = None,
) -> None:
    """Decode speed, token by token; cold where experts are streamed."""
    check_output("trace", trace)
    check_routing(routing)
    n = context + max(WARM_UP, tokens) + tokens * repeats
    kept = {"ram": ram, "slots": slots, "hints": hints, "policy": policy, "reader": reader, "scales": scales}
    room = make_room(_config(model, context=n, threads=threads, isa=isa, **kept), share)
    with byte_bar("loading") as progress, Engine(room.config, progress) as engine:
        note(*engine.notes)
        with tracing(engine, trace) as recorder:
            row = bench_decode(engine, tokens, context, repeats, routing=routing, recorder=recorder, room=room)
    _report(row, repeats)


def prefill(
    model: Model,
    threads: Threads = None,
    isa: Isa = "auto",
    ram: Ram = None,
    slots: Slots = None,
    share: Share = None,
    policy: Policy = "lfru",
    reader: Reader = "native",
    scales: Scales = "auto",
    routing: Routing = "uniform",
    tokens: Annotated[int, typer.Option(min=2, help="Length of the prompt.")] = 512,
    repeats: Repeats = 5,
) -> None:
    """Prefill speed of a whole prompt; cold where experts are streamed."""
    check_routing(routing)
    kept = {"ram": ram, "slots": slots, "policy": policy, "reader": reader, "scales": scales}
    room = make_room(_config(model, context=tokens, threads=threads, isa=isa, **kept), share)
    with byte_bar("loading") as progress, Engine(room.config, progress) as engine:
        note(*engine.notes)
        row = bench_prefill(engine, tokens, repeats, routing=routing, room=room)
    _report(row, repeats)


def check_routing(routing: str) -> None:
    """Before anything is loaded."""
    TokenStream(routing, 1)


def _config(model: Path, **options: Any) -> EngineConfig:
    return EngineConfig(model, "native", **options)  # which checks them


def _report(row: SpeedRow, repeats: int) -> None:
    d = row.as_dict()
    note(f"{row.kind}: {row.model_type}, {row.layers} layers, {row.threads} threads, {row.isa}; best / median of {repeats}")
    if row.streaming:
        note(_how_cold(row.streaming))
    lines = [("tokens per second", pair(d["tok_s"], ".2f"))]
    lines += _streamed(row, row.streaming) if row.streaming else []
    lines += _touched(d) if row.kind == "decode" else []  # of a prompt, weights are used for many tokens at a time
    lines += [
        ("share of the int8 rate", pair(d["share_of_multiply"], ".1%")),
        ("Python's share of the time", f"{row.python_share:.1%}"),
        ("routing", _routing(row)),
    ]
    lines += [("peak memory", _memory(row.memory))] if row.memory else []
    print_table(("", ""), lines)
    print(json.dumps(d))


def _how_cold(streaming: Streaming) -> str:
    how = "read past the page cache" if streaming.setting["direct"] else "dropped from the page cache before every repeat"
    warning = "" if streaming.cold else "; NOT COLD: some were still in the page cache"
    return f"cold: the expert store was empty when the process began, and experts are {how}{warning}"


def _touched(d: dict[str, Any]) -> list[Line]:
    return [
        ("weights touched per token", format_bytes(d["bytes_per_token"])),
        ("state touched per token", format_bytes(d["state_bytes_per_token"])),
        ("weights per second", f"{pair(d['gb_s'], '.1f')} GB"),
        ("memory read, same run", f"{pair(d['read_gb_s'], '.1f')} GB/s"),
        ("share of the bandwidth", pair(d["share_of_read"], ".0%")),
        ("  of it for weights", pair(d["share_of_read_weights_only"], ".0%")),
    ]


def _streamed(row: SpeedRow, streaming: Streaming) -> list[Line]:
    s = streaming.as_dict()
    first = f"{s['first']['seconds']:.2f} s for {s['first']['tokens']} tokens, {format_bytes(s['first']['bytes'])} read"
    readers = f"{s['n_readers']} readers, {'O_DIRECT' if s['direct'] else 'buffered'}"
    guesses = f"{percent(s['guess_precision'])} right, {percent(s['guess_recall'])} of all; {s['hint_width']} per layer now"
    hints = f"{percent(s['hint_precision'])} precision, {percent(s['hint_recall'])} of the reads ({s['hints']})"
    scales = "; and the scales of all" if s["keep_scales"] else ""
    decode = [("hints", hints), ("  routers' guesses", guesses)]
    return [
        *(_decode_limit(s) if row.kind == "decode" else _prefill_limit(s)),
        (
            "experts in memory",
            f"{s['n_slots']} of {s['n_experts']} ({s['n_slots'] / s['n_experts']:.0%}), {s['policy']}{scales}",
        ),
        ("hit rate", percent(s["hit_rate"])),
        ("had to be read per token", format_bytes(s["bytes_missing_per_token"])),
        ("was read per token", format_bytes(s["bytes_read_per_token"])),
        *(decode if row.kind == "decode" else [("chunks of the prompt", f"{s['chunk_tokens']} tokens")]),
        ("waited for experts", f"{s['stall_ms_per_token']:.2f} ms per token"),
        ("drive, while busy", f"{pair(s['busy_gb_s'], '.2f')} GB/s"),
        ("drive, overall", f"{pair(s['overall_gb_s'], '.2f')} GB/s"),
        ("drive's ceiling, same run", f"{pair(s['drive_gb_s'], '.2f')} GB/s ({readers})"),
        ("share of the ceiling", pair(s["share_of_drive"], ".0%")),
        ("first prompt, store empty", first),
    ]


def _decode_limit(s: dict[str, Any]) -> list[Line]:
    return [
        ("I/O-only limit", f"{s['limit_tok_s']:.2f} tokens per second, set by the {s['bound']}"),
        ("share of the I/O-only limit", pair(s["share_of_limit"], ".0%")),
        _at_once(s),
    ]


def _at_once(s: dict[str, Any]) -> Line:
    gb_s = s["at_once_gb_s"]
    rates = f"drive {pair(gb_s['drive'], '.2f')} GB/s while memory gives {pair(gb_s['read'], '.1f')}"
    return "  with both at once", f"{pair(s['share_of_limit_at_once'], '.0%')}: {rates}"


def _prefill_limit(s: dict[str, Any]) -> list[Line]:
    return [
        ("sweep limit", f"{s['limit_tok_s']:.1f} tokens per second, set by the {s['bound']}"),
        ("share of the sweep limit", f"{pair(s['share_of_limit'], '.0%')}: the slowest of drive, memory and int8 rate"),
        _at_once(s),
        ("  of the drive alone", pair(s["share_of_drive_limit"], ".0%")),
        ("  with arithmetic as it ran", f"{pair(s['share_of_overlap'], '.0%')}: what better overlap could still give"),
    ]


def _routing(row: SpeedRow) -> str:
    if row.overlap is None:
        return f"{row.routing} tokens"
    return f"{row.routing} tokens; measured overlap of a layer's experts with the token before: {row.overlap:.1%}"


def _memory(use: MemoryUse) -> str:
    parts = f"planned {format_bytes(use.planned)} and {format_bytes(use.own)} for measuring"
    verdict = "" if use.within else "  ABOVE THE BUDGET"
    return f"{format_bytes(use.peak)} of a budget of {format_bytes(use.budget)}{verdict}; {parts}"
