"""Tables on stdout and notes on stderr, as the measuring commands print them."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Any

from rich.console import Console
from rich.table import Table


def print_notes(*notes: str) -> None:
    for note in notes:
        print(note, file=sys.stderr)


def pair(values: Sequence[float], spec: str) -> str:
    """Best and median."""
    return " / ".join(format(value, spec) for value in values)


def percent(value: float | None) -> str:
    return "-" if value is None else f"{value:.0%}"


def print_table(headings: Sequence[str], rows: Sequence[Sequence[Any]]) -> None:
    table = Table(*headings, box=None, pad_edge=False, show_header=any(headings))
    for row in rows:
        table.add_row(*row)
    console = Console(highlight=False)
    console.width = max(console.width, 120)  # a pipe has no width, and wrapped numbers are hard to read
    console.print(table)
