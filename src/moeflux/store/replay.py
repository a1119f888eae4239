"""What a store would have done with a recorded trace: hits and misses by size, policy and prediction. Not speed."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal, get_args

import numpy as np
import numpy.typing as npt

from moeflux.core.errors import OptionError
from moeflux.store.policy import Residency, layer_floor
from moeflux.store.trace import RoutingTrace

Prediction = Literal["none", "previous", "perfect"]
PREDICTIONS = get_args(Prediction)


@dataclass(frozen=True)
class ReplayResult:
    """What a store of this size would have done."""

    n_slots: int
    policy: str
    prediction: Prediction
    asked: int  # distinct experts
    hits: int
    named: int  # of these, named by the prediction
    hints_issued: int  # missing ones that found a slot
    hints_useful: int

    @property
    def hit_rate(self) -> float:
        return self.hits / self.asked if self.asked else 0.0

    @property
    def recall(self) -> float:
        """Share of the experts asked for that the prediction had named."""
        return self.named / self.asked if self.asked else 0.0

    @property
    def precision(self) -> float:
        """Share of the hints' reads that were of use."""
        return self.hints_useful / self.hints_issued if self.hints_issued else 0.0

    @property
    def reads(self) -> int:
        """Experts read, for demands and hints."""
        return self.asked - self.hits + self.hints_issued


def replay(
    trace: RoutingTrace,
    n_slots: int,
    policy: str = "lru",
    prediction: Prediction = "none",
    warmup: int = 0,
    look: Callable[[int, Residency], None] | None = None,
) -> ReplayResult:
    """Run a trace through a store that starts empty. Counting begins after `warmup` steps.

    `previous`: a layer will ask for what it asked for in the step before. `perfect`: for what it will ask for, one layer
    ahead, as the bound of any prediction. `look` is told the number of each step when it is over.
    """
    if prediction not in PREDICTIONS:
        hint = f"one of {', '.join(PREDICTIONS)}"
        raise OptionError(f"unknown prediction {prediction!r}", where="option 'prediction'", hint=hint)
    _, n_layers, k = trace.ids.shape
    residency = Residency(n_layers, trace.n_experts, n_slots, layer_floor(n_slots, n_layers, k), policy)
    asked = hits = named = issued = before = 0
    nothing: list[set[int]] = [set()] * n_layers
    previous = nothing
    for number, (rows, decodes) in enumerate(_steps(trace)):
        if number == warmup:
            asked = hits = named = issued = 0
            before = residency.hints_useful
        residency.next_token()
        wanted = _distinct(rows)
        demanded = _distinct(rows[decodes])
        guesses = {"none": nothing, "previous": previous, "perfect": wanted}[prediction]
        for layer in range(n_layers):
            if layer + 1 < n_layers:
                issued += len(residency.hint(layer + 1, sorted(guesses[layer + 1])))
            swept = sorted(wanted[layer] - demanded[layer])
            misses = residency.access(layer, sorted(demanded[layer]), swept=swept)
            asked += len(wanted[layer])
            hits += len(wanted[layer]) - len(misses)
            named += len(wanted[layer] & guesses[layer])
        previous = wanted
        if look:
            look(number, residency)
    useful = residency.hints_useful - before
    return ReplayResult(n_slots, policy, prediction, asked, hits, named, issued, useful)


def _distinct(rows: npt.NDArray[np.int16]) -> list[set[int]]:
    """By layer, from [T, L, K]."""
    return [set(rows[:, layer].ravel().tolist()) for layer in range(rows.shape[1])]


def _steps(trace: RoutingTrace) -> list[tuple[npt.NDArray[np.int16], npt.NDArray[np.bool_]]]:
    """Of each step the choices [T, L, K], and which rows decode [T]."""
    if not len(trace):
        return []
    starts = np.flatnonzero(np.diff(trace.steps, prepend=-1))[1:]
    return list(zip(np.split(trace.ids, starts), np.split(trace.decodes, starts), strict=True))
