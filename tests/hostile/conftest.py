from __future__ import annotations

import resource
import signal
from collections.abc import Iterator
from pathlib import Path
from types import FrameType

import pytest

MAX_SECONDS = 20
MAX_GROWTH = 4 * 2**30


@pytest.fixture(autouse=True)
def bounded() -> Iterator[None]:
    """A file that makes us wait or allocate for ever fails its own test, not the whole run or the machine."""

    def stop(signum: int, frame: FrameType | None) -> None:
        raise AssertionError(f"still running after {MAX_SECONDS} s")

    pages = int(Path("/proc/self/statm").read_text().split()[0])
    limits = resource.getrlimit(resource.RLIMIT_AS)
    resource.setrlimit(resource.RLIMIT_AS, (pages * resource.getpagesize() + MAX_GROWTH, limits[1]))
    before = signal.signal(signal.SIGALRM, stop)
    signal.alarm(MAX_SECONDS)
    yield
    signal.alarm(0)
    signal.signal(signal.SIGALRM, before)
    resource.setrlimit(resource.RLIMIT_AS, limits)
