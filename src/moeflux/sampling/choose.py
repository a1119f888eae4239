"""One token out of logits: truncation and a draw, in a few passes over the vocabulary and without sorting it.

Ties at every boundary go to the lowest id. A draw is a number from 0 to 1 laid along the kept tokens in order of id, so the
same number and logits always give the same token.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from moeflux.sampling.params import SamplingParams

F32 = npt.NDArray[np.float32]
Floats = npt.NDArray[Any]  # float32 or float64
Ids = npt.NDArray[np.int64]
Allowed = npt.NDArray[np.bool_]  # at least one of them true

GROUP = 64  # entries whose largest stands for them
BLOCK = 512  # weights that are summed together
SORTED = 4096  # weights that are few enough to sort
CLOSE = 1e-6  # to the largest weight
FAR = -87.0  # so far below the largest, a weight is 0: beyond, float32 is denormal, and processors slow down tenfold


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
    if params.top_p < 1:
        ids, weights = _kept(_nucleus(weights, params.top_p), ids, weights)
    if params.min_p > 0:
        ids, weights = _kept(np.flatnonzero(weights >= params.min_p * weights.max()), ids, weights)
    index = _draw(weights, draw)
    return index if ids is None else int(ids[index])


def _kept(chosen: Ids, ids: Ids | None, weights: Floats) -> tuple[Ids, Floats]:
    return chosen if ids is None else ids[chosen], weights[chosen]


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
    weights: Floats = logits.astype(np.float64) if len(logits) <= SORTED else logits.copy()
    weights -= logits.max()
    if temperature != 1:
        with np.errstate(over="ignore"):  # a tiny temperature: infinitely far below
            weights /= temperature
    if weights.min() >= FAR:
        np.exp(weights, out=weights)
    else:
        np.exp(np.maximum(weights, FAR, out=weights), out=weights)
        weights -= np.exp(weights.dtype.type(FAR))
    if allowed is not None:
        weights *= allowed
        if weights.max() < CLOSE:  # what is allowed lies far below what is not, where weights are coarse
            return _weights(_without(logits, allowed), temperature)
    return weights


def _nucleus(weights: Floats, top_p: float) -> Ids:
    """Where the smallest set of the largest weights is that holds this share of all."""
    total = float(weights.sum())
    least = (1 - top_p) * total / len(weights)  # all that are below it hold less than the share that is left out
    some = weights >= least
    if np.count_nonzero(some) <= SORTED:
        ids = np.flatnonzero(some)
        bound, n_kept = _bound(weights[ids], top_p * total)
        ids = ids[weights[ids] >= bound]
    else:
        bound, n_kept = _bound(weights[some], top_p * total)
        ids = np.flatnonzero(weights >= bound)
    if surplus := len(ids) - n_kept:
        ties = np.flatnonzero(weights[ids] == bound)
        ids = np.delete(ids, ties[-surplus:])
    return ids


def _bound(pool: Floats, wanted: float) -> tuple[float, int]:
    """The smallest weight of the nucleus, and how many there are. Halves the pool until it is worth sorting."""
    above, n_above = 0.0, 0
    while len(pool) > SORTED:
        middle = len(pool) // 2
        pool = np.partition(pool, middle)
        lower, upper = pool[:middle], pool[middle:]
        mass = float(upper.sum())
        if above + mass >= wanted:
            pool = upper
        else:
            pool, above, n_above = lower, above + mass, n_above + len(upper)
    pool = np.sort(pool)[::-1]
    last = min(int(np.searchsorted(above + np.cumsum(pool, dtype=np.float64), wanted)), len(pool) - 1)
    return pool[last], n_above + last + 1


def _draw(weights: Floats, draw: float) -> int:
    """Blocks first, then inside one: a running sum over the whole vocabulary would be slow."""
    n = len(weights) // BLOCK * BLOCK
    sums = np.append(weights[:n].reshape(-1, BLOCK).sum(axis=1), weights[n:].sum())
    ends = np.cumsum(sums, dtype=np.float64)
    point = draw * ends[-1]
    block = min(int(np.searchsorted(ends, point, side="right")), int(np.flatnonzero(sums)[-1]))
    inner = weights[block * BLOCK : (block + 1) * BLOCK]
    before = ends[block - 1] if block else 0.0
    index = int(np.searchsorted(np.cumsum(inner, dtype=np.float64), point - before, side="right"))
    return block * BLOCK + min(index, int(np.flatnonzero(inner)[-1]))
