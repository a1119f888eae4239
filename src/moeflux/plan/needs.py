"""What each part of a running engine costs in memory, for one model on one machine."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cached_property

from moeflux.backends.base import Backend, Costs, DeviceRoom
from moeflux.backends.state import BLOCK
from moeflux.core.config import Kv, Scales
from moeflux.core.pages import round_up
from moeflux.models.spec import ModelSpec
from moeflux.plan.forecast import Rates
from moeflux.plan.sizes import Sizes
from moeflux.plan.slot_size import pool_bytes, reader_bytes
from moeflux.plan.text_size import TextNeeds, logit_bytes
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


@dataclass(frozen=True)
class Resources:
    """What a plan may use."""

    budget: int  # bytes of the whole process
    base: int  # bytes that it uses before anything loads
    backend: Backend  # what it computes with, which says what that costs
    context: int = DEFAULT_CONTEXT  # tokens of one sequence
    direct: bool = True
    n_readers: int = DEFAULT_READERS
    rates: Rates = field(default_factory=Rates)
    device: DeviceRoom | None = None  # that the backend computes on, where it has memory of its own
    vram: int | None = None  # bytes of it that may be used; None: what is free
    slots: int | None = None  # no more than so many, whatever the budget
    scales: Scales = "auto"
    kv: Kv = "bf16"
    sequences: int = 1
    prefixes: int = 0  # bytes of states that are kept besides
    checkpoints: int = 0  # of each sequence
    text: TextNeeds = field(default_factory=TextNeeds)


class Needs:
    """What each part costs, for one model on one machine."""

    def __init__(self, spec: ModelSpec, sizes: Sizes, resources: Resources, *, keep_scales: bool = False) -> None:
        """`keep_scales`: of all experts, beside the slots."""
        self.spec, self.sizes, self.resources, self.keep_scales = spec, sizes, resources, keep_scales
        self._costs: dict[int, Costs] = {}
        slots = sizes.weight_parts if keep_scales else sizes.expert_parts
        self.slot = max(slot_bytes_of(parts, resources.direct) for parts in slots)
        self.scales = sizes.kept_scales if keep_scales else 0
        self.readers = resources.n_readers * reader_bytes(resources.direct)
        here = self.costs(CHUNKS[-1]).ram
        self.trunk = here.trunk
        self.all_states = resources.sequences * state_bytes(sizes, resources.context, resources.kv) + resources.prefixes
        self.all_checkpoints = checkpoint_bytes(sizes, resources)
        self.state, self.checkpoints = (self.all_states, self.all_checkpoints) if here.keeps_states else (0, 0)
        self.text, self.constraints = resources.text.kept, resources.text.constraints
        self.logits = logit_bytes(spec.vocab, resources.sequences)
        self.opening = resources.base + RUNNING_BYTES + resources.text.opening  # when nothing else is there yet
        self.fixed = resources.base + RUNNING_BYTES + self.trunk + self.state + self.scales
        self.fixed += self.checkpoints + self.text + self.constraints + self.logits

    def costs(self, tokens: int) -> Costs:
        """By tier, with prompts in chunks of so many tokens."""
        if tokens not in self._costs:
            self._costs[tokens] = self.resources.backend.costs(self.spec, self.sizes, tokens)
        return self._costs[tokens]

    def scratch(self, tokens: int) -> int:
        return self.costs(tokens).ram.scratch

    @cached_property
    def fewest_slots(self) -> int:
        """The k experts of a layer, and one for each reader to fill meanwhile."""
        k = max(moe.router.k for _, moe in self.spec.moe_layers())
        return min(self.sizes.n_experts, k + self.resources.n_readers)

    @cached_property
    def resident_experts(self) -> int:
        """All experts and those who read them."""
        return self.readers + pool_bytes(self.sizes.n_experts, self.slot)

    @property
    def floor(self) -> int:
        """Besides what is fixed."""
        return self.scratch(CHUNKS[-1]) + self.readers + pool_bytes(self.fewest_slots, self.slot)

    @property
    def smallest_budget(self) -> int:
        least = min(self.floor, self.scratch(CHUNKS[-1]) + self.resident_experts)
        return round_up(max(self.opening, self.fixed + least), ROUNDING) + ROUNDING

    @property
    def cliff_budget(self) -> int:
        slots = self.scratch(USUAL_CHUNK) + self.readers + pool_bytes(self.sizes.working_set, self.slot)
        return min(self.resident_budget, round_up(max(self.opening, self.fixed + slots), ROUNDING) + ROUNDING)

    @property
    def resident_budget(self) -> int:
        needed = self.fixed + self.scratch(CHUNKS[-1]) + self.resident_experts
        return round_up(max(self.opening, needed), ROUNDING) + ROUNDING

    def resident_chunk(self, room: int) -> int | None:
        """The chunk with which everything fits; None where it does not."""
        chunks = [chunk for chunk in CHUNKS if chunk <= USUAL_CHUNK]
        return next((chunk for chunk in chunks if self.scratch(chunk) + self.resident_experts <= room), None)

    def streaming_chunk(self, room: int) -> int:
        """Every chunk of a prompt sweeps over the experts, so large ones save reads; but slots do not get what they cost."""
        rest = room - self.readers
        working_set = pool_bytes(self.sizes.working_set, self.slot)
        fewest = pool_bytes(self.fewest_slots, self.slot)
        for chunk in CHUNKS:
            share, kept = (CHUNK_SHARE, working_set) if chunk > USUAL_CHUNK else (TIGHT_SHARE, fewest)
            wanted = chunk < 2 * self.resources.context  # no more than a prompt can fill
            if wanted and self.scratch(chunk) <= rest // share and self.scratch(chunk) + kept <= rest:
                return chunk
        return CHUNKS[-1]


def state_bytes(sizes: Sizes, context: int, kv: Kv) -> int:
    """Of one sequence."""
    return round_up(context, BLOCK) * sizes.kept_per_token(kv) + sizes.state_per_sequence


def conversation_bytes(sizes: Sizes, n_tokens: int, kv: Kv, checkpoints: int) -> int:
    """Of one sequence with the checkpoints that it may keep, and the copy that a failed step goes back to."""
    block = BLOCK * sizes.kept_per_token(kv)
    kept = (block + sizes.state_per_sequence) * (checkpoints + 1) if sizes.state_per_sequence else block
    return state_bytes(sizes, n_tokens, kv) + (kept if checkpoints else 0)


def checkpoint_bytes(sizes: Sizes, resources: Resources) -> int:
    """Of all sequences. A copy of what cannot be cut each, one more that is being copied, and a block behind each place
    where texts part. Where every state can be cut, a checkpoint copies nothing, and a sequence parts from one other.
    """
    if not resources.checkpoints:
        return 0
    each = conversation_bytes(sizes, 0, resources.kv, resources.checkpoints) - sizes.state_per_sequence
    moving = BLOCK * sizes.kept_per_token(resources.kv) + sizes.state_per_sequence if sizes.state_per_sequence else 0
    return each * resources.sequences + moving
