"""One mutable timeline of tokens with its state: the owner of every layer's state.

It can go back only to where its state is exactly known: anywhere, if every layer's state can be cut; else to the beginning
and to its checkpoints. Anything else is refused with the positions that can be had.
"""

from __future__ import annotations

from moeflux.backends.account import StateAccount
from moeflux.backends.ops import Ops
from moeflux.backends.state import LayerState
from moeflux.core.config import Kv
from moeflux.core.errors import CutError, StateError
from moeflux.models.spec import ModelSpec
from moeflux.runtime.checkpoints import DEFAULT_COUNT, Checkpoints
from moeflux.runtime.snapshot import TOKEN_BYTES, Snapshot, blocks_of, common_length, payload_bytes
from moeflux.store.stats import ExpertUse


class Sequence:
    """Grows by `forward`. A run that failed midway leaves it unusable until it is brought back to a known state."""

    def __init__(self, spec: ModelSpec, ops: Ops, kv: Kv = "bf16", account: StateAccount | None = None) -> None:
        """`account`: where its memory is counted, together with that of others."""
        self._mixers = [layer.mixer for layer in spec.layers]
        self._ops, self._kv = ops, kv
        self._account = StateAccount() if account is None else account
        self.tokens: list[int] = []
        self.states = self._new_states()
        self._checkpoints = Checkpoints()
        self._account.add_giver(self._checkpoints)
        self._broken_by: str | None = None
        self.use = ExpertUse()  # what its tokens took of the expert store, all in all

    def _new_states(self) -> tuple[LayerState, ...]:
        return tuple(self._ops.new_state(mixer, self._kv, self._account) for mixer in self._mixers)

    def __len__(self) -> int:
        return len(self.tokens)

    @property
    def length(self) -> int:
        return len(self.tokens)

    @property
    def nbytes(self) -> int:
        """Of the state, without checkpoints."""
        return sum(state.nbytes for state in self.states)

    def growth_bytes(self, n: int) -> int:
        """What n more tokens would allocate."""
        return sum(rows.growth_bytes(n) for state in self.states for rows in state.rows.values())

    @property
    def usable(self) -> bool:
        return self._broken_by is None

    @property
    def snapshot_bytes(self) -> int:
        """What a file of the state holds, besides a header."""
        return payload_bytes(len(self.tokens), self.states)

    @property
    def cuttable(self) -> bool:
        """Whether it can go back anywhere without a checkpoint."""
        return all(state.cuttable for state in self.states)

    # Going back.

    def clear(self) -> None:
        """Back to the beginning. Checkpoints go too."""
        self.truncate(0)

    def truncate(self, position: int) -> None:
        """Forget all tokens from `position` on, exactly; CutError where that cannot be had. Checkpoints above go."""
        if not 0 <= position <= len(self.tokens):
            raise StateError(f"position {position} is outside of a sequence of {len(self.tokens)} tokens")
        if self.nearest(position) != position:
            raise CutError(position, self._around(position), len(self.tokens))
        if position < len(self.tokens) or self._broken_by is not None:
            self._go_back(position)
        del self.tokens[position:]
        self._checkpoints.drop_above(position)
        self._broken_by = None

    def _go_back(self, position: int) -> None:
        kept = self._checkpoints.get(position)
        if position == 0:
            self.states = self._new_states()
        elif kept is not None:
            self.states = kept.fork()
        else:
            for state in self.states:
                for rows in state.rows.values():
                    rows.cut(position)

    def nearest(self, position: int) -> int:
        """The highest place at or below `position` that can be gone back to."""
        if self.cuttable:
            return min(position, len(self.tokens))
        return max(p for p in self._places() if p <= position)

    def _places(self) -> set[int]:
        here = {len(self.tokens)} if self._broken_by is None else set()
        return {0, *self._checkpoints.positions, *here}

    def _around(self, position: int) -> tuple[int, ...]:
        above = [p for p in self._places() if p > position]
        return (self.nearest(position), *([min(above)] if above else []))

    # Checkpoints.

    @property
    def checkpoints(self) -> tuple[int, ...]:
        """Positions, ascending."""
        return self._checkpoints.positions

    @property
    def checkpoint_bytes(self) -> int:
        """What they cost beside the sequence itself."""
        return self._checkpoints.nbytes(blocks_of(self.states))

    def limit_checkpoints(self, max_count: int = DEFAULT_COUNT, max_bytes: int | None = None) -> None:
        self._checkpoints.limit(max_count, max_bytes, blocks_of(self.states))

    def checkpoint(self) -> Snapshot:
        """Keep the state as it is now, so that the sequence can return here."""
        self.check_usable()
        own_bytes = sum(state.array_bytes for state in self.states) + TOKEN_BYTES * len(self.tokens)
        self._checkpoints.make_room(len(self.tokens), own_bytes, blocks_of(self.states))
        snapshot = self.snapshot()
        self._checkpoints.put(snapshot, blocks_of(self.states))
        return snapshot

    def restore(self, position: int) -> None:
        """Return to a checkpoint, which counts as used; or anywhere, where the state can be cut."""
        self.truncate(position)
        self._checkpoints.get(position)

    def restore_nearest(self, position: int) -> int:
        """Return to the highest place at or below `position` that can be had, at worst 0. Says where that is."""
        place = self.nearest(max(0, min(position, len(self.tokens))))
        self.restore(place)
        return place

    def forget(self, position: int) -> bool:
        """Drop one checkpoint; False where there is none."""
        return self._checkpoints.forget(position)

    # Whole states.

    def snapshot(self) -> Snapshot:
        self.check_usable()
        return Snapshot.of(self.tokens, self.states)

    def snapshot_at(self, position: int) -> Snapshot | None:
        """Of the first tokens, where their state is known: anywhere if it can be cut, else at checkpoints and the end."""
        if position == len(self.tokens) and self.usable:
            return self.snapshot()
        return self.snapshot().cut(position) if self.cuttable and self.usable else self._checkpoints.get(position)

    def adopt(self, snapshot: Snapshot) -> None:
        """Become what the snapshot is of. Checkpoints on the way there stay."""
        common = common_length(self.tokens, snapshot.tokens)
        self.states = snapshot.fork()
        self.tokens = snapshot.tokens.tolist()
        self._checkpoints.drop_above(common)
        self._broken_by = None

    # Failures.

    def check_usable(self) -> None:
        if self._broken_by is not None:
            raise StateError(
                f"an earlier run over this sequence failed midway: {self._broken_by}",
                hint="restore it to a checkpoint, clear it, or start a new sequence",
            )

    def mark_broken(self, reason: str) -> None:
        self._broken_by = reason
