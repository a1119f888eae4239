"""Byte arithmetic before anything loads: what a budget holds, where it ends, and what that means for speed.

Pure: the same numbers give the same plan. What a process may use is taken in this order: what it uses already, text, trunk,
states, logits, scratch of the smallest chunk, readers, the fewest slots; below that it is refused. The rest goes to larger
chunks, as long as they cost little, and to slots. Everything resident is the case that all slots fit. Where not, the scales
of all experts are kept in memory if what slots lose by that costs less than what reads without them save.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass, fields, replace
from typing import Any

from moeflux.core.errors import BudgetError
from moeflux.core.units import format_at_least, format_bytes
from moeflux.models.spec import ModelSpec
from moeflux.plan.forecast import Forecast, local_hit_rate, make_forecast
from moeflux.plan.needs import CHUNKS, RUNNING_BYTES, USUAL_CHUNK, Needs, Resources
from moeflux.plan.sizes import Sizes
from moeflux.plan.slot_size import pool_bytes, slots_within
from moeflux.plan.text_size import logit_rows
from moeflux.plan.vram import Vram, plan_vram

DEFAULT_PROMPT = 2048
PASSING = 64  # slots that experts pass through on their way to a device
READ_COST = 2**16  # bytes that cost as much as one more read: tens of microseconds of a processor, and of the drive


@dataclass(frozen=True)
class Memory:
    """Where the bytes go, in the order in which they are taken."""

    base: int
    trunk: int
    state: int
    scratch: int
    readers: int
    slots: int
    scales: int = 0  # of all experts, where they are kept beside the slots
    checkpoints: int = 0  # of sequences, where their state cannot be cut, and one state that is being copied
    text: int = 0  # tokenizer
    constraints: int = 0  # the vocabulary as grammars need it
    logits: int = 0  # and choosing a token
    records: int = 0  # of all experts, where a device reads those that it has no slot for

    @property
    def states(self) -> int:
        """For everything that a sequence carries from token to token."""
        return self.state + self.checkpoints

    @property
    def total(self) -> int:
        return sum(getattr(self, field.name) for field in fields(self))


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
    keep_scales: bool  # of every expert, so that only weights are read
    chunk_tokens: int
    logit_rows: int  # that one forward may return
    direct: bool
    n_readers: int
    smallest_budget: int  # that runs at all
    cliff_budget: int  # from which on one token's working set fits; below it, an LRU cache has no hits
    resident_budget: int  # from which on everything fits
    forecast: Forecast
    warnings: tuple[str, ...]
    drive_bytes_s: float | None = None  # what the drive gives at best, where it was measured
    vram: Vram | None = None  # the same for a device with memory of its own, which is then above this memory

    @property
    def state_limit(self) -> int:
        """Bytes that states may take: those planned for them, and what nobody else needs."""
        if self.vram is not None:
            return self.vram.states + max(0, self.vram.budget - self.vram.total)
        return self.memory.states + max(0, self.budget - self.memory.total)

    @property
    def sweep_s(self) -> float:
        """Seconds to read every expert that is not in memory once; 0 where the drive was not measured."""
        return (self.n_experts - self.n_slots) * self.slot_bytes / self.drive_bytes_s if self.drive_bytes_s else 0.0

    @property
    def share(self) -> float:
        """Of the experts that are in memory."""
        return self.n_slots / self.n_experts

    def as_dict(self) -> dict[str, Any]:
        vram = self.vram.as_dict() if self.vram else None
        memory = {**asdict(self.memory), "total": self.memory.total}
        return {**asdict(self), "memory": memory, "share": self.share, "vram": vram}


def make_plan(spec: ModelSpec, sizes: Sizes, resources: Resources, prompt: int = DEFAULT_PROMPT) -> Plan:
    """`prompt`: tokens before the first one is generated, for its time. Raises BudgetError below the floor."""
    plain = Needs(spec, sizes, resources)
    vram = plan_vram(plain, resources.device) if resources.device else None
    choice = _arrange(plain) if vram is None else _arrange_below(plain, vram)
    if choice is None:
        raise _too_small(resources, plain)
    if vram is None and not choice.resident and sizes.kept_scales and resources.scales != "streamed":
        other = _arrange(Needs(spec, sizes, resources, keep_scales=True))
        if other and not other.resident and (resources.scales == "kept" or _cost(other) < _cost(choice)):
            choice = other
    needs, chunk, n_slots, resident = choice.needs, choice.chunk, choice.n_slots, choice.resident
    held = resident or bool(vram and (vram.resident or choice.records))  # nothing comes from the drive
    forecast = make_forecast(
        spec, sizes, resources.rates if vram is None else replace(resources.rates, memory=None, macs=None),
        n_slots=sizes.n_experts if held else n_slots, resident=held, chunk=chunk, context=resources.context, prompt=prompt,
        kv=resources.kv, keep_scales=needs.keep_scales,
    )  # fmt: skip
    return Plan(
        budget=resources.budget,
        context=resources.context,
        memory=_memory(resources, needs, choice),
        n_slots=n_slots,
        n_experts=sizes.n_experts,
        slot_bytes=needs.slot,
        working_set=sizes.working_set,
        working_set_bytes=sizes.streamed_per_token,
        resident=resident,
        keep_scales=needs.keep_scales,
        chunk_tokens=chunk,
        logit_rows=logit_rows(spec.vocab, resources.sequences),
        direct=resources.direct,
        n_readers=resources.n_readers,
        smallest_budget=plain.smallest_budget,
        cliff_budget=plain.cliff_budget,
        resident_budget=plain.resident_budget,
        forecast=forecast,
        warnings=tuple(_warnings(plain, choice)),
        drive_bytes_s=resources.rates.drive,
        vram=vram,
    )


@dataclass(frozen=True)
class _Choice:
    needs: Needs
    chunk: int
    n_slots: int
    resident: bool
    records: int = 0


def _arrange(needs: Needs) -> _Choice | None:
    """How a budget is divided; None where it is too small."""
    room, most = needs.resources.budget - needs.fixed, needs.sizes.n_experts
    if needs.resources.budget < needs.opening:
        return None
    chunk = needs.resident_chunk(room)
    if chunk is not None:
        n_slots = most
    elif room < needs.floor:
        return None
    else:
        chunk = needs.streaming_chunk(room)
        n_slots = min(most, slots_within(room - needs.scratch(chunk) - needs.readers, needs.slot))
    if needs.resources.slots is not None:
        n_slots = min(n_slots, needs.resources.slots)
    return _Choice(needs, chunk, n_slots, n_slots == most)


def _arrange_below(needs: Needs, vram: Vram) -> _Choice | None:
    """Host memory under a device's: slots that experts pass through; all experts besides, where the device lacks slots and
    they fit; else as many slots as do."""
    room, most = (
        needs.resources.budget - needs.fixed - needs.scratch(vram.chunk_tokens) - needs.readers,
        needs.sizes.n_experts,
    )
    fits = slots_within(room, needs.slot)
    if needs.resources.budget < needs.opening or fits < needs.fewest_slots:
        return None
    few = min(fits, most, needs.fewest_slots + PASSING)
    if needs.resources.slots is not None:
        fits, few = min(fits, needs.resources.slots), min(few, needs.resources.slots)
    if vram.resident:
        return _Choice(needs, vram.chunk_tokens, few, False)
    records = most * vram.slots // max(1, vram.n_slots + vram.n_staged)
    if records and room >= pool_bytes(few, needs.slot) + records:
        return _Choice(needs, vram.chunk_tokens, few, False, records)
    n_slots = min(most, fits)
    return _Choice(needs, vram.chunk_tokens, n_slots, n_slots == most)


def _cost(choice: _Choice) -> float:
    """What is read for a token with some locality, a read counted as bytes too."""
    sizes = choice.needs.sizes
    parts = sizes.weight_parts if choice.needs.keep_scales else sizes.expert_parts
    missing = 1 - local_hit_rate(choice.n_slots / sizes.n_experts) if choice.n_slots >= sizes.working_set else 1.0
    return missing * max(sum(each) + READ_COST * len(each) for each in parts)


def _memory(resources: Resources, needs: Needs, choice: _Choice) -> Memory:
    chunk, n_slots = choice.chunk, choice.n_slots
    return Memory(
        base=resources.base + RUNNING_BYTES,
        trunk=needs.trunk,
        state=needs.state,
        scratch=needs.scratch(chunk),
        readers=needs.readers,
        slots=pool_bytes(n_slots, needs.slot),
        scales=needs.scales,
        checkpoints=needs.checkpoints,
        text=needs.text,
        constraints=needs.constraints,
        logits=needs.logits,
        records=choice.records,
    )


def _too_small(resources: Resources, needs: Needs) -> BudgetError:
    parts = (
        ("process", resources.base + RUNNING_BYTES),
        ("tokenizer", needs.text),
        ("constraints", needs.constraints),
        ("trunk", needs.trunk),
        ("logits", needs.logits),
        (_state_words(resources), needs.state),
        ("checkpoints", needs.checkpoints),
        (f"scratch for {CHUNKS[-1]} tokens", needs.scratch(CHUNKS[-1])),
        (f"{resources.n_readers} readers", needs.readers),
        (f"{needs.fewest_slots} experts", pool_bytes(needs.fewest_slots, needs.slot)),
    )
    numbers = ", ".join(f"{name} {format_bytes(n)}" for name, n in parts if n)
    if resources.text.opening > needs.text + needs.constraints:
        numbers += f"; opening the tokenizer takes {format_bytes(resources.text.opening)} for a moment"
    return BudgetError(
        f"a budget of {format_bytes(resources.budget)} is too small: {numbers}",
        where="option 'ram'",
        hint=f"the smallest that works is {format_at_least(needs.smallest_budget)}; a shorter context needs less",
    )


def _state_words(resources: Resources) -> str:
    each = f"state for {resources.context} tokens"
    several = f"{each} of {resources.sequences} sequences" if resources.sequences > 1 else each
    return f"{several} and kept prefixes" if resources.prefixes else several


def _warnings(needs: Needs, choice: _Choice) -> list[str]:
    spec, sizes, resources, n_slots = needs.spec, needs.sizes, needs.resources, choice.n_slots
    found = []
    if resources.scales == "kept" and not (choice.needs.keep_scales or choice.resident):
        why = f"those of all experts take {format_bytes(sizes.kept_scales)}" if sizes.kept_scales else "there are none"
        found.append(f"scales are not kept in memory: {why}")
    below_device = resources.device is not None
    if n_slots < sizes.working_set and not below_device:
        found.append(
            f"{n_slots} experts fit, one token needs {sizes.working_set}: below that an LRU cache has no hits at all; "
            f"from {format_at_least(needs.cliff_budget)} on it has"
        )
    if choice.chunk < min(USUAL_CHUNK, resources.context) and not below_device:
        found.append(f"memory is tight: prompts run in chunks of {choice.chunk} tokens, and each chunk reads experts anew")
    if resources.context > spec.context:
        found.append(f"the context of {resources.context} is longer than the model's own, {spec.context}")
    return found
