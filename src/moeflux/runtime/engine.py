"""An opened model: checkpoint, trunk and backend, with sequences run through them. Owns everything it opened."""

from __future__ import annotations

from collections.abc import Sequence as Seq
from pathlib import Path
from types import TracebackType
from typing import Self

import numpy as np
import numpy.typing as npt

from moeflux.backends.ops import Ops
from moeflux.backends.registry import open_backend
from moeflux.core.config import EngineConfig
from moeflux.core.errors import ClosedError
from moeflux.core.log import log
from moeflux.formats.checkpoint import Checkpoint, read_config
from moeflux.models.registry import read_spec
from moeflux.models.spec import ModelSpec
from moeflux.runtime.batch import Batch, Segment, check_tokens
from moeflux.runtime.experts import Experts, Progress
from moeflux.runtime.forward import Model, forward
from moeflux.runtime.ring import Ring
from moeflux.runtime.sequence import Sequence
from moeflux.runtime.trace import Trace
from moeflux.runtime.trunk import load_trunk
from moeflux.store.store import StoreOptions, slot_bytes

F32 = npt.NDArray[np.float32]

CHUNK = 512  # tokens of a prompt that are run together


class Engine:
    """Two engines share nothing; one engine may hold many sequences."""

    def __init__(self, config: EngineConfig, progress: Progress | None = None) -> None:
        self.config = config
        spec = read_spec(read_config(config.model))
        self._checkpoint = Checkpoint(config.model, spec.names)
        try:
            ops = open_backend(config)
            trunk = load_trunk(spec, self._checkpoint, ops)
            experts = _place_experts(spec, self._checkpoint, ops, progress)
        except BaseException:
            self._checkpoint.close()
            raise
        self._model: Model | None = Model(spec, ops, trunk, experts, Ring(config.ring))
        self.notes = skipped_note(self._checkpoint)
        for note in self.notes:
            log.info("%s: %s", config.model, note)

    @property
    def model(self) -> Model:
        if self._model is None:
            raise ClosedError("the engine is closed")
        return self._model

    @property
    def spec(self) -> ModelSpec:
        return self.model.spec

    def sequence(self) -> Sequence:
        """A new, empty sequence."""
        return Sequence(self.spec, self.model.ops)

    def forward(self, *segments: Segment) -> list[F32 | None]:
        """Run a batch. Per segment: the logits that it wants."""
        return forward(self.model, Batch(segments))

    def score(self, ids: Seq[int] | npt.NDArray[np.integer], *, trace: Trace | None = None) -> F32:
        """Logits [T, vocab] of every position, for a sequence of its own."""
        tokens = list(ids)
        check_tokens(tokens, self.spec.vocab)
        sequence = self.sequence()
        logits = np.empty((len(tokens), self.spec.vocab), dtype=np.float32)
        for start in range(0, len(tokens), CHUNK):
            chunk = tokens[start : start + CHUNK]
            (rows,) = self.forward(Segment(sequence, chunk, "all", trace))
            assert rows is not None
            logits[start : start + len(chunk)] = rows
        return logits

    def close(self) -> None:
        """Lets every file and weight go. Closing twice is fine."""
        if self._model is not None:
            self._model.ring.close()
            self._model.experts.close()
        self._model = None
        self._checkpoint.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()


MEMORY_MARGIN = 1.5e9  # left free for state, scratch and everybody else


def _place_experts(spec: ModelSpec, checkpoint: Checkpoint, ops: Ops, progress: Progress | None) -> Experts:
    """All in memory where they fit."""
    tables = [checkpoint.experts(layer) for layer, _ in spec.moe_layers()]
    k = max(moe.router.k for _, moe in spec.moe_layers())
    direct = True
    size = slot_bytes((table.layout for table in tables), direct)
    every = sum(table.n_experts for table in tables)
    n_slots = min(every, int((available_memory() - MEMORY_MARGIN) // size))
    experts = Experts(spec, checkpoint, ops, StoreOptions(n_slots, k, direct=direct))
    if n_slots == every and ops.name != "numpy":
        experts.load_all(progress)
    return experts


def available_memory() -> int:
    """Bytes that can be had without swapping."""
    for line in Path("/proc/meminfo").read_text().splitlines():
        if line.startswith("MemAvailable:"):
            return int(line.split()[1]) * 1024
    return 0


def skipped_note(checkpoint: Checkpoint) -> tuple[str, ...]:
    """One line about what the checkpoint holds and a text model does not need."""
    if not checkpoint.skipped:
        return ()
    kinds = ", ".join(f"{n} {kind} tensor{'s' if n > 1 else ''}" for kind, n in sorted(checkpoint.skipped.items()))
    return (f"skipped {kinds}: not part of the text model",)
