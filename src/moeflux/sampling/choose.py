"""One token out of logits: truncation and a draw, in a few passes over the vocabulary and without sorting it.

Ties at every boundary go to the lowest id. A draw is a number from 0 to 1 laid along the kept tokens in order of id, so the
same number and logits always give the same token.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import numpy.typing as npt

import moeflux._native as _native
from moeflux.sampling.params import SamplingParams

F32 = npt.NDArray[np.float32]
Floats = npt.NDArray[Any]  # float32 or float64
Ids = npt.NDArray[np.int64]
Allowed = npt.NDArray[np.bool_]  # at least one of them true

GROUP = 64  # entries whose largest stands for them
SORTED = 4096  # weights that are few enough to sort
CLOSE = 1e-6  # to the largest weight


def choose(
    logits: F32, params: SamplingParams, draw: float, allowed: Allowed | None = None, known: Ids | None = None
) -> int:
    """The index of the chosen entry, among the allowed ones. `draw` from 0 to below 1; greedy params do not use it.

    `known`: where the largest entries are, so many as were looked for already, in order of index.
    """
    if allowed is not None and np.count_nonzero(allowed) <= SORTED:
        few = np.flatnonzero(allowed)
        return int(few[choose(logits[few], params, draw)])
    if params.greedy:
        best = int(np.argmax(logits))
        return best if allowed is None or allowed[best] else int(np.argmax(_without(logits, allowed)))
    ids: Ids | None = None  # None: all
    if 0 < params.top_k < len(logits):
        if known is not None and allowed is None and params.top_k <= len(known):
            ids = known[largest(logits[known], params.top_k)]
        else:
            ids = _largest_allowed(logits, params.top_k, allowed)
        logits, allowed = logits[ids], None
    weights = _weights(logits, params.temperature, allowed)
    bound, count = _nucleus(weights, params.top_p) if params.top_p < 1 else (0.0, None)
    if params.min_p > 0 and (least := params.min_p * weights.max()) > bound:
        bound, count = least, None
    index = _draw(weights, bound, count, draw)
    return index if ids is None else int(ids[index])


def _without(logits: F32, allowed: Allowed) -> F32:
    return np.where(allowed, logits, np.float32(-np.inf))


def _largest_allowed(logits: F32, k: int, allowed: Allowed | None) -> Ids:
    if allowed is None:
        return largest(logits, k)
    some = largest(logits, min(4 * k + 64, len(logits)))  # most of them are allowed, most of the time
    some = some[allowed[some]]
    return some[largest(logits[some], k)] if len(some) >= k else largest(_without(logits, allowed), k)


def largest(logits: F32, k: int) -> Ids:
    """Where the k largest are, in order of index."""
    n = len(logits) // GROUP * GROUP
    if k * GROUP < n:  # the k-th largest of the groups' largest is a bound: at least k entries reach it
        tops = logits[:n].reshape(GROUP, -1).max(axis=0)
        bound = np.partition(tops, len(tops) - k)[len(tops) - k]
        ids = np.flatnonzero(logits >= bound)
    else:
        ids = np.arange(len(logits))
    values = logits[ids]
    order = np.lexsort((ids, -values))[:k] if len(ids) <= SORTED else _top_of_many(values, k)
    return np.sort(ids[order])


def _top_of_many(values: F32, k: int) -> Ids:
    bound = np.partition(values, len(values) - k)[len(values) - k]
    above, ties = np.flatnonzero(values > bound), np.flatnonzero(values == bound)
    return np.concatenate([above, ties[: k - len(above)]])


def _weights(logits: F32, temperature: float, allowed: Allowed | None = None) -> Floats:
    """Relative to the largest, which is 1. In double precision where they are few."""
    peak = logits.max()
    if len(logits) <= SORTED:
        with np.errstate(over="ignore"):  # a tiny temperature: infinitely far below
            few: Floats = np.exp((logits.astype(np.float64) - peak) / temperature)
        return few if allowed is None else few * allowed
    weights = np.empty(len(logits), np.float32)
    _native.weigh(logits, None if allowed is None else allowed.view(np.uint8), float(peak), temperature, weights)
    if allowed is not None and weights.max() < CLOSE:  # what is allowed lies far below what is not, where weights are coarse
        return _weights(_without(logits, allowed), temperature)
    return weights


def log_total(logits: F32) -> float:
    """What is subtracted from a logit to give its log-probability."""
    peak = float(logits.max())
    return peak + math.log(_native.exp_total(logits, peak))


def _nucleus(weights: Floats, top_p: float) -> tuple[float, int]:
    """The least weight of the smallest set of the largest ones that holds this share of all, and how many it has."""
    if len(weights) > SORTED:
        return _native.nucleus(weights, top_p)
    ranked = np.sort(weights)[::-1]
    held = np.cumsum(ranked)
    last = min(int(np.searchsorted(held, top_p * held[-1])), len(ranked) - 1)
    return ranked[last], last + 1


def _draw(weights: Floats, bound: float, count: int | None, draw: float) -> int:
    """Among the weights from `bound` on: all of them, or `count`, without the last ones that equal it."""
    if len(weights) > SORTED:
        return _native.draw(weights, bound, -1 if count is None else count, draw)
    kept = np.flatnonzero((weights >= bound) & (weights > 0))
    if count is not None and (surplus := len(kept) - count) > 0:
        kept = np.delete(kept, np.flatnonzero(weights[kept] == bound)[-surplus:])
    ends = np.cumsum(weights[kept])
    return int(kept[min(int(np.searchsorted(ends, draw * ends[-1], side="right")), len(kept) - 1)])
