"""`moeflux plan MODEL`: what a memory budget holds and what speed that allows, before anything is loaded."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Annotated

import typer

from moeflux.cli.options import Backend, Context, ModelOrConfig, Ram, Threads, Vram, read_option
from moeflux.cli.tables import print_table
from moeflux.cli.terminal import note
from moeflux.core.units import format_at_least, format_bytes, parse_bytes, parse_rate
from moeflux.plan.forecast import Case, FirstToken
from moeflux.plan.planning import PlanReport, Wanted, plan_model

Row = tuple[str, str, str]


def plan(
    model: ModelOrConfig,
    ram: Ram = None,
    vram: Vram = None,
    backend: Backend = "auto",
    context: Context = None,
    prompt: Annotated[int | None, typer.Option(min=1, max=2**24, help="Tokens before the first one is generated.")] = None,
    drive: Annotated[str | None, typer.Option(help="Read rate like 7GB/s, instead of measuring the drive.")] = None,
    memory: Annotated[str | None, typer.Option(help="Read rate like 50GB/s, instead of measuring the memory.")] = None,
    threads: Threads = None,
    as_json: Annotated[bool, typer.Option("--json", help="One JSON object instead of a table.")] = False,
) -> None:
    """Show what fits into memory and how fast that can be. Loads nothing; works from a bare config.json and --drive too."""
    wanted = Wanted(
        ram=read_option("ram", ram, parse_bytes),
        context=context,
        prompt=prompt,
        drive=read_option("drive", drive, parse_rate),
        memory=read_option("memory", memory, parse_rate),
        threads=threads,
        backend=backend,
        vram=read_option("vram", vram, parse_bytes),
    )
    report = plan_model(model, wanted)
    if as_json:
        print(json.dumps(report.as_dict(), indent=2))
        return
    note(*report.notes, *report.plan.warnings)
    rows = (_model(report), *_device(report), *_memory(report), *_experts(report), *_speed(report), *_faster(report))
    print_table(("", "", ""), rows)


def _model(report: PlanReport) -> Row:
    sizes = report.sizes
    experts = f"{sizes.n_experts:,} experts of {format_bytes(sizes.expert)}, {format_bytes(sizes.experts)} in all"
    return "model", report.model_type, f"{experts}; {sizes.expert_codec}"


def _device(report: PlanReport) -> Iterator[Row]:
    v = report.plan.vram
    if v is None:
        return
    yield v.title, format_bytes(v.budget), f"{format_bytes(v.total)} of it planned"
    yield "  trunk", format_bytes(v.trunk), "with projections joined for the decode step"
    yield "  states", format_bytes(v.states), f"one sequence of {report.plan.context:,} tokens, and what it can go back to"
    yield "  scratch", format_bytes(v.scratch), f"prompts in chunks of {v.chunk_tokens:,} tokens; kernels and graphs"
    passing = f"; {v.n_staged:,} more slots for prompts" if v.n_staged else ""
    yield "  experts", format_bytes(v.slots), f"{v.n_slots:,} of {v.n_experts:,}{passing}"


def _memory(report: PlanReport) -> Iterator[Row]:
    plan, m = report.plan, report.plan.memory
    yield "budget", format_bytes(plan.budget), f"{format_bytes(m.total)} of it planned"
    yield "  process", format_bytes(m.base), "Python, libraries, file headers"
    if m.text:
        yield "  text", format_bytes(m.text), "tokenizer"
    if m.constraints:
        yield "  constraints", format_bytes(m.constraints), "the vocabulary, for output that must fit a grammar"
    yield "  trunk", format_bytes(m.trunk), "what every token needs"
    yield "  state", format_bytes(m.state), f"one sequence of {plan.context:,} tokens"
    if m.checkpoints:
        yield "  checkpoints", format_bytes(m.checkpoints), "states that a conversation can go back to"
    yield "  logits", format_bytes(m.logits), "and choosing a token"
    yield "  scratch", format_bytes(m.scratch), f"prompts in chunks of {plan.chunk_tokens:,} tokens"
    if not plan.resident:
        how = "past the page cache (O_DIRECT)" if plan.direct else "through the page cache"
        yield "  readers", format_bytes(m.readers), f"{plan.n_readers}, {how}"
    if plan.keep_scales:
        yield "  scales", format_bytes(m.scales), "of all experts, so that only their weights are read"
    if m.records:
        yield "  pinned", format_bytes(m.records), "all experts, where the GPU reads those that it has no slot for"
    yield "  experts", format_bytes(m.slots), f"{plan.n_slots:,} of {format_bytes(plan.slot_bytes)} each"


def _experts(report: PlanReport) -> Iterator[Row]:
    plan = report.plan
    if plan.vram:
        share = plan.vram.n_slots / plan.vram.n_experts
        below = "" if plan.vram.resident else ", the others in host memory" if plan.memory.records else ", the others below"
        yield "tiers", f"{share:.0%} on the GPU", f"{plan.vram.n_slots:,} of {plan.vram.n_experts:,} experts{below}"
        yield "one token needs", format_bytes(plan.working_set_bytes), f"{plan.working_set:,} experts"
        return
    on_disk = plan.n_experts - plan.n_slots
    yield "tiers", f"{plan.share:.0%} in memory", f"{plan.n_slots:,} of {plan.n_experts:,} experts; {on_disk:,} on disk only"
    tokens = plan.n_slots / plan.working_set
    needs = f"{plan.working_set:,} experts; memory holds {tokens:.1f} times that"
    yield "one token needs", format_bytes(plan.working_set_bytes), needs
    yield "runs from", format_at_least(plan.smallest_budget), "the smallest budget"
    yield "cliff", format_at_least(plan.cliff_budget), "below it one token's experts do not fit: no hits in an LRU cache"
    yield "all in memory from", format_at_least(plan.resident_budget), ""


def _speed(report: PlanReport) -> Iterator[Row]:
    plan, forecast, rates = report.plan, report.plan.forecast, report.rates
    if rates.drive:
        how = "as given" if report.drive is None else "measured cold" if report.drive.cold else "measured, but NOT COLD"
        yield "drive", f"{format_bytes(rates.drive)}/s", f"random experts, {how}"
    if rates.memory:
        reads = f"{format_bytes(forecast.memory_bytes)} are read per token, at half the context"
        yield "memory", f"{format_bytes(rates.memory)}/s", reads
    if plan.resident:
        yield "speed, at best", _range(forecast.uniform.tok_s, forecast.uniform.tok_s), _bounds(forecast.uniform)
    else:
        low, high = forecast.uniform, forecast.local
        yield "uniform routing", f"{low.hit_rate:.0%} hits", _reads(low)
        yield "routing with locality", f"{high.hit_rate:.0%} hits", f"{_reads(high)} (an estimate, from published hit rates)"
        yield "speed, at best", _range(low.tok_s, high.tok_s), _bounds(low, high)
    yield "first token, at best", *_first(forecast.first_token, rates.macs is not None)
    if forecast.load_seconds is not None:
        yield "loading, at best", f"{forecast.load_seconds:.1f} s", "trunk and all experts" if plan.resident else "trunk"


def _faster(report: PlanReport) -> Iterator[Row]:
    for i, choice in enumerate(report.faster):
        speed = _range(*choice.tok_s) if choice.tok_s else ""
        yield "faster with" if i == 0 else "", speed, choice.what


def _reads(case: Case) -> str:
    return f"{format_bytes(case.drive_bytes)} from the drive per token"


def _range(low: float | None, high: float | None) -> str:
    if low is None or high is None:
        return "unknown"
    ends = dict.fromkeys(f"{speed:.3g}" for speed in (low, high))
    return f"{' – '.join(ends)} tok/s"


def _bounds(*cases: Case) -> str:
    return f"bound by {', then by '.join(dict.fromkeys(str(case.bound) for case in cases))}"


def _first(first: FirstToken, arithmetic: bool) -> tuple[str, str]:
    seconds = "unknown" if first.seconds is None else f"{first.seconds:.2g} s"
    reads = f"{format_bytes(first.drive_bytes)} to read (cold)" if first.drive_bytes else "nothing to read"
    bound = f"bound by {first.bound}{'' if arithmetic else ', arithmetic unknown'}"
    return seconds, f"{first.prompt:,}-token prompt; {reads}; {bound}"
