"""Byte arithmetic before anything loads: what a budget holds, where it ends, and what that means for speed.

Pure: the same numbers give the same plan. What a process may use is taken in this order: what it uses already, trunk, state
of one sequence, scratch of the smallest chunk, readers, the fewest slots; below that it is refused. The rest goes to larger
chunks, as long as they cost little, and to slots. Everything resident is the case that all slots fit.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

from moeflux.core.errors import BudgetError
from moeflux.core.units import format_at_least, format_bytes
from moeflux.models.spec import ModelSpec
from moeflux.runtime.forecast import Forecast, make_forecast
from moeflux.runtime.needs import CHUNKS, RUNNING_BYTES, USUAL_CHUNK, Needs, Resources
from moeflux.runtime.sizes import Sizes
from moeflux.runtime.slot_size import pool_bytes, slots_within

DEFAULT_PROMPT = 2048


@dataclass(frozen=True)
class Memory:
    """Where the bytes go, in the order in which they are taken."""

    base: int
    trunk: int
    state: int
    scratch: int
    readers: int
    slots: int

    @property
    def total(self) -> int:
        return self.base + self.trunk + self.state + self.scratch + self.readers + self.slots


@dataclass(frozen=True)
class Plan:
    budget: int
    context: int
    memory: Memory
    n_slots: int  # experts in memory,
    n_experts: int  # of so many
    slot_bytes: int
    working_set: int  # experts that one token needs
    working_set_bytes: int
    resident: bool  # every expert is in memory and stays there
    chunk_tokens: int
    direct: bool
    n_readers: int
    smallest_budget: int  # that runs at all
    cliff_budget: int  # from which on one token's working set fits; below it, an LRU cache has no hits
    resident_budget: int  # from which on everything fits
    forecast: Forecast
    warnings: tuple[str, ...]
    drive_bytes_s: float | None = None  # what the drive gives at best, where it was measured

    @property
    def share(self) -> float:
        """Of the experts that are in memory."""
        return self.n_slots / self.n_experts

    def as_dict(self) -> dict[str, Any]:
        return {**asdict(self), "memory": {**asdict(self.memory), "total": self.memory.total}, "share": self.share}


def make_plan(spec: ModelSpec, sizes: Sizes, resources: Resources, prompt: int = DEFAULT_PROMPT) -> Plan:
    """`prompt`: tokens before the first one is generated, for its time. Raises BudgetError below the floor."""
    needs = Needs(spec, sizes, resources)
    room = resources.budget - needs.fixed
    chunk = needs.resident_chunk(room)
    resident = chunk is not None
    if chunk is None:
        if room < needs.floor:
            raise _too_small(resources, needs)
        chunk = needs.streaming_chunk(room)
    left = room - needs.scratch(chunk) - needs.readers
    n_slots = sizes.n_experts if resident else min(sizes.n_experts, slots_within(left, needs.slot))
    if resources.slots is not None:
        n_slots = min(n_slots, resources.slots)
        resident = n_slots == sizes.n_experts
    forecast = make_forecast(
        spec, sizes, resources.rates,
        n_slots=n_slots, resident=resident, chunk=chunk, context=resources.context, prompt=prompt,
        kv=resources.kv,
    )  # fmt: skip
    return Plan(
        budget=resources.budget,
        context=resources.context,
        memory=_memory(resources, needs, chunk, n_slots),
        n_slots=n_slots,
        n_experts=sizes.n_experts,
        slot_bytes=needs.slot,
        working_set=sizes.working_set,
        working_set_bytes=sizes.streamed_per_token,
        resident=resident,
        chunk_tokens=chunk,
        direct=resources.direct,
        n_readers=resources.n_readers,
        smallest_budget=needs.smallest_budget,
        cliff_budget=needs.cliff_budget,
        resident_budget=needs.resident_budget,
        forecast=forecast,
        warnings=tuple(_warnings(spec, sizes, resources, needs, n_slots, chunk)),
        drive_bytes_s=resources.rates.drive,
    )


def _memory(resources: Resources, needs: Needs, chunk: int, n_slots: int) -> Memory:
    return Memory(
        base=resources.base + RUNNING_BYTES,
        trunk=needs.trunk,
        state=needs.state,
        scratch=needs.scratch(chunk),
        readers=needs.readers,
        slots=pool_bytes(n_slots, needs.slot),
    )


def _too_small(resources: Resources, needs: Needs) -> BudgetError:
    parts = (
        ("process", resources.base + RUNNING_BYTES),
        ("trunk", needs.trunk),
        (_state_words(resources), needs.state),
        (f"scratch for {CHUNKS[-1]} tokens", needs.scratch(CHUNKS[-1])),
        (f"{resources.n_readers} readers", needs.readers),
        (f"{needs.fewest_slots} experts", pool_bytes(needs.fewest_slots, needs.slot)),
    )
    numbers = ", ".join(f"{name} {format_bytes(n)}" for name, n in parts)
    return BudgetError(
        f"a budget of {format_bytes(resources.budget)} is too small: {numbers}",
        where="option 'ram'",
        hint=f"the smallest that works is {format_at_least(needs.smallest_budget)}; a shorter context needs less",
    )


def _state_words(resources: Resources) -> str:
    each = f"state for {resources.context} tokens"
    several = f"{each} of {resources.sequences} sequences" if resources.sequences > 1 else each
    return f"{several} and kept prefixes" if resources.prefixes else several


def _warnings(spec: ModelSpec, sizes: Sizes, resources: Resources, needs: Needs, n_slots: int, chunk: int) -> list[str]:
    found = []
    if n_slots < sizes.working_set:
        found.append(
            f"{n_slots} experts fit, one token needs {sizes.working_set}: below that an LRU cache has no hits at all; "
            f"from {format_at_least(needs.cliff_budget)} on it has"
        )
    if chunk < min(USUAL_CHUNK, resources.context):
        found.append(f"memory is tight: prompts run in chunks of {chunk} tokens, and each chunk reads experts anew")
    if resources.context > spec.context:
        found.append(f"the context of {resources.context} is longer than the model's own, {spec.context}")
    return found
