"""A picture of what a command shows in a terminal: `python docs/record.py OUT.svg COMMAND…`; needs `pip install pyte`.

The command runs in a pseudo-terminal, so it behaves as for a person; what is on the screen at its end is drawn.
"""

from __future__ import annotations

import os
import pty
import re
import subprocess
import sys
from io import StringIO
from itertools import groupby
from pathlib import Path

import pyte
from rich.console import Console
from rich.style import Style
from rich.text import Text

COLUMNS, LINES = 120, 60


def screen_after(command: list[str]) -> pyte.Screen:
    screen = pyte.Screen(COLUMNS, LINES)
    stream = pyte.ByteStream(screen)
    ours, theirs = pty.openpty()
    environment = {**os.environ, "COLUMNS": str(COLUMNS), "LINES": str(LINES), "TERM": "xterm-256color"}
    process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=theirs, stderr=theirs, env=environment)
    os.close(theirs)
    while True:
        try:
            data = os.read(ours, 65536)
        except OSError:  # nobody is left at the other end
            break
        if not data:
            break
        stream.feed(data)
    os.close(ours)
    if process.wait() != 0:
        sys.exit(f"{command[0]} ended with {process.returncode}:\n" + "\n".join(screen.display))
    return screen


def row(screen: pyte.Screen, line: int) -> Text:
    """Characters of one style together, because each piece is placed on its own."""
    text = Text()
    cells = [screen.buffer[line][column] for column in range(COLUMNS)]
    for style, run in groupby(cells, key=style_of):
        text.append("".join(cell.data for cell in run), style)
    text.rstrip()
    return text


def style_of(cell: pyte.screens.Char) -> Style:
    colour = cell.fg if cell.fg != "default" else None
    if colour and len(colour) == 6 and all(c in "0123456789abcdef" for c in colour):
        colour = f"#{colour}"
    return Style(color={"brown": "yellow"}.get(colour, colour) if colour else None, bold=cell.bold)


def main(out: str, *command: str) -> None:
    screen = screen_after(list(command))
    rows = [row(screen, line) for line in range(LINES)]
    while rows and not rows[-1].plain:
        rows.pop()
    console = Console(record=True, width=COLUMNS, file=StringIO(), force_terminal=True, color_system="truecolor")
    console.print(Text.assemble(("$ ", "bold green"), " ".join([Path(command[0]).name, *command[1:]])))
    for text in rows:
        console.print(text)
    svg = console.export_svg(title="moeflux")
    Path(out).write_text(re.sub(r"@font-face \{.*?\}", "", svg, flags=re.DOTALL))  # nothing is fetched to look at it


if __name__ == "__main__":
    main(*sys.argv[1:])
