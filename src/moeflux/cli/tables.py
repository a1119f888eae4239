"""Tables on stdout."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from rich.console import Console
from rich.table import Table
from rich.text import Text

from moeflux.cli.terminal import visible


def pair(values: Sequence[float], spec: str) -> str:
    """Best and median."""
    return " / ".join(format(value, spec) for value in values)


def percent(value: float | None) -> str:
    return "-" if value is None else f"{value:.0%}"


def print_table(headings: Sequence[str], rows: Iterable[Sequence[str]], numbers: bool = False) -> None:
    """`numbers`: columns but the first are flush right. In a cell nothing is markup, and nothing steers a terminal."""
    table = Table(box=None, pad_edge=False, show_header=any(headings))
    for i, heading in enumerate(headings):
        table.add_column(heading, justify="right" if numbers and i else "left", no_wrap=numbers)
    for row in rows:
        table.add_row(*(Text(visible(cell)) for cell in row))
    console = Console(highlight=False)
    console.width = max(console.width, 120)  # a pipe has no width, and wrapped numbers are hard to read
    console.print(table)
