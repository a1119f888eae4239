"""`moeflux doctor [PATH]`: what this machine is, what moeflux will use of it, and what would make it faster."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated

import typer

from moeflux.cli.options import path_of
from moeflux.cli.tables import print_table
from moeflux.core.errors import ReadError
from moeflux.core.units import format_bytes
from moeflux.formats.checkpoint import has_weights
from moeflux.plan.doctor import Diagnosis, diagnose
from moeflux.plan.machine import Gpu


def doctor(
    path: Annotated[
        Path,
        typer.Argument(
            parser=path_of, help="Model whose drive is measured with its experts, or a folder to write a test file in."
        ),
    ] = Path("."),
    as_json: Annotated[bool, typer.Option("--json", help="One JSON object instead of a table.")] = False,
) -> None:
    """Look at this machine: a second or two. Without a model, a file of 256 MiB is written, read and removed."""
    if not os.path.isdir(path):
        raise ReadError("is a file, not a folder" if os.path.exists(path) else "no such folder", where=str(path))
    diagnosis = diagnose(path, is_model=has_weights(path))
    if as_json:
        print(json.dumps(diagnosis.as_dict(), indent=2))
        return
    print_table(("", "", ""), _rows(diagnosis))


def _rows(d: Diagnosis) -> Iterator[tuple[str, str, str]]:
    yield "processor", d.processor.name, f"{d.processor.usable} of {d.processor.cores} cores, {d.processor.isa}"
    yield "memory", format_bytes(d.memory.total), f"{format_bytes(d.memory.free)} free"
    yield "", f"{format_bytes(d.rates.bytes_s)}/s", f"read by {d.rates.threads} threads"
    yield "", f"{d.rates.macs_s / 1e9:,.0f} GMAC/s", "8-bit multiply-adds from registers"
    for gpu in d.gpus:
        yield "GPU", gpu.name, _about(gpu)
    if not d.gpus:
        yield "GPU", "none found", ""
    yield "drive", d.place.file_system, f"{format_bytes(d.place.free)} free at {d.place.folder}"
    if d.drive is None:
        yield "", "", "its speed could not be measured: nothing can be written there"
    else:
        warm = "" if d.drive.cold else "; not cold: some of it came from memory"
        yield "", f"{format_bytes(d.drive.bytes_s)}/s", f"{d.drive.how}{warm}"
    for i, line in enumerate(d.uses):
        yield "moeflux uses" if i == 0 else "", "", line
    for i, line in enumerate(d.faster or ("nothing that shows from here; `moeflux plan MODEL` says what a model needs",)):
        yield "faster with" if i == 0 else "", "", line


def _about(gpu: Gpu) -> str:
    free = f", {format_bytes(gpu.free)} free" if gpu.free is not None else ""
    words = [f"{format_bytes(gpu.memory)}{free}"] if gpu.memory else []
    words += [f"driver {gpu.driver}"] if gpu.driver else []
    return ", ".join([*words, *([f"compute capability {gpu.capability}"] if gpu.capability else [])])
