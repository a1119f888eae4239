"""What the store has done so far, and what it holds now."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class ExpertUse:
    """What some tokens took of the store. Shares of one forward add up to the forward, and forwards to the store."""

    asked: int = 0  # distinct experts
    hits: int = 0  # of them, those that were in memory
    bytes_read: int = 0
    stall_ns: int = 0  # waited for

    @property
    def hit_rate(self) -> float:
        """Share of the experts asked for that were in memory."""
        return self.hits / self.asked if self.asked else 0.0

    def __add__(self, other: ExpertUse) -> ExpertUse:
        return ExpertUse(*(a + b for a, b in zip(self._values(), other._values(), strict=True)))

    def __sub__(self, other: ExpertUse) -> ExpertUse:
        return ExpertUse(*(a - b for a, b in zip(self._values(), other._values(), strict=True)))

    def _values(self) -> tuple[int, int, int, int]:
        """`astuple` copies deeply, which every forward would feel."""
        return self.asked, self.hits, self.bytes_read, self.stall_ns

    def split(self, weights: Sequence[int]) -> list[ExpertUse]:
        """In proportion, so that the shares add up exactly."""
        columns = [_split(value, weights) for value in self._values()]
        return [ExpertUse(*values) for values in zip(*columns, strict=True)]


def _split(value: int, weights: Sequence[int]) -> list[int]:
    total, so_far, shares = sum(weights), 0, []
    for weight in weights:
        shares.append(value * (so_far + weight) // total - value * so_far // total)
        so_far += weight
    return shares


@dataclass(frozen=True)
class StoreStats:
    """Counters only grow; the last four are of now. They add up:

    asked = hits + late + joined + misses
    hints_issued = hints_useful + hints_wasted + hints_cancelled + hints_failed + hints_unused
    """

    acquires: int  # leases
    asked: int  # distinct experts in them
    hits: int  # were in memory
    late: int  # were on their way for a hint
    joined: int  # were on their way for another lease
    misses: int  # had to be read

    hints_issued: int  # got a slot
    hints_dropped: int  # found none
    hints_cancelled: int  # taken back before all bytes were there
    hints_completed: int  # all bytes arrived
    hints_failed: int  # the read failed before anybody asked
    hints_useful: int  # somebody asked in time
    hints_wasted: int  # evicted before anybody asked

    bytes_demand: int  # read, by what they were first wanted for
    bytes_hint: int
    evictions: int
    retries: int  # of reads that the drive had failed
    errors: int  # experts that could not be read
    reads: int  # components read
    stall_ns: int  # that leases were waited for
    read_busy_ns: int  # with at least one read under way
    read_ns: int  # of all reads together

    slots: int
    slots_used: int
    bytes_resident: int
    hints_unused: int  # issued, and neither asked for nor gone yet

    @property
    def bytes_read(self) -> int:
        return self.bytes_demand + self.bytes_hint

    @property
    def hit_rate(self) -> float:
        """Share of the experts asked for that were in memory."""
        return self.use.hit_rate

    @property
    def use(self) -> ExpertUse:
        return ExpertUse(self.asked, self.hits, self.bytes_read, self.stall_ns)

    def since(self, earlier: StoreStats) -> StoreStats:
        """What happened after `earlier`; the gauges are of now."""
        gauges = ("slots", "slots_used", "bytes_resident", "hints_unused")
        values = {name: getattr(self, name) for name in gauges}
        counters = (name for name in self.__dataclass_fields__ if name not in gauges)
        return StoreStats(**values, **{name: getattr(self, name) - getattr(earlier, name) for name in counters})
