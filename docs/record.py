"""A picture of what a command shows in a terminal: `python docs/record.py OUT.svg COMMAND…`; needs `pip install pyte`.

The command runs in a pseudo-terminal, so it behaves as for a person; what is on the screen at its end is drawn.
"""

from __future__ import annotations

import os
import pty
import subprocess
import sys
from io import StringIO
from pathlib import Path

import pyte
from rich.console import Console
from rich.style import Style
from rich.text import Text

COLUMNS, LINES = 110, 60


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
    text = Text()
    for column in range(COLUMNS):
        cell = screen.buffer[line][column]
        colour = cell.fg if cell.fg != "default" else None
        if colour and len(colour) == 6 and all(c in "0123456789abcdef" for c in colour):
            colour = f"#{colour}"
        elif colour:
            colour = {"brown": "yellow"}.get(colour, colour)
        text.append(cell.data, Style(color=colour, bold=cell.bold))
    text.rstrip()
    return text


def main(out: str, *command: str) -> None:
    screen = screen_after(list(command))
    rows = [row(screen, line) for line in range(LINES)]
    while rows and not rows[-1].plain:
        rows.pop()
    console = Console(record=True, width=COLUMNS, file=StringIO(), force_terminal=True, color_system="truecolor")
    console.print(Text.assemble(("$ ", "bold green"), " ".join([Path(command[0]).name, *command[1:]])))
    for text in rows:
        console.print(text)
    console.save_svg(out, title="moeflux")


if __name__ == "__main__":
    main(*sys.argv[1:])
