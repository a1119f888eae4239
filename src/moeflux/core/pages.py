"""Pages of memory: what a block of some size really takes."""

from __future__ import annotations

PAGE = 4096
HUGE_PAGE = 2 * 2**20


def round_up(n: int, unit: int) -> int:
    return -(-n // unit) * unit


def touched(n: int) -> int:
    """Of a block of so many bytes that is written to: large ones lie on huge pages."""
    return round_up(n, HUGE_PAGE if n >= HUGE_PAGE else PAGE)
