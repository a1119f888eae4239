"""`moeflux bench replay TRACE`: what stores of other sizes, policies and predictions would have done."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any

import typer

from moeflux.bench.heat_map import check_plot, draw_heat
from moeflux.bench.replay import bench_replay, measure_heat
from moeflux.cli.options import MOST, check_output, path_of
from moeflux.cli.tables import percent, print_table
from moeflux.cli.terminal import note
from moeflux.core.errors import OptionError


def replay(
    trace: Annotated[Path, typer.Argument(parser=path_of, help="What --trace of `generate` or `bench decode` saved.")],
    slots: Annotated[str, typer.Option(help="Experts in memory, like 1024,2048.")] = "",
    share: Annotated[str, typer.Option(help="Shares of the experts in memory, like 0.25,0.5,0.75 (the default).")] = "",
    policy: Annotated[str, typer.Option(help="lru, lfru or both with a comma.")] = "lru,lfru",
    prediction: Annotated[str, typer.Option(help="none, previous, perfect: some of them with commas.")] = "none,previous",
    warmup: Annotated[int, typer.Option(min=0, help="Steps that are not counted; a prompt is one or a few.")] = 0,
    plot: Annotated[
        Path | None, typer.Option(parser=path_of, help="Draw use and residency of the first row's store here.")
    ] = None,
) -> None:
    """Hits by size, policy and prediction of a recorded routing trace, as if reads took no time."""
    check_output("plot", plot)
    if plot:
        check_plot(plot)
    report = bench_replay(
        trace,
        slots=_list("slots", slots, int),
        shares=_list("share", share, float),
        policies=_list("policy", policy, str),
        predictions=_list("prediction", prediction, str),
        warmup=warmup,
    )
    d = report.as_dict()
    note(
        f"replay: {d['model']}, {d['tokens']} tokens, {d['layers']} layers, {d['n_experts']} experts; "
        f"measured overlap of a layer's experts with the token before: {percent(d['overlap'])}",
        "the store starts empty, and every read takes no time: hits and misses, not speed",
    )
    table = [
        (f"{r['n_slots']} ({r['share']:.0%})", r["policy"], r["prediction"], f"{r['hit_rate']:.1%}",
         f"{r['reads'] / d['counted']:.1f}", *_foreseen(r))
        for r in d["rows"]
    ]  # fmt: skip
    print_table(("slots", "policy", "prediction", "hits", "reads per token", "recall", "precision"), table)
    if plot:
        draw_heat(report, measure_heat(report.trace, report.results[0], warmup), plot)
        note(f"{plot}: use and residency of {report.results[0].n_slots} slots")
    print(json.dumps(d))


def _foreseen(row: dict[str, Any]) -> tuple[str, str]:
    nothing = row["prediction"] == "none"
    return ("-", "-") if nothing else (percent(row["recall"]), percent(row["precision"]))


def _list(name: str, text: str, kind: Callable[[str], Any]) -> list[Any]:
    try:
        values = [kind(part.strip()) for part in text.split(",")] if text else []
    except ValueError as error:
        raise OptionError(f"cannot read {text!r}", where=f"option '--{name}'", hint="numbers with commas") from error
    if kind is int and max(values, default=0) > MOST:
        raise OptionError(f"{max(values)} is too many", where=f"option '--{name}'", hint=f"at most {MOST}")
    return values
