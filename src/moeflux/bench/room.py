"""Memory of a process that measures: a budget for all of it, of which the engine gets what measuring itself leaves.

A share of the experts is turned into the budget that holds it, so that everything else (chunks, readers) is what that budget
gives: a number of slots alone would leave the rest as if memory were plenty.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass, replace
from typing import Any

from moeflux.backends.registry import open_backend
from moeflux.core.config import EngineConfig
from moeflux.core.errors import BudgetError, OptionError
from moeflux.core.pages import PAGE
from moeflux.core.units import format_at_least, format_bytes
from moeflux.formats.checkpoint import Checkpoint, read_config
from moeflux.models.registry import read_spec
from moeflux.models.spec import ModelSpec
from moeflux.plan.memory import default_budget, free_memory, used_at_most, used_now
from moeflux.plan.needs import DEFAULT_CONTEXT, ROUNDING, Needs, Resources
from moeflux.plan.plan import make_plan
from moeflux.plan.probe import DEPTHS
from moeflux.plan.sizes import Sizes, measure

MIB = 2**20
SPARE = 128 * MIB
BUFFER_BYTES = 2**28  # that is read to know how fast memory is


@dataclass(frozen=True)
class Room:
    """`own`: bytes that measuring takes; the engine's budget is the rest."""

    budget: int
    own: int
    config: EngineConfig


@dataclass(frozen=True)
class MemoryUse:
    """What a measurement took, when it is over."""

    budget: int
    planned: int  # by the engine's plan
    own: int  # by measuring
    peak: int  # of the process, since it began

    @property
    def within(self) -> bool:
        return self.peak <= self.budget

    def as_dict(self) -> dict[str, Any]:
        return {**asdict(self), "within": self.within}


def make_room(config: EngineConfig, share: float | None = None) -> Room:
    """`share`: of the experts in memory, instead of `config.slots`. Either makes the budget where `config.ram` is None."""
    spec = read_spec(read_config(config.model))
    checkpoint = Checkpoint(config.model, spec.names)
    try:
        sizes = measure(spec, checkpoint)
    finally:
        checkpoint.close()
    if share is not None:
        if config.slots is not None or not 0 < share <= 1:
            hint = "a share of the experts above 0 and up to 1, or --slots"
            raise OptionError(f"{share:g} cannot be held", where="option 'share'", hint=hint)
        config = replace(config, slots=max(1, round(share * sizes.n_experts)))
    own = BUFFER_BYTES + max(DEPTHS) * (max(map(max, sizes.expert_parts)) + 2 * PAGE)
    free, used = free_memory(), used_now()
    needs = _needs(config, spec, sizes, used)
    if config.ram_bytes is not None:
        budget = config.ram_bytes
    elif config.slots is not None:
        budget = own + _budget_for(config.slots, needs)
    else:
        budget = default_budget(free, used)
    if budget - own < needs.smallest_budget:
        what = f"a budget of {format_bytes(budget)} is too small, of which measuring takes {format_bytes(own)}"
        least = format_at_least(needs.smallest_budget + own)
        raise BudgetError(what, where="memory", hint=f"the smallest that works is {least}")
    if budget > free + used:
        what = f"a budget of {format_bytes(budget)}, but {format_bytes(free + used)} are free"
        raise BudgetError(what, where="memory", hint="a smaller --share or --slots, or --ram")
    return Room(budget, own, replace(config, ram=budget - own, text="none"))


def memory_use(room: Room, planned: int) -> MemoryUse:
    return MemoryUse(room.budget, planned, room.own, used_at_most())


def _needs(config: EngineConfig, spec: ModelSpec, sizes: Sizes, used: int) -> Needs:
    resources = Resources(
        budget=0,
        base=used,
        backend=open_backend(config),
        context=config.context or min(DEFAULT_CONTEXT, spec.context),
        n_readers=max(DEPTHS),
        kv=config.kv,
        sequences=config.sequences,
        prefixes=config.prefix_bytes,
        checkpoints=config.checkpoints,
        scales="streamed",
    )
    return Needs(spec, sizes, resources)


def _budget_for(n_slots: int, needs: Needs) -> int:
    """The smallest that holds so many whole experts, as a little more does too: where chunks get larger, more holds fewer.

    What the process uses when the engine plans differs from now, by at most `SPARE` as has been seen.
    """
    wanted = min(max(n_slots, needs.fewest_slots), needs.sizes.n_experts)

    def holds(budget: int) -> bool:
        return make_plan(needs.spec, needs.sizes, replace(needs.resources, budget=budget)).n_slots >= wanted

    low, high = needs.smallest_budget, needs.resident_budget + ROUNDING
    while high - low > MIB:
        middle = (low + high) // 2
        low, high = (low, middle) if holds(middle) else (middle, high)
    most = needs.resident_budget + ROUNDING
    while high < most and not all(holds(high + more) for more in range(0, SPARE, SPARE // 8)):
        high += SPARE // 8
    return high + ROUNDING
