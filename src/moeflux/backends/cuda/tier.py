"""Slots of a pool as the store knows a device: copies and work lie on one stream, so each follows what was asked before."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from moeflux.backends.cuda.pool import ExpertPool
from moeflux.formats.quant import Matrix


class Done:
    """Of what cannot be overtaken: the source was copied when the call returned, the slot is used in the stream's order."""

    done = True

    def wait(self) -> None: ...


class PoolMemory:
    def __init__(self, pool: ExpertPool) -> None:
        self._pool = pool

    @property
    def n_slots(self) -> int:
        return len(self._pool.words)

    def copy_in(self, slot: int, key: tuple[int, int], source: Mapping[str, Matrix]) -> Done:
        self._pool.put(*key, slot, source)
        return Done()

    def join(self, copies: Iterable[Any]) -> None:
        """They are on the stream already."""

    def passed(self) -> Done:
        return Done()
