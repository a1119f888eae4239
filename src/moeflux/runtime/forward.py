"""One walk through the layers for a batch of segments: the same code for prefill and decode, one sequence or many.

Linear and expert blocks see all tokens as one [T, hidden]; mixers see each segment with its own state.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from moeflux.backends.ops import Ops, Span
from moeflux.backends.state import Array
from moeflux.core.errors import NumericError
from moeflux.models.spec import ModelSpec, Moe
from moeflux.runtime.batch import Batch
from moeflux.runtime.demand import DemandExperts
from moeflux.runtime.trunk import Trunk, TrunkLayer

F32 = npt.NDArray[np.float32]
Record = Callable[[int, str, Array], None]
Routing = tuple[Array, Array]  # ids and weights, [T, k] each


@dataclass(frozen=True)
class Model:
    """What a forward needs; nothing in it changes."""

    spec: ModelSpec
    ops: Ops
    trunk: Trunk
    experts: DemandExperts


def forward(model: Model, batch: Batch) -> list[F32 | None]:
    """Advance every sequence of the batch by its tokens. Per segment: logits [wanted rows, vocab], or None."""
    batch.check(model.spec.vocab)
    try:
        with np.errstate(over="ignore", invalid="ignore"):  # what overflows is caught below
            logits = _run(model, batch)
    except BaseException as error:
        for segment in batch.segments:
            segment.sequence.mark_broken(f"{type(error).__name__}: {error}")
        raise
    for segment in batch.segments:
        segment.sequence.tokens += [int(token) for token in segment.tokens]
    return logits


def _run(model: Model, batch: Batch) -> list[F32 | None]:
    ops, spec, trunk = model.ops, model.spec, model.trunk
    record = _recorder(ops, batch)
    x = ops.embed(trunk.embedding, batch.tokens())
    record(-1, "embedding", x)
    for index, layer in enumerate(trunk.layers):
        x = layer_forward(model, index, layer, x, batch.spans(index), record)
    record(len(trunk.layers), "final", x)
    rows = batch.wanted_rows()
    if not rows:
        return [None] * len(batch.segments)
    logits = ops.to_numpy(ops.head(x[rows], trunk.final_norm, trunk.head, spec.norm_eps))
    if not np.isfinite(logits).all():
        raise NumericError("the logits are not finite", hint="a weight of the model is broken")
    return _split(logits, batch)


def layer_forward(
    model: Model,
    index: int,
    layer: TrunkLayer,
    x: Array,
    spans: Sequence[Span],
    record: Record,
    routing: Routing | None = None,
) -> Array:
    """One layer over [T, hidden]. `routing` forces the experts: kernels are compared with it, never served with it."""
    ops, eps = model.ops, model.spec.norm_eps
    record(index, "input", x)
    mixed = ops.mix(ops.rms_norm(x, layer.mixer_norm, eps), layer.mixer, layer.spec.mixer, spans, eps)
    record(index, "mixer", mixed)
    x = x + mixed
    h = ops.rms_norm(x, layer.ffn_norm, eps)
    record(index, "ffn_input", h)
    if isinstance(layer.spec.ffn, Moe):
        y = _moe(model, index, layer, layer.spec.ffn, h, record, routing)
    else:
        y = ops.mlp(h, layer.ffn)
    x = x + y
    record(index, "output", x)
    return x


def _moe(model: Model, index: int, layer: TrunkLayer, moe: Moe, h: Array, record: Record, routing: Routing | None) -> Array:
    ops, weights = model.ops, layer.ffn
    logits = ops.linear(h, weights["router"])
    record(index, "router_logits", logits)
    try:
        ids, shares = routing or ops.route(logits, weights.get("router_bias"), moe.router)
    except NumericError as error:
        error.where = f"layer {index}"
        raise
    record(index, "router_ids", ids)
    record(index, "router_weights", shares)
    with model.experts.acquire(index, {int(i) for i in np.unique(ops.to_numpy(ids))}) as lease:
        y = ops.experts(h, ids, shares, lease)
    record(index, "experts", y)
    if moe.shared_width:
        shared = ops.shared_expert(h, weights)
        record(index, "shared", shared)
        y = y + shared
    return y


def _recorder(ops: Ops, batch: Batch) -> Record:
    traced = [(s.trace, start, s) for s, start in zip(batch.segments, batch.starts, strict=True) if s.trace is not None]

    def record(layer: int, name: str, rows: Any) -> None:
        for trace, start, segment in traced:
            if trace.wants(layer):
                values = ops.to_numpy(rows[start : start + len(segment.tokens)])
                trace.record(layer, name, len(segment.sequence), values)

    return record


def _split(logits: F32, batch: Batch) -> list[F32 | None]:
    result: list[F32 | None] = []
    at = 0
    for segment in batch.segments:
        n = {"all": len(segment.tokens), "last": 1, "none": 0}[segment.logits]
        result.append(logits[at : at + n] if n else None)
        at += n
    return result
