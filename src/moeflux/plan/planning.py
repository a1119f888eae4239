"""Gathers what a plan needs from the machine and the model's files, or from a bare config.json, and makes it."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from moeflux.backends.base import Backend
from moeflux.backends.registry import choose_backend
from moeflux.core.config import EngineConfig
from moeflux.core.errors import BudgetError, OptionError
from moeflux.core.units import format_bytes
from moeflux.formats.checkpoint import Checkpoint, has_weights, read_config
from moeflux.formats.quant_rules import AffineRule, QuantRules, read_quant_rules
from moeflux.models.registry import read_spec
from moeflux.models.spec import ModelSpec
from moeflux.plan.advice import Choice, suggest
from moeflux.plan.forecast import Rates
from moeflux.plan.memory import default_budget, free_memory, used_now
from moeflux.plan.needs import DEFAULT_CONTEXT, Resources
from moeflux.plan.plan import DEFAULT_PROMPT, Plan, make_plan
from moeflux.plan.probe import DriveProbe, MemoryProbe, probe_drive, probe_memory
from moeflux.plan.sizes import Sizes, measure, predict
from moeflux.plan.text_size import TextNeeds, text_needs

ASSUMED = AffineRule(bits=4, group=64)


@dataclass(frozen=True)
class Wanted:
    """What was asked for; None: find out. Rates in bytes per second."""

    ram: int | None = None
    context: int | None = None
    prompt: int | None = None
    drive: int | None = None
    memory: int | None = None
    threads: int | None = None
    backend: str = "auto"
    vram: int | None = None
    text: TextNeeds | None = None  # of a model that is only planned


@dataclass(frozen=True)
class PlanReport:
    model_type: str
    sizes: Sizes
    plan: Plan
    faster: tuple[Choice, ...]
    rates: Rates
    drive: DriveProbe | None  # None: its rate was given
    memory: MemoryProbe | None
    notes: tuple[str, ...]

    def as_dict(self) -> dict[str, Any]:
        return {
            "model_type": self.model_type,
            "plan": self.plan.as_dict(),
            "faster": [choice.as_dict() for choice in self.faster],
            "rates": asdict(self.rates),
            "drive_probe": self.drive.as_dict() if self.drive else None,
            "memory_probe": self.memory.as_dict() if self.memory else None,
            "sizes": self.sizes.as_dict(),
            "notes": list(self.notes),
        }


def plan_model(path: Path, wanted: Wanted) -> PlanReport:
    """Of a model folder, or of a config.json without weights, whose drive must be given. Probes what was not given."""
    config = read_config(path)
    spec = read_spec(config)
    backend, chosen = _backend(wanted)
    if not path.is_dir() and path.suffix != ".json":
        raise OptionError("is neither a model folder nor a config.json", where=str(path))
    if not has_weights(path):
        if wanted.drive is None:
            raise OptionError(
                "there are no weights here to measure a drive with",
                where=str(path),
                hint="say how fast the drive is: --drive 7GB/s",
            )
        rules, notes = _rules(config)
        wanted = replace(wanted, text=text_needs(path, spec.vocab, "all"))
        return _report(spec, backend, predict(spec, rules), wanted, None, (*chosen, *notes))
    checkpoint = Checkpoint(path, spec.names)
    try:
        sizes = measure(spec, checkpoint)
        wanted = replace(wanted, text=text_needs(path, spec.vocab, "all"))
        first = make_plan(spec, sizes, _resources(spec, backend, wanted, None, None))  # refuses before anything is measured
        probe = (
            probe_drive(checkpoint, [i for i, _ in spec.moe_layers()], weights_only=first.keep_scales)
            if wanted.drive is None
            else None
        )
        return _report(spec, backend, sizes, wanted, probe, (*chosen, *(probe.notes if probe else ())))
    finally:
        checkpoint.close()


def plan_engine(config: EngineConfig, backend: Backend, spec: ModelSpec, sizes: Sizes, checkpoint: Checkpoint) -> Plan:
    """Of a model that is being opened. The drive is looked at only where something will be read from it."""
    wanted = Wanted(ram=config.ram_bytes, context=config.context, vram=config.vram_bytes)
    resources = replace(
        _resources(spec, backend, wanted, None, None),
        slots=config.slots,
        scales=config.scales,
        kv=config.kv,
        sequences=config.sequences,
        prefixes=config.prefix_bytes,
        checkpoints=config.checkpoints,
        text=text_needs(config.model, spec.vocab, config.text, config.sequences),
    )
    plan = make_plan(spec, sizes, resources)
    if plan.resident or plan.memory.records or (plan.vram and plan.vram.resident) or not backend.streams:
        return plan
    probe = probe_drive(checkpoint, [i for i, _ in spec.moe_layers()], weights_only=plan.keep_scales)
    resources = replace(resources, scales="kept" if plan.keep_scales else "streamed")  # as was measured
    fast = _with_drive(resources, probe)
    for affordable in (fast, replace(fast, n_readers=resources.n_readers)):  # what the drive likes best may not fit
        with suppress(BudgetError):
            return make_plan(spec, sizes, affordable)
    return make_plan(spec, sizes, replace(resources, rates=fast.rates))


def _backend(wanted: Wanted) -> tuple[Backend, tuple[str, ...]]:
    return choose_backend(EngineConfig(Path(), wanted.backend, wanted.threads, vram=wanted.vram))


def _report(
    spec: ModelSpec, backend: Backend, sizes: Sizes, wanted: Wanted, probe: DriveProbe | None, notes: tuple[str, ...]
) -> PlanReport:
    memory = probe_memory(backend) if wanted.memory is None else None
    resources = _resources(spec, backend, wanted, probe, memory)
    prompt = wanted.prompt or min(DEFAULT_PROMPT, resources.context)
    plan = make_plan(spec, sizes, resources, prompt)
    free = free_memory() + used_now()
    if wanted.ram is not None and wanted.ram > free:
        notes = (*notes, f"the budget is more than the {format_bytes(free)} that are free on this machine now")
    faster = suggest(spec, sizes, resources, plan)
    return PlanReport(spec.model_type, sizes, plan, faster, resources.rates, probe, memory, notes)


def _resources(
    spec: ModelSpec, backend: Backend, wanted: Wanted, drive: DriveProbe | None, memory: MemoryProbe | None
) -> Resources:
    base = used_now()
    resources = Resources(
        budget=default_budget(free_memory(), base) if wanted.ram is None else wanted.ram,
        base=base,
        backend=backend,
        device=backend.room,
        vram=wanted.vram,
        context=wanted.context or min(DEFAULT_CONTEXT, spec.context),
        checkpoints=EngineConfig(Path()).checkpoints,
        text=wanted.text or TextNeeds(),
        rates=Rates(wanted.drive, wanted.memory or (memory.bytes_s if memory else None), memory.macs_s if memory else None),
    )
    return _with_drive(resources, drive) if drive else resources


def _with_drive(resources: Resources, probe: DriveProbe) -> Resources:
    rates = replace(resources.rates, drive=probe.bytes_s)
    return replace(resources, rates=rates, direct=probe.direct, n_readers=probe.n_readers)


def _rules(config: Mapping[str, Any]) -> tuple[QuantRules, tuple[str, ...]]:
    """Of a config.json without weights. One that says nothing about quantisation is planned as its 4-bit conversion."""
    rules = read_quant_rules(config)
    if rules.affine or rules.fp8_block:
        return rules, ("there are no weights here: sizes are what config.json says they would be",)
    assumed = f"MLX affine {ASSUMED.bits}-bit, groups of {ASSUMED.group}"
    return replace(rules, affine=ASSUMED), (f"there are no weights here: sizes are those of a conversion to {assumed}",)
