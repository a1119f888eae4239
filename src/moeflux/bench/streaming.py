"""What streaming cost, and how near it came to the limit for the bytes that had to move.

Those are the experts that a forward asked for and that were not in memory when it began: neither what a wrong hint read nor
what was evicted too early counts as needed. The limit is perfect overlap within a forward: the slowest of the drive reading
them, the memory giving all weights once, and, for a prompt, arithmetic at the full rate of the processor. Forwards follow
each other, because the next token is not known before, so their times add up.

The limit takes each rate as it is while nothing else runs. A second one, at once, takes drive and memory as they are while
both run, as long as both have something to move: what an engine would reach that moves the bytes and computes nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields
from statistics import median
from typing import Any

from moeflux.bench.limits import Samples
from moeflux.bench.watch import Lap

DRIVE, MEMORY, ARITHMETIC = "drive", "memory", "arithmetic"
Times = dict[str, float]  # seconds of a lap that each of them needs


@dataclass(frozen=True)
class Rates:
    """What the machine gives per second."""

    drive: float  # bytes, by as many readers as the engine has
    read: float  # bytes of memory
    multiply: float  # multiply-adds
    drive_at_once: float  # bytes, while memory is read
    read_at_once: float  # bytes of memory, while the drive is read


@dataclass(frozen=True)
class Ceilings:
    """Rates of the same run, before the first lap and after each."""

    drive: Samples
    read: Samples
    multiply: Samples
    drive_at_once: Samples
    read_at_once: Samples

    @property
    def best(self) -> Rates:
        return Rates(*(samples.best for samples in self._all()))

    @property
    def around(self) -> list[Rates]:
        """For each lap, the mean of those just before and after it."""
        return [Rates(*values) for values in zip(*(samples.around for samples in self._all()), strict=True)]

    def _all(self) -> list[Samples]:
        return [getattr(self, field.name) for field in fields(self)]


@dataclass(frozen=True)
class Work:
    """What a lap cannot do without."""

    trunk: int  # bytes of memory read per forward
    state: int  # bytes of memory per token
    macs: int  # per token; 0 where arithmetic does not count


@dataclass(frozen=True)
class Streaming:
    laps: tuple[Lap, ...]
    ceilings: Ceilings
    work: Work
    first: Lap  # from an empty store
    setting: Mapping[str, Any]  # how experts were kept, foreseen and read
    cold: bool

    def times(self, lap: Lap, rates: Rates) -> Times:
        """What perfect overlap would leave, at these rates."""
        memory = lap.forwards * self.work.trunk + lap.needed_bytes + lap.tokens * self.work.state
        times = {DRIVE: lap.missing_bytes / rates.drive, MEMORY: memory / rates.read}
        return times | ({ARITHMETIC: self.work.macs * lap.tokens / rates.multiply} if self.work.macs else {})

    def limit(self, lap: Lap, rates: Rates) -> float:
        """Seconds of a lap with perfect overlap within each forward."""
        arithmetic = self._arithmetic(lap, rates)
        forwards = self._to_move(lap)
        return sum(max(missing / rates.drive, read / rates.read, arithmetic) for missing, read in forwards)

    def limit_at_once(self, lap: Lap, rates: Rates) -> float:
        """The same, with drive and memory as they are beside each other."""
        arithmetic = self._arithmetic(lap, rates)
        return sum(max(seconds_at_once(*both, rates), arithmetic) for both in self._to_move(lap))

    def _to_move(self, lap: Lap) -> list[tuple[float, float]]:
        """For each forward, bytes from the drive and bytes of memory."""
        fixed = self.work.trunk + self._tokens_per_forward(lap) * self.work.state
        return [(missing, fixed + needed) for needed, missing in zip(lap.needed, lap.missing, strict=True)]

    def _arithmetic(self, lap: Lap, rates: Rates) -> float:
        """Seconds of a forward."""
        return self.work.macs * self._tokens_per_forward(lap) / rates.multiply

    def _tokens_per_forward(self, lap: Lap) -> float:
        return lap.tokens / max(1, lap.forwards)

    @property
    def share_of_limit(self) -> tuple[float, float]:
        return self._share(self.limit)

    @property
    def share_of_limit_at_once(self) -> tuple[float, float]:
        return self._share(self.limit_at_once)

    @property
    def share_of_drive_limit(self) -> tuple[float, float]:
        """As if the drive alone took time."""
        return self._share(lambda lap, rates: self.times(lap, rates)[DRIVE])

    @property
    def share_of_overlap(self) -> tuple[float, float]:
        """Against the drive, or all the rest as fast as it ran here without waiting: what better overlap could give."""
        ran = [1 - lap.stats.stall_ns / 1e9 / lap.seconds for lap in self.laps]
        drive = [self.times(lap, rates)[DRIVE] / lap.seconds for lap, rates in self._around()]
        shares = [max(pair) for pair in zip(ran, drive, strict=True)]
        return max(shares), median(shares)

    @property
    def bound(self) -> str:
        """What the limit is made of, in most laps."""
        all_times = [self.times(lap, rates) for lap, rates in self._around()]
        names = [max(times, key=lambda name: times[name]) for times in all_times]
        return max(set(names), key=names.count)

    @property
    def limit_tok_s(self) -> float:
        return median(lap.tokens / self.limit(lap, rates) for lap, rates in self._around())

    @property
    def busy_gb_s(self) -> tuple[float, float]:
        """Of the drive, while something was being read."""
        return _best_median([lap.stats.bytes_read / max(1, lap.stats.read_busy_ns) for lap in self.laps])

    @property
    def overall_gb_s(self) -> tuple[float, float]:
        return _best_median([lap.stats.bytes_read / lap.seconds / 1e9 for lap in self.laps])

    @property
    def share_of_drive(self) -> tuple[float, float]:
        """What was read, useful or not, against what the drive could have read in that time."""
        around = self.ceilings.drive.around
        rates = [lap.stats.bytes_read / lap.seconds for lap in self.laps]
        return max(rates) / self.ceilings.drive.best, median(r / a for r, a in zip(rates, around, strict=True))

    def total(self, of: Callable[[Lap], float]) -> float:
        return sum(map(of, self.laps))

    def ratio(self, part: Callable[[Lap], float], whole: Callable[[Lap], float]) -> float | None:
        """Over all laps; None where there was nothing."""
        n = self.total(whole)
        return self.total(part) / n if n else None

    def per_token(self, of: Callable[[Lap], float]) -> float:
        return self.total(of) / self.total(lambda lap: lap.tokens)

    def as_dict(self) -> dict[str, Any]:
        stats = "hits", "late", "joined", "misses", "asked", "hints_issued", "hints_useful", "hints_wasted", "evictions"
        return {
            **self.setting,
            "cold": self.cold,
            "hit_rate": self.ratio(lambda lap: lap.stats.hits, lambda lap: lap.stats.asked),
            "hint_precision": self.ratio(lambda lap: lap.stats.hints_useful, lambda lap: lap.stats.hints_issued),
            "hint_recall": self.hint_recall,
            "guess_precision": self.ratio(lambda lap: lap.foreseen, lambda lap: lap.guessed),
            "guess_recall": self.ratio(lambda lap: lap.foreseen, lambda lap: lap.asked),
            "bytes_read_per_token": self.per_token(lambda lap: lap.stats.bytes_read),
            "bytes_missing_per_token": self.per_token(lambda lap: lap.missing_bytes),
            "stall_ms_per_token": self.per_token(lambda lap: lap.stats.stall_ns / 1e6),
            "busy_gb_s": list(self.busy_gb_s),
            "overall_gb_s": list(self.overall_gb_s),
            "drive_gb_s": [self.ceilings.drive.best / 1e9, self.ceilings.drive.median / 1e9],
            "share_of_drive": list(self.share_of_drive),
            "limit_tok_s": self.limit_tok_s,
            "bound": self.bound,
            "share_of_limit": list(self.share_of_limit),
            "at_once_gb_s": {
                "drive": [self.ceilings.drive_at_once.best / 1e9, self.ceilings.drive_at_once.median / 1e9],
                "read": [self.ceilings.read_at_once.best / 1e9, self.ceilings.read_at_once.median / 1e9],
            },
            "share_of_limit_at_once": list(self.share_of_limit_at_once),
            "share_of_drive_limit": list(self.share_of_drive_limit),
            "share_of_overlap": list(self.share_of_overlap),
            "first": {"tokens": self.first.tokens, "seconds": self.first.seconds, "bytes": self.first.stats.bytes_read},
            "store": {name: sum(getattr(lap.stats, name) for lap in self.laps) for name in stats},
        }

    @property
    def hint_recall(self) -> float | None:
        """Share of the experts that had to be read whose reads a hint had begun."""
        return self.ratio(lambda lap: lap.stats.hints_useful, lambda lap: lap.stats.hints_useful + lap.stats.misses)

    def _around(self) -> list[tuple[Lap, Rates]]:
        return list(zip(self.laps, self.ceilings.around, strict=True))

    def _share(self, limit: Callable[[Lap, Rates], float]) -> tuple[float, float]:
        """Against the best rates that were seen, the best lap; and the median of the laps, each at the rates around it."""
        best = [limit(lap, self.ceilings.best) / lap.seconds for lap in self.laps]
        return max(best), median(limit(lap, rates) / lap.seconds for lap, rates in self._around())


def seconds_at_once(missing: float, read: float, rates: Rates) -> float:
    """To move so many bytes from the drive and of memory: side by side until one has ended, then the other alone. Never less
    than each alone would need, which noise could make of it."""
    both = min(missing / rates.drive_at_once, read / rates.read_at_once)
    left = (missing - both * rates.drive_at_once) / rates.drive, (read - both * rates.read_at_once) / rates.read
    return max(both + max(left), missing / rates.drive, read / rates.read)


def _best_median(values: list[float]) -> tuple[float, float]:
    return max(values), median(values)
