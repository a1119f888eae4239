"""Sessions for requests, within the bytes that the plan has for sequences.

A conversation whose answer is complete rests here, and its next turn goes on where it stands. Where room is wanted, the one
that rested longest goes; with a prefix store its state is there too.
"""

from __future__ import annotations

from collections.abc import Sequence

from moeflux.runtime.engine import Engine
from moeflux.runtime.snapshot import common_length
from moeflux.session.prefixes import PrefixStore
from moeflux.session.session import Session


class SessionPool:
    """Used by one thread."""

    def __init__(self, engine: Engine, prefixes: PrefixStore | None, most: int) -> None:
        """`most`: sessions in use at once."""
        self._engine, self._prefixes, self._most = engine, prefixes, most
        self._bytes = engine.config.sequences * engine.state_bytes(engine.plan.context)
        self._in_use: dict[Session, int] = {}  # and the bytes that each may grow to
        self._resting: list[Session] = []  # the one that rested longest first

    def take(self, ids: Sequence[int], n_tokens: int) -> Session | None:
        """A session for this text, which may grow to so many tokens; None where there is no room now."""
        if not self.has_room(n_tokens):
            return None
        cost = self._engine.state_bytes(n_tokens)
        session = self._nearest(ids)
        if session is not None:
            self._resting.remove(session)
        self._make_room(cost)
        if session is None:
            session = Session(self._engine, self._prefixes)
            session.sequence.limit_checkpoints(self._engine.config.checkpoints)
        self._in_use[session] = cost
        return session

    def has_room(self, n_tokens: int) -> bool:
        """Whether another may run that grows to so many tokens; those that rest make room."""
        cost = self._engine.state_bytes(n_tokens)
        return len(self._in_use) < self._most and sum(self._in_use.values()) + cost <= self._bytes

    def known(self, ids: Sequence[int]) -> int:
        """Tokens that a resting session would save."""
        return max((_start(session, ids) for session in self._resting), default=0)

    def give_back(self, session: Session, keep: bool = True) -> None:
        """Its request is over. It rests, if its sequence is good."""
        del self._in_use[session]
        if keep and session.sequence.usable and len(session.sequence):
            if self._prefixes is not None:
                session.anchor()
            self._resting.append(session)
            self._make_room(0)

    def clear(self) -> None:
        """Nobody rests any more."""
        self._resting.clear()

    @property
    def n_resting(self) -> int:
        return len(self._resting)

    @property
    def nbytes(self) -> int:
        """Of what is in use and rests. What sessions share counts for each of them."""
        return sum(self._in_use.values()) + sum(session.sequence.nbytes for session in self._resting)

    def _nearest(self, ids: Sequence[int]) -> Session | None:
        """The resting session to go on with. One that would lose tokens of its own is copied from, if there is room."""
        best = max(self._resting, key=lambda session: _start(session, ids), default=None)
        start = 0 if best is None else _start(best, ids)
        if best is None or start == 0:
            return None
        if start < len(best.sequence) and len(self._in_use) + len(self._resting) < self._most:
            snapshot = best.sequence.snapshot_at(start)
            if snapshot is not None:
                copy = Session(self._engine, self._prefixes)
                copy.sequence.limit_checkpoints(self._engine.config.checkpoints)
                copy.sequence.adopt(snapshot)
                self._resting.append(copy)
                return copy
        return best

    def _make_room(self, cost: int) -> None:
        while self._resting and (
            self.nbytes + cost > self._bytes or len(self._in_use) + len(self._resting) + (cost > 0) > self._most
        ):
            self._resting.pop(0)


def _start(session: Session, ids: Sequence[int]) -> int:
    """Where the text could go on from."""
    return session.sequence.nearest(min(len(ids) - 1, common_length(session.sequence.tokens, ids)))
