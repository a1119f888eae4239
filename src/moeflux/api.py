"""The Python interface: `moeflux.load(path)` gives an `Engine` that scores and generates."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Literal

from moeflux.core.config import EngineConfig, Hints, Kv
from moeflux.runtime import engine as runtime
from moeflux.runtime.experts import Progress
from moeflux.session.generate import Token, generate


class Engine(runtime.Engine):
    """An opened model. Close it, or use it in a `with` statement."""

    def generate(self, prompt: str | Sequence[int], *, max_tokens: int) -> Iterator[Token]:
        """Stream the continuation of a text or of token ids."""
        return generate(self, prompt, max_tokens)


def load(
    path: str | Path,
    *,
    backend: str = "auto",
    threads: int | None = None,
    ram: int | str | None = None,
    vram: int | str | None = None,
    context: int | None = None,
    isa: str = "auto",
    kv: Kv = "bf16",
    sequences: int = 1,
    prefixes: int | str = 0,
    hints: Hints = "both",
    policy: str = "lru",
    reader: Literal["native", "python"] = "native",
    slots: int | None = None,
    ring: int = 0,
    progress: Progress | None = None,
) -> Engine:
    """Open a model folder in place. An option that would do nothing is refused with the reason.

    `ram` ("8GiB") is the ceiling for the whole process, by default what is free; `context` the longest sequence that memory
    is kept for, 8192 tokens by default. `engine.plan` says what follows from them.
    `isa` forces an instruction set of the native backend; `progress(done, total)` is told about bytes of experts read.
    `kv`: keys and values are rounded to bf16 when they are computed; "f32" keeps them whole in twice the memory.
    `sequences` that run at the same time, and bytes for `prefixes` whose states are kept, are counted in the plan.

    The others never change a result: `hints` (how later layers' experts are foreseen), `policy` (which expert makes room),
    `reader`, `slots` (experts in memory at most, where that shall be fewer than the budget holds), `ring` (expert dispatches
    in flight, where a backend runs layer by layer).
    """
    options = (hints, policy, reader, slots, ring, kv, sequences, prefixes)
    return Engine(EngineConfig(Path(path), backend, threads, ram, vram, context, isa, *options), progress)
