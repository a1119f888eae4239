"""`moeflux synth SHAPE DIR`: a random checkpoint of a published shape, so that speed can be measured without a download."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Annotated

import typer

from moeflux.bench.shapes import SHAPES, published_config
from moeflux.bench.synthetic import write_checkpoint
from moeflux.cli.options import path_of
from moeflux.cli.progress import byte_bar
from moeflux.cli.terminal import note
from moeflux.core.units import format_bytes


def synth(
    shape: Annotated[str, typer.Argument(help=f"One of: {', '.join(SHAPES)}.")],
    folder: Annotated[Path, typer.Argument(parser=path_of, help="Folder to write; it must not exist or be empty.")],
    layers: Annotated[int | None, typer.Option(min=1, help="Only the first N layers.")] = None,
    seed: Annotated[int, typer.Option(min=0, help="Seed of the random weights.")] = 0,
) -> None:
    """Write a random checkpoint of a published shape, affine 4-bit in the MLX layout."""
    start = time.perf_counter()
    with byte_bar("writing") as progress:
        n_bytes = write_checkpoint(published_config(shape, layers), folder, seed, progress)
    seconds = time.perf_counter() - start
    note(
        f"{folder}: {format_bytes(n_bytes)} in {seconds:.1f} s, {format_bytes(n_bytes / seconds)}/s. "
        "The weights are random: good for measuring, not for text."
    )
