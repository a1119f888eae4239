"""`moeflux inspect MODEL`: what a model is and how many bytes it moves, from its files or from a bare config.json."""

from __future__ import annotations

import json
from dataclasses import asdict
from typing import Annotated

import typer

from moeflux.cli.options import ModelOrConfig
from moeflux.cli.tables import print_table
from moeflux.cli.terminal import note
from moeflux.core.units import format_bytes, format_count
from moeflux.plan.inspect import Report, inspect_model


def inspect(
    model: ModelOrConfig,
    as_json: Annotated[bool, typer.Option("--json", help="One JSON object instead of a table.")] = False,
) -> None:
    """Show a model's family, shapes and bytes. Loads no weights; works from a bare config.json too."""
    report = inspect_model(model)
    if as_json:
        print(json.dumps(asdict(report) | {"sizes": report.sizes.as_dict()}, indent=2))
        return
    note(*report.notes)
    _print(report)


def _print(report: Report) -> None:
    sizes, shapes = report.sizes, report.shapes
    rows: list[tuple[str, str, str]] = [
        ("model", report.model_type, f"{report.layout} layout" if report.layout else "from config.json alone"),
        ("layers", str(shapes["layers"]), ", ".join(f"{n} {kind}" for kind, n in report.mixers.items())),
        ("hidden, vocabulary", f"{shapes['hidden']}, {shapes['vocab']}", ""),
        (
            "experts",
            f"{shapes['experts']}, top {shapes['k']}",
            f"in {shapes['moe_layers']} layers, width {shapes['expert_width']}",
        ),
        ("parameters", format_count(sizes.total_params), f"{format_count(sizes.active_params)} active per token"),
        ("trunk", format_bytes(sizes.trunk), f"{format_bytes(sizes.trunk_read_per_token)} of it read per token"),
        ("one expert", format_bytes(sizes.expert), sizes.expert_codec),
        ("all experts", format_bytes(sizes.experts), ""),
        ("streamed per token", format_bytes(sizes.streamed_per_token), "at the model's K, with nothing cached"),
        ("state per token", format_bytes(sizes.state_per_token), "in bf16; twice that with kv=f32"),
        ("state per sequence", format_bytes(sizes.state_per_sequence), "f32, whatever the length"),
        ("on a GPU", "as a graph" if report.gpu is None else "block by block", report.gpu or "a token is decoded in one go"),
    ]
    print_table(("", "", ""), rows)
