"""`moeflux bench prefix MODEL`."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Annotated

import typer

from moeflux.bench.prefix import WAYS, bench_prefix
from moeflux.bench.room import make_room
from moeflux.cli.bench_speed import Routing, Share, Slots, check_routing
from moeflux.cli.options import Model, Ram, Threads, check_folder, path_of, read_option
from moeflux.cli.tables import pair, print_table
from moeflux.cli.terminal import note
from moeflux.core.config import EngineConfig
from moeflux.core.errors import OptionError
from moeflux.core.units import format_bytes, parse_bytes


def prefix(
    model: Model,
    threads: Threads = None,
    ram: Ram = None,
    slots: Slots = None,
    share: Share = None,
    routing: Routing = "uniform",
    tokens: Annotated[int, typer.Option(min=2, help="Length of both prompts.")] = 4096,
    shared: Annotated[float, typer.Option(help="Share of the tokens that both begin with.")] = 0.9,
    keep: Annotated[str, typer.Option(help="Memory for states that are kept.")] = "1GiB",
    folder: Annotated[Path | None, typer.Option(parser=path_of, help="Where states are kept on disk meanwhile.")] = None,
    repeats: Annotated[int, typer.Option(min=1, help="Measurements; least and median are shown.")] = 1,
) -> None:
    """Time to the first token of a prompt that begins as an earlier one: computed, from memory, and from disk."""
    n_shared = round(shared * tokens) if math.isfinite(shared) else 0
    if not 0 < n_shared < tokens:
        raise OptionError(f"{shared:g} is no share of {tokens} tokens", where="option 'shared'", hint="above 0 and below 1")
    read_option("keep", keep, parse_bytes)
    check_folder("folder", folder)
    check_routing(routing)
    config = EngineConfig(model, "native", threads, ram, slots=slots, context=tokens + 1, sequences=2, prefixes=keep)
    room = make_room(config, share)
    report = bench_prefix(room.config, tokens, n_shared, repeats, routing, folder, note)
    d = report.as_dict()
    note(f"{d['share']:.0%} of the experts in memory; seconds to the first token, least / median of {repeats}; same bits")
    rows = [
        (way, f"{min(d[f'{way}_s']):.2f} / {report.seconds[way].median:.2f}", str(d[f"{way}_computed"]),
         "" if way == "cold" else pair(d[f"{way}_ratio"], ".1f"))
        for way in WAYS
    ]  # fmt: skip
    print_table(("", "seconds", "tokens computed", "times faster"), rows)
    note(f"states kept in memory: {format_bytes(d['kept_bytes'])}")
    times = {act: f"{1e3 * min(s.values):.1f} / {1e3 * s.median:.1f} ms" for act, s in report.going_back.items()}
    note(f"a checkpoint {times['checkpoint']}, the next token {times['step']}, restoring {times['restore']}")
    about = {"model": str(model.name), "routing": routing}
    print(json.dumps({"bench": "prefix", **about, **d}))
