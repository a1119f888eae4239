"""What one rendering of a chat template may cost: work, memory and output, counted and not timed.

The same template and messages always end the same way, on a slow machine too. Everything is counted before it is done, and
nothing is given back: memory is the sum of all values that were ever made.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from sys import getsizeof
from typing import Any

WORK, WORK_PER_VALUE = 3_000_000, 20_000  # syntax nodes run, or 16 characters looked at; for each value of the input
MEMORY, MEMORY_PER_BYTE = 64 * 2**20, 128
OUTPUT, OUTPUT_PER_BYTE = 4 * 2**20, 16  # characters
MOST_LEVELS = 200  # of lists and objects in each other
MOST_BITS = 4096  # of a whole number
CHARACTERS = 16  # looked at for one unit of work
ITEM_BYTES = 64  # an item of a list with its text, beyond the text's length


class TemplateLimit(Exception):
    """A template wants more than it may."""


class Meter:
    def __init__(self, given: Any = None) -> None:
        """`given`: the template's input. The more there is, the more may be done with it."""
        self.work, self.memory, self.output = WORK, MEMORY, OUTPUT
        n_values, n_bytes, _ = self.weigh(given, free=True)
        self._most = {
            "work": WORK + WORK_PER_VALUE * n_values,
            "memory": MEMORY + MEMORY_PER_BYTE * n_bytes,
            "output": OUTPUT + OUTPUT_PER_BYTE * n_bytes,
        }
        self.work, self.memory, self.output = self._most.values()

    def run(self, n: int) -> None:
        self.work -= n
        if self.work < 0:
            raise TemplateLimit(f"more than {self._most['work']} steps")

    def look(self, n_characters: int) -> None:
        self.run(1 + n_characters // CHARACTERS)

    def make(self, n_bytes: int) -> None:
        self.memory -= n_bytes
        if self.memory < 0:
            raise TemplateLimit(f"more than {self._most['memory']} bytes of values")
        self.run(1 + n_bytes // (4 * CHARACTERS))

    def write(self, n_characters: int) -> None:
        self.output -= n_characters
        if self.output < 0:
            raise TemplateLimit(f"more than {self._most['output']} characters of output")

    def weigh(self, value: Any, free: bool = False) -> tuple[int, int, int]:
        """Values, bytes and levels of all that hangs on a value; what hangs there twice counts twice. Costs as much work."""
        n_values = n_bytes = n_levels = 0
        level = [value]
        while level:
            n_levels += 1
            if n_levels > MOST_LEVELS:
                raise TemplateLimit(f"more than {MOST_LEVELS} levels of lists")
            inner: list[Any] = []
            for item in level:
                size = getsizeof(item, ITEM_BYTES)
                n_bytes += size
                if not free:
                    self.look(size)
                if isinstance(item, Mapping):
                    inner += item.keys()
                    inner += item.values()
                elif isinstance(item, (list, tuple)):
                    inner += item
                elif isinstance(item, range):
                    n_values += len(item)
                    n_bytes += ITEM_BYTES * len(item)
                    self.run(len(item))
            n_values += len(level)
            level = inner
        return n_values, n_bytes, n_levels

    def each(self, items: Iterator[Any]) -> Iterator[Any]:
        """The same items, counted as they come."""
        for item in items:
            self.run(4)
            yield item


_CURRENT: ContextVar[Meter] = ContextVar("meter")


def meter() -> Meter:
    """Of the rendering that this thread is in."""
    return _CURRENT.get()


@contextmanager
def metered(meter: Meter) -> Iterator[Meter]:
    token = _CURRENT.set(meter)
    try:
        yield meter
    finally:
        _CURRENT.reset(token)
