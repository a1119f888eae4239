"""`--trace FILE`: routing is recorded while a command runs and saved when it ends, however it ends."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from moeflux.core.atomic_file import find_target
from moeflux.core.errors import OptionError
from moeflux.runtime.engine import Engine
from moeflux.store.trace import TraceRecorder


def check_trace(path: Path | None) -> None:
    """Before anything is loaded: a place that cannot be written would otherwise be noticed at the very end."""
    if path is None:
        return
    if not path.parent.is_dir() or path.is_dir():
        raise OptionError("is not a file in a folder that exists", where=f"option '--trace', {path}")
    find_target(path)  # refuses devices and pipes


@contextmanager
def tracing(engine: Engine, path: Path | None) -> Iterator[TraceRecorder | None]:
    """An interrupted run keeps what it has seen."""
    if path is None:
        yield None
        return
    recorder = engine.record_routing()
    try:
        yield recorder
    finally:
        trace = recorder.trace()
        if len(trace):
            trace.save(path)
            print(f"{path}: routing of {len(trace)} tokens", file=sys.stderr)
