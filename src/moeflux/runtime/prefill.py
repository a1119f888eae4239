"""A prompt run in chunks of the plan's size, and how far it is."""

from __future__ import annotations

import time
from collections.abc import Callable
from collections.abc import Sequence as Seq
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from moeflux.core.errors import CancelledError
from moeflux.runtime.batch import Segment, Wanted
from moeflux.runtime.cancel import CancelFlag
from moeflux.runtime.good_state import GoodState
from moeflux.runtime.sequence import Sequence

if TYPE_CHECKING:
    from moeflux.runtime.engine import Engine

F32 = npt.NDArray[np.float32]


@dataclass(frozen=True)
class PrefillProgress:
    done: int  # tokens,
    total: int  # of so many
    bytes_read: int  # of experts, so far
    seconds: float

    @property
    def eta_s(self) -> float | None:
        """Seconds that are left at the speed so far."""
        return self.seconds / self.done * (self.total - self.done) if self.done else None


OnPrefill = Callable[[PrefillProgress], None]


def run_prompt(
    engine: Engine, sequence: Sequence, tokens: Seq[int], progress: OnPrefill | None, cancel: CancelFlag | None
) -> F32:
    """Logits [vocab] after the last token. Where it fails or is cancelled, the sequence keeps the whole chunks."""
    good, start, read_before, at = GoodState(sequence), time.perf_counter(), sequence.use.bytes_read, 0

    def tell() -> None:
        if progress:
            read = sequence.use.bytes_read - read_before
            progress(PrefillProgress(at, len(tokens), read, time.perf_counter() - start))

    logits: F32 | None = None
    while at < len(tokens):
        tell()
        if cancel and cancel.is_set:
            raise CancelledError(f"cancelled after {at} of {len(tokens)} tokens")
        chunk = tokens[at : at + engine.plan.chunk_tokens]
        wanted: Wanted = "last" if at + len(chunk) == len(tokens) else "none"
        good.keep(prompt=True)
        try:
            (logits,) = engine.forward(Segment(sequence, chunk, wanted, kind="prompt"), cancel=cancel)
        except CancelledError:
            good.go_back()
            raise CancelledError(f"cancelled after {at} of {len(tokens)} tokens") from None
        except BaseException:
            if not sequence.usable:
                good.go_back()
            raise
        at += len(chunk)
    tell()
    assert logits is not None
    row: F32 = logits[0]
    return row
