"""What generate and chat say around an answer: one line before, one after, both on stderr."""

from __future__ import annotations

import signal
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from moeflux.api import Engine, load
from moeflux.cli.progress import PromptBar, byte_bar
from moeflux.cli.terminal import dim, say, show
from moeflux.core.config import TextUse
from moeflux.core.errors import MoefluxError
from moeflux.core.units import format_bytes
from moeflux.session.chat import Answer
from moeflux.session.demo import demo_model
from moeflux.session.events import Finish, Token
from moeflux.session.generate import Generation
from moeflux.text.regions import Text
from moeflux.text.tools import CallEnd


@contextmanager
def opened(model: Path | None, options: dict[str, Any], text: TextUse) -> Iterator[Engine]:
    """The model, or the demo model where none was named, and the opening line.

    `options`: of `load`. `text`: what memory is kept for.
    """
    folder = demo_model() if model is None else model
    with byte_bar("loading") as progress:
        engine = load(folder, **options, text=text, progress=progress)
    with engine:
        for line in engine.notes:
            say(line)
        say(opening("the demo model (name a model folder to use another)" if model is None else str(model), engine))
        yield engine


def opening(name: str, engine: Engine) -> str:
    plan, config = engine.plan, engine.config
    if config.resolved_backend == "numpy":
        return f"{name}: {engine.spec.model_type}, numpy backend"
    if plan.vram is not None:
        there = f"{plan.vram.n_slots:,} of {plan.vram.n_experts:,} experts in {format_bytes(plan.vram.budget)} of its memory"
        return f"{name}: {engine.spec.model_type}, {plan.vram.title}: {there}"
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
    if store.asked:  # a constraint may have left nothing to compute
        words.append(f"{store.hit_rate:.0%} of experts found in memory")
    words.append(f"{format_bytes(store.bytes_read)} read")
    if share := finish.drive_share(drive_bytes_s):
        words[-1] += f" ({share:.0%} of the drive's limit)"
    ends = {
        "length": "cut at its limit",
        "context": "the context is full",
        "cancelled": "stopped",
        "stop_sequence": f"stop {finish.stop_sequence!r}",
    }
    if finish.reason in ends:
        words.append(ends[finish.reason])
    return ", ".join(words)


def follow(stream: Generation | Answer, bar: PromptBar, quiet: bool, lead: str = "") -> list[Token]:
    """Shows tokens as they come, unless `quiet`. However they end, the bar is gone and so is a line that was begun."""
    tokens: list[Token] = []
    try:
        with interrupts(stream.cancel):
            for token in stream:
                if lead and not tokens:
                    bar.close()
                    show(lead)
                tokens.append(token)
                if not quiet:
                    show_token(token)
    except (MoefluxError, KeyboardInterrupt):
        if tokens and not quiet:
            show("\n")
        raise
    finally:
        bar.close()
    if not quiet:
        show("\n")
    return tokens


def show_token(token: Token) -> None:
    """The answer to stdout; reasoning and tool calls are not the answer."""
    for part in token.parts:
        match part:
            case Text(text, "reasoning"):
                print(dim(text), end="", file=sys.stderr, flush=True)
            case Text(text):
                show(text)
            case CallEnd(_, call):
                say(f"\ncalls {call.name}({call.arguments})")


@contextmanager
def interrupts(cancel: Callable[[], None]) -> Iterator[None]:
    """The first Ctrl-C ends the answer where its sequence stays good; a second one raises at once, wherever that is."""
    asked = False

    def stop(*_: object) -> None:
        nonlocal asked
        if asked:
            raise KeyboardInterrupt
        asked = True
        cancel()

    before = signal.signal(signal.SIGINT, stop)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)
