"""One mutable timeline of tokens with its state: the owner of every layer's state."""

from __future__ import annotations

from moeflux.backends.ops import Ops
from moeflux.backends.state import LayerState
from moeflux.core.config import Kv
from moeflux.core.errors import StateError
from moeflux.models.spec import ModelSpec


class Sequence:
    """Grows by `forward`. A run that failed midway leaves it unusable, and it says so rather than give wrong results."""

    def __init__(self, spec: ModelSpec, ops: Ops, kv: Kv = "bf16") -> None:
        self.tokens: list[int] = []
        self.states: tuple[LayerState, ...] = tuple(ops.new_state(layer.mixer, kv) for layer in spec.layers)
        self._broken_by: str | None = None

    def __len__(self) -> int:
        return len(self.tokens)

    @property
    def nbytes(self) -> int:
        return sum(state.nbytes for state in self.states)

    def check_usable(self) -> None:
        if self._broken_by is not None:
            raise StateError(
                f"an earlier run over this sequence failed midway: {self._broken_by}", hint="start a new sequence"
            )

    def mark_broken(self, reason: str) -> None:
        self._broken_by = reason
