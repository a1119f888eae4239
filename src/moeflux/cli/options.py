"""Options that several commands share."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Annotated

import typer

from moeflux.core.errors import OptionError

Ram = Annotated[str | None, typer.Option(help="Ceiling for the memory of the process, like 8GiB; default: what is free.")]
Context = Annotated[int | None, typer.Option(min=1, help="Longest sequence, in tokens; default: 8192, or the model's own.")]
Isa = Annotated[str, typer.Option(help="auto, avx512_vnni, avx2 or generic.")]
Model = Annotated[Path, typer.Argument(help="Model folder.")]
Repeats = Annotated[int, typer.Option(min=1, help="Measurements; best and median are shown.")]
Trace = Annotated[Path | None, typer.Option(help="Save which experts every token chose here, for `bench replay`.")]
Threads = Annotated[int | None, typer.Option(min=1, help="Threads; all cores by default.")]


def read_option(name: str, text: str | None, parse: Callable[[str], int]) -> int | None:
    """An option's value, with the option's name in the error."""
    try:
        return None if text is None else parse(text)
    except OptionError as error:
        error.where = f"option '--{name}'"
        raise
