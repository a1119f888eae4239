"""What generate and chat say around an answer: one line before, one after, both on stderr."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from moeflux.api import Engine, load
from moeflux.cli.progress import byte_bar
from moeflux.core.config import TextUse
from moeflux.core.units import format_bytes
from moeflux.session.demo import demo_model
from moeflux.session.events import Finish


@contextmanager
def opened(
    model: Path | None,
    backend: str,
    threads: int | None,
    ram: str | None,
    context: int | None,
    isa: str,
    slots: int | None,
    text: TextUse,
) -> Iterator[Engine]:
    """The model, or the demo model where none was named, and the opening line. `text`: what memory is kept for."""
    folder = demo_model() if model is None else model
    with byte_bar("loading") as progress:
        options: dict[str, Any] = {
            "threads": threads,
            "ram": ram,
            "context": context,
            "isa": isa,
            "slots": slots,
            "text": text,
        }
        engine = load(folder, backend=backend, **options, progress=progress)
    with engine:
        for note in engine.notes:
            say(note)
        say(opening("the demo model (name a model folder to use another)" if model is None else str(model), engine))
        yield engine


def opening(name: str, engine: Engine) -> str:
    plan, config = engine.plan, engine.config
    if config.resolved_backend == "numpy":
        return f"{name}: {engine.spec.model_type}, numpy backend"
    where = f"{config.resolved_backend} backend ({getattr(engine.model.ops, 'isa', '')})"
    if plan.resident:
        tiers = f"all {plan.n_experts:,} experts in memory"
    else:
        tiers = f"{plan.n_slots:,} of {plan.n_experts:,} experts in memory ({plan.share:.0%}), the others on disk"
    return f"{name}: {engine.spec.model_type}, {where}, {config.n_threads} threads, {format_bytes(plan.budget)}: {tiers}"


def closing(finish: Finish, drive_bytes_s: float | None) -> str:
    usage, timings, store = finish.usage, finish.timings, finish.store
    if not usage.completion:
        return "stopped before the first token" if finish.reason == "cancelled" else "no tokens: the text ended at once"
    words = [f"{usage.completion} token{'s' if usage.completion > 1 else ''}"]
    if speed := timings.tok_s(usage):
        words.append(f"{speed:,.0f} tok/s" if speed >= 100 else f"{speed:.3g} tok/s")
    words.append(f"first after {timings.first:.2f} s")
    words.append(f"{store.hit_rate:.0%} of experts found in memory")
    words.append(f"{format_bytes(store.bytes_read)} read")
    if share := finish.drive_share(drive_bytes_s):
        words[-1] += f" ({share:.0%} of the drive's limit)"
    ends = {"length": "cut at its limit", "cancelled": "stopped", "stop_sequence": f"stop {finish.stop_sequence!r}"}
    if finish.reason in ends:
        words.append(ends[finish.reason])
    return ", ".join(words)


def say(line: str) -> None:
    print(dim(line), file=sys.stderr, flush=True)


def dim(text: str) -> str:
    return f"\x1b[2m{text}\x1b[0m" if colours(sys.stderr) else text


def colours(stream: object) -> bool:
    """Only for people: not in pipes, and not where NO_COLOR or a dumb terminal asks for none."""
    is_terminal = bool(getattr(stream, "isatty", lambda: False)())
    return is_terminal and not os.environ.get("NO_COLOR") and os.environ.get("TERM") != "dumb"


@contextmanager
def interrupts(cancel: Callable[[], None]) -> Iterator[None]:
    """Ctrl-C stops the answer after the step it is in, so that the sequence stays good."""
    before = signal.signal(signal.SIGINT, lambda *_: cancel())
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)
