"""Which expert makes room for which: the store's own bookkeeping without bytes, for replaying traces.

Every read takes no time here, so a replay tells hits and misses, not speed.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import numpy as np
import numpy.typing as npt

import moeflux._native as _native
from moeflux.core.errors import OptionError

Ids = npt.NDArray[Any] | Iterable[int]  # of any shape, repetitions allowed

UNDER_WAY = 2 * 2**20  # keeps a drive of 2 GB/s busy for a millisecond
POLICIES = ("lru", "lfru")


def layer_floor(n_slots: int, n_layers: int, k: int) -> int:
    """Experts that a layer keeps against all others: one token's, or an even share where those do not all fit."""
    return k if n_slots >= n_layers * k else n_slots // n_layers


def sweep_slots(n_slots: int) -> int:
    """Slots that a prompt's sweep takes from the rest: enough for the drive to go on while a layer is computed."""
    return max(16, min(64, n_slots // 16))


def bytes_under_way(slot_bytes: int) -> int:
    """That are read at a time where only weights are read: more would hold up an expert that is needed now."""
    return max(UNDER_WAY, slot_bytes * 3 // 2)


def check_policy(policy: str) -> None:
    if policy not in POLICIES:
        raise OptionError(f"unknown policy {policy!r}", where="option 'policy'", hint=f"one of {', '.join(POLICIES)}")


class Residency:
    """`floor`: a layer with that many experts or fewer loses none to another layer."""

    def __init__(self, n_layers: int, n_experts: int, n_slots: int, floor: int, policy: str = "lru") -> None:
        check_policy(policy)
        self._native = _native.Replay(n_layers, n_experts, n_slots, floor, policy)

    def access(self, layer: int, ids: Ids, *, sweep: bool = False, swept: Ids = ()) -> list[int]:
        """Ask for these experts at once. Returns those that were not there; now they are, as far as slots go round.

        `sweep`: a prompt does. `swept`: what a prompt asks for besides.
        """
        asked, n_swept = join_swept(ids, sweep, swept)
        return self._native.access(layer, asked, n_swept)

    def hint(self, layer: int, ids: Ids) -> list[int]:
        """Those of the missing experts that found a slot."""
        return self._native.hint(layer, as_ids(ids))

    def next_token(self) -> None:
        self._native.next_token()

    def holds(self, layer: int, expert: int) -> bool:
        return self._native.holds(layer, expert)

    def count(self, layer: int) -> int:
        """Experts of this layer in memory."""
        return self._native.count(layer)

    @property
    def crowded(self) -> bool:
        """Whether the demands of the last token that had any took more than half of the slots."""
        return self._native.crowded

    @property
    def hints_useful(self) -> int:
        """Hinted experts that were asked for before they were evicted."""
        return self._native.useful

    @property
    def hints_wasted(self) -> int:
        return self._native.wasted

    @property
    def evictions(self) -> int:
        return self._native.evictions


def join_swept(ids: Ids, sweep: bool, swept: Ids) -> tuple[npt.NDArray[np.int64], int]:
    """All ids, a prompt's last, and how many of them are a prompt's."""
    asked, more = as_ids(ids), as_ids(swept)
    return np.concatenate([asked.ravel(), more.ravel()]), asked.size * sweep + more.size


def as_ids(ids: Ids) -> npt.NDArray[np.int64]:
    return np.ascontiguousarray(ids if isinstance(ids, np.ndarray) else list(ids), dtype=np.int64)
