"""What would make a model faster on this machine, by planning again with more: each way with the speed it would give."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from typing import Any

from moeflux.core.units import format_at_least, format_bytes
from moeflux.models.spec import ModelSpec
from moeflux.plan.forecast import MEMORY
from moeflux.plan.needs import Resources
from moeflux.plan.plan import Plan, make_plan
from moeflux.plan.sizes import Sizes

WORTH = 1.05  # times as fast, at one end of the range


@dataclass(frozen=True)
class Choice:
    what: str
    tok_s: tuple[float, float] | None  # uniform, local; None where it cannot be said in numbers

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)


def suggest(spec: ModelSpec, sizes: Sizes, resources: Resources, plan: Plan) -> tuple[Choice, ...]:
    now = _speeds(plan)
    if now is None:
        return ()
    found = []
    for what, more in _ways(resources, plan):
        speeds = _speeds(make_plan(spec, sizes, more))
        if speeds and any(new >= WORTH * old for new, old in zip(speeds, now, strict=True)):
            found.append(Choice(what, speeds))
    if plan.forecast.uniform.bound == MEMORY or (not found and plan.forecast.local.bound == MEMORY):
        found.append(Choice("memory that reads faster, or a checkpoint with fewer bits per weight", None))
    return tuple(found)


def _ways(resources: Resources, plan: Plan) -> Iterator[tuple[str, Resources]]:
    if plan.resident:
        return
    if plan.n_slots < plan.working_set:
        yield f"{_budget(plan.cliff_budget)}: one token's working set", replace(resources, budget=plan.cliff_budget)
    if 2 * plan.budget < plan.resident_budget:
        yield f"{_budget(2 * plan.budget)}: twice the budget", replace(resources, budget=2 * plan.budget)
    yield f"{_budget(plan.resident_budget)}: every expert in memory", replace(resources, budget=plan.resident_budget)
    if resources.rates.drive:
        faster = replace(resources.rates, drive=2 * resources.rates.drive)
        yield f"a drive of {format_bytes(2 * resources.rates.drive)}/s", replace(resources, rates=faster)


def _budget(n: int) -> str:
    return f"--ram {format_at_least(n)}"


def _speeds(plan: Plan) -> tuple[float, float] | None:
    low, high = plan.forecast.uniform.tok_s, plan.forecast.local.tok_s
    return None if low is None or high is None else (low, high)
