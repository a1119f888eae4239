"""Drive and memory measured at once: each is read while the other is, and what fails there is heard."""

from __future__ import annotations

import threading

import pytest

from moeflux.bench.limits import AtOnce
from moeflux.core.errors import ReadError

PATIENCE = 20  # seconds until a test gives up


class Memory:
    def __init__(self) -> None:
        self.reading = threading.Event()

    def read_until(self, done: threading.Event) -> float:
        self.reading.set()
        assert done.wait(PATIENCE)
        return 7.0


class Drive:
    def __init__(self, memory: Memory, error: Exception | None = None) -> None:
        self.memory, self.error = memory, error

    def look(self) -> float:
        assert self.memory.reading.wait(PATIENCE)
        if self.error:
            raise self.error
        return 5.0


def test_both_are_read_at_once():
    memory = Memory()
    at_once = AtOnce(memory, Drive(memory))
    at_once.sample()
    at_once.sample()
    assert (at_once.drive.values, at_once.read.values) == ((5.0, 5.0), (7.0, 7.0))


def test_a_drive_that_fails_ends_the_measurement():
    memory = Memory()
    at_once = AtOnce(memory, Drive(memory, ReadError("Input/output error", where="a file")))
    with pytest.raises(ReadError, match="a file"):
        at_once.sample()
    assert at_once.drive.values == ()
