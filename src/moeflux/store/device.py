"""Experts in the slots of a device: a tier above the store's memory, for a host that asks and a device that follows later.

Two things take time there: a copy into a slot, and the last use of what lies in it. Both are tickets. A slot is filled anew
only when the device has passed its last use, and the source of a copy stays as it is until the copy has landed. The expert
that was used longest ago makes room; those that a prompt sweeps over go first.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager
from typing import Any, Protocol

from moeflux.core.errors import OptionError

Key = tuple[int, int]  # layer, expert
SWEEP_SHARE = 8  # a prompt takes one in so many slots from what decoding uses, if it must


class Ticket(Protocol):
    """Something that the device was asked for."""

    @property
    def done(self) -> bool: ...

    def wait(self) -> None: ...


class DeviceMemory(Protocol):
    """Slots of one size in the memory of a device. Backends implement it; matched by shape."""

    @property
    def n_slots(self) -> int: ...

    def copy_in(self, slot: int, key: Key, source: Any) -> Ticket:
        """Begin to copy an expert from host memory. Done: it is in the slot, and the source may change."""

    def join(self, copies: Iterable[Ticket]) -> None:
        """What the device is asked for from now on comes after these copies."""

    def passed(self) -> Ticket:
        """Done when the device has done everything that it was asked for so far."""


class Below(Protocol):
    """A lease of the tier below: experts as they arrive, good until the next are asked for."""

    def arrivals(self, cancel: Any = None) -> Iterable[tuple[Any, Iterable[int]]]:
        """A bank, by expert, and the experts in it."""


Acquire = Callable[[int, list[int], bool], AbstractContextManager[Below]]  # layer, experts, whether a prompt sweeps


class DeviceTier:
    """Which expert is in which slot. Used by one thread."""

    def __init__(self, memory: DeviceMemory, acquire: Acquire) -> None:
        """`acquire`: how experts are leased from the tier below."""
        if memory.n_slots < 1:
            raise OptionError("a device without slots is no tier", where="option 'vram'")
        self._memory, self._acquire = memory, acquire
        self._slots: OrderedDict[Key, int] = OrderedDict()  # the one that makes room first, first
        self._free = list(range(memory.n_slots))[::-1]
        self._uses: dict[int, Ticket] = {}  # by slot: the last use of what lies in it
        self._pinned: set[Key] = set()
        self._swept: set[Key] = set()  # that only prompts used
        self.hits = self.misses = 0

    def holds(self, layer: int, expert: int) -> bool:
        return (layer, expert) in self._slots

    def slot(self, layer: int, expert: int) -> int:
        return self._slots[layer, expert]

    def rounds(self, layer: int, ids: Iterable[int], *, sweep: bool = False, cancel: Any = None) -> Iterator[list[int]]:
        """All these experts, some at a time: those that are in slots at first, then others as they arrive. Whoever asks for
        the next has asked the device for its work with these. `sweep`: a prompt's, which are the first to make room again.
        """
        wanted = sorted(set(ids))
        here = [expert for expert in wanted if self.holds(layer, expert)]
        missing = [expert for expert in wanted if not self.holds(layer, expert)]
        self.hits, self.misses = self.hits + len(here), self.misses + len(missing)
        self._pin((layer, expert) for expert in here)
        try:
            if here:
                yield here
                self._unpin(sweep)
            if missing:
                yield from self._fill(layer, missing, sweep, cancel)
        finally:
            self._unpin(sweep)

    def _fill(self, layer: int, missing: list[int], sweep: bool, cancel: Any) -> Iterator[list[int]]:
        with self._acquire(layer, missing, sweep) as lease:
            for bank, arrived in lease.arrivals(cancel):
                waiting = list(arrived)
                while waiting:
                    n = self._most(sweep)
                    some, waiting = waiting[:n], waiting[n:]
                    copies = self._copy(layer, some, bank, sweep)
                    self._memory.join(copies)
                    try:
                        yield some
                        self._unpin(sweep)
                    finally:
                        for copy in copies:
                            copy.wait()  # the next arrivals take the place of these

    def _most(self, sweep: bool) -> int:
        """Experts at a time: a prompt uses what is free or its own, and a small share where there is less."""
        n_slots = self._memory.n_slots
        return max(1, n_slots // SWEEP_SHARE, len(self._free) + len(self._swept)) if sweep else n_slots

    def _copy(self, layer: int, experts: list[int], bank: Any, sweep: bool) -> list[Ticket]:
        """Begun for all. Where one cannot be, none of them counts as there."""
        copies: list[Ticket] = []
        begun: list[Key] = []
        try:
            for expert in experts:
                key, slot = (layer, expert), self._take_slot()
                self._slots[key] = slot
                begun.append(key)
                if sweep:
                    self._swept.add(key)
                self._pin([key])
                copies.append(self._memory.copy_in(slot, key, bank[expert]))
        except BaseException:
            for copy in copies:
                copy.wait()
            for key in begun:
                self._pinned.discard(key)
                self._swept.discard(key)
                self._free.append(self._slots.pop(key))
            raise
        return copies

    def _take_slot(self) -> int:
        """A free one, or of the expert that makes room first: one that the device has passed, if there is any."""
        if self._free:
            slot = self._free.pop()
        else:
            candidates = [key for key in self._slots if key not in self._pinned]
            candidates = [key for key in candidates if key in self._swept] or candidates
            passed = (key for key in candidates if (use := self._uses.get(self._slots[key])) is None or use.done)
            victim = next(passed, candidates[0])
            slot = self._slots.pop(victim)
            self._swept.discard(victim)
        use = self._uses.pop(slot, None)
        if use is not None:
            use.wait()
        return slot

    def _pin(self, keys: Iterable[Key]) -> None:
        self._pinned.update(keys)

    def _unpin(self, sweep: bool) -> None:
        """Their work has been asked for: they make room when the device has passed it."""
        if not self._pinned:
            return
        use = self._memory.passed()
        for key in self._pinned:
            self._uses[self._slots[key]] = use
            if not sweep:
                self._slots.move_to_end(key)
                self._swept.discard(key)
        self._pinned.clear()
