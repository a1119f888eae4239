"""`--trace FILE`: routing is recorded while a command runs and saved when it ends, however it ends."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from moeflux.cli.terminal import note
from moeflux.runtime.engine import Engine
from moeflux.store.trace import TraceRecorder


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
            note(f"{path}: routing of {len(trace)} tokens")
