"""What streaming is measured against: the arithmetic of limits and shares, with numbers that can be checked by hand."""

from __future__ import annotations

import pytest

from moeflux.bench.limits import Samples
from moeflux.bench.streaming import Ceilings, Rates, Streaming, Work, seconds_at_once
from moeflux.bench.watch import Lap
from moeflux.store.stats import StoreStats

GB = 10**9


def stats(**counts) -> StoreStats:
    return StoreStats(**(dict.fromkeys(StoreStats.__dataclass_fields__, 0) | counts))


def lap(seconds=1.0, tokens=10, missing=GB, needed=2 * GB, forwards=10, guesses=(0, 0, 0), **counts) -> Lap:
    each = [(n // forwards,) * forwards if isinstance(n, int) else n for n in (needed, missing)]
    return Lap(tokens, forwards, seconds, 0.9 * seconds, stats(**counts), *each, *guesses)


def streaming(*laps: Lap, drive=(2 * GB,), read=(20 * GB,), multiply=(100 * GB,), macs=0, at_once=None) -> Streaming:
    """`at_once`: drive and memory beside each other; without, as if alone."""
    n = len(laps) + 1
    rates = (drive, read, multiply, *(at_once or (drive, read)))
    samples = [Samples(tuple(values) if len(values) == n else tuple(values) * n) for values in rates]
    work = Work(trunk=GB, state=10**6, macs=macs)
    return Streaming(laps, Ceilings(*samples), work, laps[0], {"n_slots": 5}, True)


def test_the_drive_sets_the_limit():
    """2 GB from a drive of 2 GB/s need a second; 10 trunks, 2 GB of experts and the state 0.6 s from memory at 20 GB/s."""
    found = streaming(lap(missing=2 * GB))
    assert found.bound == "drive"
    assert found.share_of_limit == pytest.approx((1.0, 1.0))
    assert found.limit_tok_s == pytest.approx(10)


def test_memory_sets_the_limit_where_little_is_missing():
    found = streaming(lap(seconds=2.0, missing=GB // 10))
    assert found.bound == "memory"
    assert found.times(found.laps[0], found.ceilings.best)["memory"] == pytest.approx((10 + 2 + 0.01) / 20)
    assert found.share_of_limit[1] == pytest.approx(12.01 / 20 / 2)
    assert found.share_of_drive_limit[1] == pytest.approx(0.05 / 2)


def test_forwards_follow_each_other():
    """One of two needs the drive for a second, the other the memory for 0.05 s: neither can begin before the other ends."""
    found = streaming(lap(seconds=2.0, tokens=2, forwards=2, needed=(0, 0), missing=(2 * GB, 0)))
    assert found.share_of_limit[1] == pytest.approx((1 + 1.001 / 20) / 2)
    assert found.limit_tok_s == pytest.approx(2 / (1 + 1.001 / 20))


def test_arithmetic_counts_for_prompts_alone():
    slow = streaming(lap(missing=0, seconds=4.0), macs=20 * GB)
    assert slow.bound == "arithmetic"
    assert slow.share_of_limit[1] == pytest.approx(10 * 20 / 100 / 4)
    assert "arithmetic" not in streaming(lap()).times(lap(), slow.ceilings.best)


def test_each_lap_is_compared_with_the_rates_around_it():
    """A drive that slows down to a half makes the later laps slower and the limit too: their shares stay."""
    laps = lap(missing=2 * GB), lap(seconds=2.0, missing=2 * GB), lap(seconds=2.0, missing=2 * GB)
    found = streaming(*laps, drive=(3 * GB, GB, GB, GB))
    assert found.share_of_limit[1] == pytest.approx(1.0)
    assert found.share_of_limit[0] == pytest.approx(2 / 3)  # against the best that was seen, none was good


def test_drive_and_memory_at_once():
    """While 2 GB come at 1 GB/s, 2 s, memory gives 20 of 30 GB at 10 GB/s; the rest comes alone at 20 GB/s."""
    rates = Rates(drive=2 * GB, read=20 * GB, multiply=1, drive_at_once=GB, read_at_once=10 * GB)
    assert seconds_at_once(2 * GB, 30 * GB, rates) == pytest.approx(2 + 10 / 20)
    assert seconds_at_once(4 * GB, 30 * GB, rates) == pytest.approx(3 + 1 / 2)  # memory ends first
    assert seconds_at_once(0, 30 * GB, rates) == pytest.approx(1.5)
    better = Rates(drive=2 * GB, read=20 * GB, multiply=1, drive_at_once=3 * GB, read_at_once=30 * GB)
    assert seconds_at_once(2 * GB, 30 * GB, better) == pytest.approx(1.5)  # noise does not make a limit easier


def test_the_limit_at_once_is_never_easier():
    """Ten forwards: 0.2 GB from the drive at 1 GB/s while memory gives 2 of 1.2 GB: memory ends first, after 0.12 s, then
    0.08 GB at 2 GB/s."""
    found = streaming(lap(seconds=2.0, missing=2 * GB), at_once=((GB,), (10 * GB,)))
    assert found.share_of_limit[1] == pytest.approx(0.5)
    memory = (1 + 0.2 + 0.001) / 10
    assert found.share_of_limit_at_once[1] == pytest.approx(10 * (memory + (0.2 - memory) / 2) / 2)
    assert streaming(lap(missing=GB)).share_of_limit_at_once == streaming(lap(missing=GB)).share_of_limit


def test_wasted_reads_are_read_but_not_needed():
    found = streaming(lap(missing=GB, bytes_demand=GB, bytes_hint=3 * GB, read_busy_ns=10**9, stall_ns=250 * 10**6))
    row = found.as_dict()
    assert row["bytes_missing_per_token"] == GB / 10
    assert row["bytes_read_per_token"] == 4 * GB / 10
    assert row["busy_gb_s"] == [4.0, 4.0]
    assert row["share_of_drive"] == [2.0, 2.0]
    assert row["stall_ms_per_token"] == 25
    assert row["share_of_overlap"] == pytest.approx([0.75, 0.75])


def test_rates_of_hits_and_hints():
    found = streaming(
        lap(asked=80, hits=40, misses=30, hints_issued=20, hints_useful=10, guesses=(40, 80, 30)),
        lap(asked=80, hits=60, misses=10, hints_issued=20, hints_useful=20, guesses=(40, 80, 10)),
    )
    row = found.as_dict()
    assert row["hit_rate"] == 100 / 160
    assert row["hint_precision"] == 30 / 40
    assert row["hint_recall"] == 30 / 70
    assert row["guess_precision"] == 0.5
    assert row["guess_recall"] == 0.25
    assert row["store"]["misses"] == 40


def test_nothing_hinted_is_no_number():
    row = streaming(lap(asked=8, hits=8)).as_dict()
    assert row["hint_precision"] is None
    assert row["hint_recall"] is None
