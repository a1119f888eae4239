"""What people see: talk on stderr, answers on stdout. No text of a model, a file or a client ever steers a terminal."""

from __future__ import annotations

import os
import sys
from typing import TextIO

# Symbols for what would move the cursor, change colours or titles, or turn the direction of writing around.
_SHOWN = {code: chr(0x2400 + code) for code in range(0x20) if chr(code) not in "\n\t"}
_SHOWN[0x7F] = "\u2421"
_SHOWN |= {code: f"\\x{code:02x}" for code in range(0x80, 0xA0)}
_SHOWN |= {code: f"\\u{code:04x}" for code in (0x202D, 0x202E)}


def visible(text: str, stream: TextIO | None = None) -> str:
    """For a terminal, control characters other than a new line and a tab as symbols; elsewhere the text as it is."""
    return text.translate(_SHOWN) if is_terminal(stream or sys.stdout) else text


def is_terminal(stream: object) -> bool:
    return bool(getattr(stream, "isatty", lambda: False)())


def colours(stream: object) -> bool:
    """Only for people: not in pipes, and not where NO_COLOR or a dumb terminal asks for none."""
    return is_terminal(stream) and not os.environ.get("NO_COLOR") and os.environ.get("TERM") != "dumb"


def dim(text: str) -> str:
    text = visible(text, sys.stderr)
    return f"\x1b[2m{text}\x1b[0m" if colours(sys.stderr) else text


def say(line: str) -> None:
    """Beside the answer, and paler."""
    print(dim(line), file=sys.stderr, flush=True)


def note(*lines: str) -> None:
    """As it is: warnings, errors and what measurements are about."""
    for line in lines:
        print(visible(line, sys.stderr), file=sys.stderr, flush=True)


def show(text: str) -> None:
    """Part of an answer, at once."""
    print(visible(text), end="", flush=True)
