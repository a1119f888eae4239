"""One step: the runner advances every sequence of a batch, and what it gives is divided among the segments."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from moeflux.backends.base import Runner
from moeflux.backends.ops import Ops
from moeflux.models.spec import ModelSpec
from moeflux.runtime.batch import Batch
from moeflux.runtime.experts import Experts
from moeflux.runtime.trunk import Trunk
from moeflux.store.cancel import CancelFlag

F32 = npt.NDArray[np.float32]


@dataclass(frozen=True)
class Weights:
    """An open model as a backend gets it, to make a runner of it."""

    spec: ModelSpec
    trunk: Trunk
    experts: Experts


@dataclass(frozen=True)
class Model:
    """What a forward needs."""

    spec: ModelSpec
    ops: Ops
    trunk: Trunk
    experts: Experts
    runner: Runner


def forward(model: Model, batch: Batch, cancel: CancelFlag | None = None) -> list[F32 | None]:
    """Advance every sequence of the batch by its tokens. Per segment: logits [wanted rows, vocab], or None."""
    batch.check(model.spec.vocab)
    if cancel:
        cancel.check()
    try:
        with np.errstate(over="ignore", invalid="ignore"):  # what overflows is caught by the runner
            logits = model.runner.run(batch, cancel)
    except BaseException as error:
        model.runner.discard()
        for segment in batch.segments:
            segment.sequence.mark_broken(f"{type(error).__name__}: {error}")
        raise
    for segment in batch.segments:
        segment.sequence.tokens += [int(token) for token in segment.tokens]
    return _split(logits, batch)


def _split(logits: F32 | None, batch: Batch) -> list[F32 | None]:
    result: list[F32 | None] = []
    at = 0
    for segment in batch.segments:
        n = segment.n_returned
        result.append(logits[at : at + n] if n and logits is not None else None)
        at += n
    return result
