"""What a plan means for speed: hit rates, bytes that must move, and the best that drive, memory and arithmetic allow.

Two cases stand for a range. Uniform: every expert is as likely as any other, so a cache that holds at least one token's
working set hits as often as it holds an expert. Local: tokens come back to the same experts, as real text does.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise

from moeflux.core.config import Kv
from moeflux.models.spec import ModelSpec
from moeflux.plan.sizes import Sizes

# Share of the experts in memory and hit rate: what others published about three models (Kimi-Linear, Qwen3.6-35B and a
# 512-expert Qwen) with an LRU cache. An estimate for any other model, and not measured here.
LOCALITY = ((0.0, 0.0), (0.03, 0.13), (0.06, 0.40), (0.12, 0.62), (0.24, 0.82), (0.48, 0.92), (1.0, 1.0))

DRIVE, MEMORY, ARITHMETIC = "drive", "memory", "arithmetic"


@dataclass(frozen=True)
class Rates:
    """What the machine can do per second; None where it is not known."""

    drive: float | None = None  # bytes read
    memory: float | None = None  # bytes read
    macs: float | None = None  # integer multiply-adds


@dataclass(frozen=True)
class Case:
    """One end of the range, for one decoded token."""

    hit_rate: float
    drive_bytes: int  # that must be read for a token
    tok_s: float | None  # at best; None where a rate is missing
    bound: str | None


@dataclass(frozen=True)
class FirstToken:
    """From the prompt to the first token at best, with nothing in the cache yet. Arithmetic counts if its rate is known."""

    prompt: int
    drive_bytes: int
    seconds: float | None
    bound: str | None


@dataclass(frozen=True)
class Forecast:
    uniform: Case
    local: Case
    memory_bytes: int  # read per token: trunk, k experts of each layer, state at half the context
    first_token: FirstToken
    load_seconds: float | None  # trunk, and experts where all of them are resident


def local_hit_rate(share: float) -> float:
    """Between the published points, straight lines."""
    for (low, before), (high, after) in pairwise(LOCALITY):
        if share <= high:
            return before + (after - before) * (share - low) / (high - low)
    return 1.0


def make_forecast(
    spec: ModelSpec,
    sizes: Sizes,
    rates: Rates,
    *,
    n_slots: int,
    resident: bool,
    chunk: int,
    context: int,
    prompt: int,
    kv: Kv = "bf16",
    keep_scales: bool = False,
) -> Forecast:
    share = 1.0 if resident else n_slots / sizes.n_experts
    read = sizes.weights_per_token if keep_scales else sizes.streamed_per_token
    below = n_slots < sizes.working_set  # one token's experts push each other out before they are asked for again
    memory = sizes.trunk_read_per_token + sizes.streamed_per_token
    memory += sizes.kept_per_token(kv) * (context // 2) + 2 * sizes.state_per_sequence
    loaded = sizes.trunk + (sizes.experts if resident else 0)
    return Forecast(
        uniform=_case(read, rates, 0.0 if below and not resident else share, memory),
        local=_case(read, rates, max(share, local_hit_rate(share)), memory),
        memory_bytes=memory,
        first_token=_first_token(spec, sizes, rates, share, resident, chunk, prompt, keep_scales),
        load_seconds=loaded / rates.drive if rates.drive else None,
    )


def _case(read: int, rates: Rates, hit_rate: float, memory: int) -> Case:
    """`read`: bytes of a token's experts that come from the drive where they are not in memory."""
    missing = round(read * (1 - hit_rate))
    seconds, bound = _slowest({DRIVE: _time(missing, rates.drive), MEMORY: _time(memory, rates.memory)})
    return Case(hit_rate, missing, 1 / seconds if seconds else None, bound)


def _first_token(
    spec: ModelSpec, sizes: Sizes, rates: Rates, share: float, resident: bool, chunk: int, prompt: int, keep_scales: bool
) -> FirstToken:
    """Each chunk sweeps over the experts that any of its tokens chose; what is in memory is not read again."""
    macs_per_token = sizes.active_params - spec.hidden * spec.vocab  # but the head, which runs once
    times = {DRIVE: 0.0, MEMORY: 0.0, ARITHMETIC: 0.0}
    total: float | None = 0.0
    read = 0
    for start in range(0, prompt, chunk):
        tokens = min(chunk, prompt - start)
        swept = _swept(spec, sizes, tokens)
        again = (1 - share) * (sizes.weights_per_token / sizes.streamed_per_token if keep_scales else 1)
        missing = 0 if resident else round(swept * (again if start else 1))
        read += missing
        parts = {
            DRIVE: _time(missing, rates.drive),
            MEMORY: _time(sizes.trunk_read_per_token + swept, rates.memory),
            ARITHMETIC: _time(macs_per_token * tokens, rates.macs) if rates.macs else 0.0,
        }
        seconds, _ = _slowest(parts)
        total = None if seconds is None or total is None else total + seconds
        for name, part in parts.items():
            times[name] += part or 0.0
    return FirstToken(prompt, read, total, max(times, key=lambda name: times[name]) if total is not None else None)


def _swept(spec: ModelSpec, sizes: Sizes, tokens: int) -> int:
    """Bytes of the experts that so many tokens choose, if they choose evenly."""
    layers = [moe.router for _, moe in spec.moe_layers()]
    chosen = sum(r.n_experts * (1 - (1 - r.k / r.n_experts) ** tokens) for r in layers)
    return round(sizes.experts * chosen / sizes.n_experts)


def _time(amount: float, rate: float | None) -> float | None:
    return 0.0 if amount == 0 else amount / rate if rate else None


def _slowest(times: dict[str, float | None]) -> tuple[float | None, str | None]:
    """The longest time and whose it is. A rate that is not known may be the slowest, so then nothing is."""
    name = max(times, key=lambda key: times[key] or 0.0)
    return (None, None) if None in times.values() else (times[name], name)
