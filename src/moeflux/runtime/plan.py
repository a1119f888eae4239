"""Byte arithmetic before anything loads: what a budget holds, where it ends, and what that means for speed.

Pure: the same numbers give the same plan. What a process may use is taken in this order: what it uses already, trunk, state
of one sequence, scratch of the smallest chunk, readers, the fewest slots; below that it is refused. The rest goes to larger
chunks, as long as they cost little, and to slots. Everything resident is the case that all slots fit.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from functools import cached_property
from typing import Any

from moeflux.backends.state import BLOCK
from moeflux.core.errors import BudgetError
from moeflux.core.units import format_at_least, format_bytes
from moeflux.models.spec import Attention, Mla, ModelSpec
from moeflux.runtime.forecast import Forecast, Rates, make_forecast
from moeflux.runtime.scratch import scratch_bytes
from moeflux.runtime.sizes import BF16_BYTES, F32_BYTES, Sizes
from moeflux.runtime.slot_size import pool_bytes, reader_bytes, round_up, slots_within
from moeflux.store.store import slot_bytes_of

MIB = 2**20
CHUNKS = (4096, 2048, 1024, 512, 256, 128, 64, 32)  # tokens of a prompt that are run together
USUAL_CHUNK = 512  # enough where nothing has to be read
CHUNK_SHARE = 8  # a larger chunk may cost one in so many bytes of what slots could have
TIGHT_SHARE = 3  # and the usual one or a smaller
RUNNING_BYTES = 32 * MIB  # what Python, allocators and threads take while running, on top of all that is counted
ROUNDING = 16 * MIB  # what a process uses before it begins differs from run to run
DEFAULT_READERS = 4
DEFAULT_CONTEXT = 8192
DEFAULT_PROMPT = 2048


@dataclass(frozen=True)
class Resources:
    """What a plan may use."""

    budget: int  # bytes of the whole process
    base: int  # bytes that it uses before anything loads
    threads: int
    context: int = DEFAULT_CONTEXT  # tokens of one sequence
    direct: bool = True
    n_readers: int = DEFAULT_READERS
    rates: Rates = field(default_factory=Rates)
    backend: str = "native"
    slots: int | None = None  # no more than so many, whatever the budget


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

    @property
    def share(self) -> float:
        """Of the experts that are in memory."""
        return self.n_slots / self.n_experts

    def as_dict(self) -> dict[str, Any]:
        return {**asdict(self), "memory": {**asdict(self.memory), "total": self.memory.total}, "share": self.share}


def make_plan(spec: ModelSpec, sizes: Sizes, resources: Resources, prompt: int = DEFAULT_PROMPT) -> Plan:
    """`prompt`: tokens before the first one is generated, for its time. Raises BudgetError below the floor."""
    needs = _Needs(spec, sizes, resources)
    room = resources.budget - needs.fixed
    chunk = needs.resident_chunk(room)
    resident = chunk is not None
    if chunk is None:
        if room < needs.floor:
            raise _too_small(resources, needs)
        chunk = needs.streaming_chunk(room)
    left = room - needs.scratch(chunk)
    n_slots = sizes.n_experts if resident else min(sizes.n_experts, slots_within(left - needs.readers, needs.slot))
    if resources.slots is not None:
        n_slots = min(n_slots, resources.slots)
        resident = n_slots == sizes.n_experts
    memory = Memory(
        base=resources.base + RUNNING_BYTES,
        trunk=needs.trunk,
        state=needs.state,
        scratch=needs.scratch(chunk),
        readers=needs.readers,
        slots=pool_bytes(n_slots, needs.slot),
    )
    return Plan(
        budget=resources.budget,
        context=resources.context,
        memory=memory,
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
        forecast=make_forecast(
            spec, sizes, resources.rates,
            n_slots=n_slots, resident=resident, chunk=chunk, context=resources.context, prompt=prompt,
        ),
        warnings=tuple(_warnings(spec, resources, needs, n_slots, chunk)),
    )  # fmt: skip


class _Needs:
    """What each part costs, for one model on one machine."""

    def __init__(self, spec: ModelSpec, sizes: Sizes, resources: Resources) -> None:
        self._spec, self._sizes, self._resources = spec, sizes, resources
        self.slot = max(slot_bytes_of(parts, resources.direct) for parts in sizes.expert_parts)
        self.readers = resources.n_readers * reader_bytes(resources.direct)
        self.trunk = sizes.trunk_in_memory if resources.backend == "native" else _decoded_trunk(spec, sizes)
        self.state = state_bytes(spec, sizes, resources.context)
        self.fixed = resources.base + RUNNING_BYTES + self.trunk + self.state
        self._scratch: dict[int, int] = {}

    def scratch(self, tokens: int) -> int:
        if tokens not in self._scratch:
            self._scratch[tokens] = scratch_bytes(self._spec, tokens, self._resources.threads, self._sizes.integer)
        return self._scratch[tokens]

    @cached_property
    def fewest_slots(self) -> int:
        """The k experts of a layer, and one for each reader to fill meanwhile."""
        k = max(moe.router.k for _, moe in self._spec.moe_layers())
        return min(self._sizes.n_experts, k + self._resources.n_readers)

    @cached_property
    def resident_experts(self) -> int:
        """All experts and those who read them."""
        return self.readers + pool_bytes(self._sizes.n_experts, self.slot)

    @property
    def floor(self) -> int:
        """Besides what is fixed."""
        return self.scratch(CHUNKS[-1]) + self.readers + pool_bytes(self.fewest_slots, self.slot)

    @property
    def smallest_budget(self) -> int:
        least = min(self.floor, self.scratch(CHUNKS[-1]) + self.resident_experts)
        return round_up(self.fixed + least, ROUNDING) + ROUNDING

    @property
    def cliff_budget(self) -> int:
        slots = self.scratch(USUAL_CHUNK) + self.readers + pool_bytes(self._sizes.working_set, self.slot)
        return min(self.resident_budget, round_up(self.fixed + slots, ROUNDING) + ROUNDING)

    @property
    def resident_budget(self) -> int:
        return round_up(self.fixed + self.scratch(CHUNKS[-1]) + self.resident_experts, ROUNDING) + ROUNDING

    def resident_chunk(self, room: int) -> int | None:
        """The chunk with which everything fits; None where it does not."""
        chunks = [chunk for chunk in CHUNKS if chunk <= USUAL_CHUNK]
        return next((chunk for chunk in chunks if self.scratch(chunk) + self.resident_experts <= room), None)

    def streaming_chunk(self, room: int) -> int:
        """Every chunk of a prompt sweeps over the experts, so large ones save reads; but slots do not get what they cost."""
        rest = room - self.readers
        working_set = pool_bytes(self._sizes.working_set, self.slot)
        fewest = pool_bytes(self.fewest_slots, self.slot)
        for chunk in CHUNKS:
            share, kept = (CHUNK_SHARE, working_set) if chunk > USUAL_CHUNK else (TIGHT_SHARE, fewest)
            wanted = chunk < 2 * self._resources.context  # no more than a prompt can fill
            if wanted and self.scratch(chunk) <= rest // share and self.scratch(chunk) + kept <= rest:
                return chunk
        return CHUNKS[-1]


def state_bytes(spec: ModelSpec, sizes: Sizes, context: int) -> int:
    """Of one sequence, as f32; and the largest table once more, because growing one needs the old and the new."""
    rows = round_up(context, BLOCK)
    widths = [0]
    for layer in spec.layers:
        match layer.mixer:
            case Attention(n_kv_heads=heads, head_dim=dim):
                widths.append(heads * dim)
            case Mla() as mla:
                widths.append(mla.latent_dim)
    per_token = sizes.state_per_token // BF16_BYTES * F32_BYTES
    return rows * (per_token + max(widths) * F32_BYTES) + sizes.state_per_sequence


def _decoded_trunk(spec: ModelSpec, sizes: Sizes) -> int:
    """On the numpy backend, which decodes all but the embedding table to f32."""
    tied = spec.head is None
    weights = sum(weight.count for weight in spec.weights()) - (0 if tied else spec.embedding.count)
    return weights * F32_BYTES + sizes.trunk - (0 if tied else sizes.trunk_read_per_token)


def _too_small(resources: Resources, needs: _Needs) -> BudgetError:
    parts = (
        ("process", resources.base + RUNNING_BYTES),
        ("trunk", needs.trunk),
        (f"state for {resources.context} tokens", needs.state),
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


def _warnings(spec: ModelSpec, resources: Resources, needs: _Needs, n_slots: int, chunk: int) -> list[str]:
    found = []
    wanted = sum(moe.router.k for _, moe in spec.moe_layers())
    if n_slots < wanted:
        found.append(
            f"{n_slots} experts fit, one token needs {wanted}: below that an LRU cache has no hits at all; "
            f"from {format_at_least(needs.cliff_budget)} on it has"
        )
    if chunk < min(USUAL_CHUNK, resources.context):
        found.append(f"memory is tight: prompts run in chunks of {chunk} tokens, and each chunk reads experts anew")
    if resources.context > spec.context:
        found.append(f"the context of {resources.context} is longer than the model's own, {spec.context}")
    return found
