"""What stores of several sizes would have done with a recorded trace: hits by size, policy and prediction. Not speed."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from moeflux.bench.routing import overlap
from moeflux.core.errors import OptionError
from moeflux.store.policy import Residency
from moeflux.store.replay import Prediction, ReplayResult, replay
from moeflux.store.trace import RoutingTrace

SHARES = (0.25, 0.5, 0.75)
LOOKS = 200  # at residency, at most


@dataclass(frozen=True)
class ReplayReport:
    trace: RoutingTrace
    path: Path
    warmup: int
    overlap: float | None
    results: tuple[ReplayResult, ...]

    @property
    def n_experts(self) -> int:
        return _n_experts(self.trace)

    @property
    def counted(self) -> int:
        """Tokens after the warm-up."""
        return int((_step_numbers(self.trace) >= self.warmup).sum())

    def as_dict(self) -> dict[str, Any]:
        return {
            "bench": "replay",
            "model": self.trace.model,
            "tokens": len(self.trace),
            "counted": self.counted,
            "layers": len(self.trace.layers),
            "n_experts": self.n_experts,
            "overlap": self.overlap,
            "warmup": self.warmup,
            "rows": [
                {
                    "n_slots": r.n_slots,
                    "share": r.n_slots / self.n_experts,
                    "policy": r.policy,
                    "prediction": r.prediction,
                    "asked": r.asked,
                    "hit_rate": r.hit_rate,
                    "reads": r.reads,
                    "recall": r.recall,
                    "precision": r.precision if r.hints_issued else None,
                }
                for r in self.results
            ],
        }


@dataclass(frozen=True)
class Heat:
    """By layer and expert, [L, E]."""

    use: npt.NDArray[np.float64]  # share of the tokens that chose it
    residency: npt.NDArray[np.float64]  # share of the time that it was in memory
    result: ReplayResult


def bench_replay(
    path: Path,
    *,
    slots: Sequence[int] = (),
    shares: Sequence[float] = (),
    policies: Sequence[str] = ("lru",),
    predictions: Sequence[Prediction] = ("none",),
    warmup: int = 0,
) -> ReplayReport:
    """Every size with every policy and prediction; the sizes are `SHARES` of the experts where none is given."""
    trace = RoutingTrace.load(path)
    if len(trace) == 0:
        raise OptionError("the trace is empty", where=str(path))
    if warmup > _step_numbers(trace)[-1]:
        raise OptionError(f"{warmup} steps of warm-up leave nothing", where=str(path), hint="see option 'warmup'")
    if any(n < 1 for n in slots):
        raise OptionError(f"{min(slots)} is too few", where="option 'slots'", hint="at least 1")
    if not policies or not predictions:
        raise OptionError("there is nothing to compare", where="options 'policy' and 'prediction'")
    if not slots and not shares:
        shares = SHARES
    sizes = [*slots, *(_slots_for(share, trace) for share in shares)]
    cases = [(n, policy, prediction) for n in sizes for policy in policies for prediction in predictions]
    results = tuple(replay(trace, n, policy, prediction, warmup) for n, policy, prediction in cases)
    return ReplayReport(trace, path, warmup, trace_overlap(trace), results)


def measure_heat(trace: RoutingTrace, result: ReplayResult, warmup: int = 0) -> Heat:
    """Of one of the results, replayed while looking at what is in memory."""
    n_layers, n_experts = len(trace.layers), trace.n_experts
    looks = np.zeros((n_layers, n_experts))
    every, n_looks = max(1, (int(_step_numbers(trace)[-1]) - warmup) // LOOKS), 0

    def look(step: int, residency: Residency) -> None:
        nonlocal n_looks
        if step < warmup or step % every:
            return
        n_looks += 1
        for layer in range(n_layers):
            looks[layer] += [residency.holds(layer, expert) for expert in range(n_experts)]

    again = replay(trace, result.n_slots, result.policy, result.prediction, warmup, look)
    keys = (np.arange(n_layers)[:, None] * n_experts + trace.ids).ravel()
    use = np.bincount(keys, minlength=n_layers * n_experts).reshape(n_layers, n_experts) / len(trace)
    return Heat(use, looks / max(1, n_looks), again)


def trace_overlap(trace: RoutingTrace) -> float | None:
    """Of the experts of tokens that were run one by one with those of the token before, in the same layer."""
    alone = np.bincount(trace.steps, minlength=1)[trace.steps] == 1
    found = [overlap(trace.ids[i - 1], trace.ids[i]) for i in range(1, len(trace)) if alone[i]]
    return float(np.mean(found)) if found else None


def _step_numbers(trace: RoutingTrace) -> npt.NDArray[np.intp]:
    """[T], counted from 0 without gaps."""
    return np.unique(trace.steps, return_inverse=True)[1]


def _n_experts(trace: RoutingTrace) -> int:
    return trace.n_experts * len(trace.layers)


def _slots_for(share: float, trace: RoutingTrace) -> int:
    if not 0 < share <= 1:
        raise OptionError(f"{share:g} is no share", where="option 'share'", hint="above 0 and up to 1")
    return max(1, round(share * _n_experts(trace)))
