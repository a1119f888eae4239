"""One walk through the layers for a batch of segments: the same code for prefill and decode, one sequence or many.

Linear and expert blocks see all tokens as one [T, hidden]; mixers see each segment with its own state.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import numpy.typing as npt

from moeflux.backends.ops import Ops, Span
from moeflux.backends.state import Array
from moeflux.core.errors import NumericError
from moeflux.models.spec import ModelSpec
from moeflux.runtime.batch import Batch
from moeflux.runtime.experts import Experts
from moeflux.runtime.ring import Ring
from moeflux.runtime.text_size import turn_rows
from moeflux.runtime.trunk import Trunk
from moeflux.store.cancel import CancelFlag

F32 = npt.NDArray[np.float32]
LayerRecord = Callable[[int, str, Array], None]
Routing = tuple[Array, Array]  # ids and weights, [T, k] each


@dataclass(frozen=True)
class Model:
    """What a forward needs."""

    spec: ModelSpec
    ops: Ops
    trunk: Trunk
    experts: Experts
    ring: Ring


def forward(model: Model, batch: Batch, cancel: CancelFlag | None = None) -> list[F32 | None]:
    """Advance every sequence of the batch by its tokens. Per segment: logits [wanted rows, vocab], or None."""
    batch.check(model.spec.vocab)
    if cancel:
        cancel.check()
    try:
        with np.errstate(over="ignore", invalid="ignore"):  # what overflows is caught below
            logits = _run(model, batch, cancel)
    except BaseException as error:
        model.ring.discard()
        for segment in batch.segments:
            segment.sequence.mark_broken(f"{type(error).__name__}: {error}")
        raise
    for segment in batch.segments:
        segment.sequence.tokens += [int(token) for token in segment.tokens]
    return logits


def _run(model: Model, batch: Batch, cancel: CancelFlag | None) -> list[F32 | None]:
    ops, trunk = model.ops, model.trunk
    record = _recorder(ops, batch)
    x = ops.embed(trunk.embedding, batch.tokens())
    if record:
        record(-1, "embedding", x)
    x = _run_layers(model, batch, x, record, cancel)
    if record:
        record(len(trunk.layers), "final", x)
    _hand_over(model, batch, x)
    rows = batch.wanted_rows()
    return _split(_head(model, x[rows]), batch) if rows else [None] * len(batch.segments)


def _head(model: Model, x: Array) -> F32:
    ops, spec, trunk = model.ops, model.spec, model.trunk
    logits: F32 = ops.to_numpy(ops.head(x, trunk.final_norm, trunk.head, spec.norm_eps))
    if not np.isfinite(logits).all():
        raise NumericError("the logits are not finite", hint="a weight of the model is broken")
    return logits


def _hand_over(model: Model, batch: Batch, x: Array) -> None:
    """Logits to those who take them a few at a time."""
    step = turn_rows(model.spec.vocab)
    for segment, start in zip(batch.segments, batch.starts, strict=True):
        if segment.take is not None:
            for at in range(0, len(segment.tokens), step):
                stop = start + min(at + step, len(segment.tokens))
                segment.take(at, _head(model, x[start + at : stop]))


def _run_layers(model: Model, batch: Batch, x: Array, record: LayerRecord | None, cancel: CancelFlag | None) -> Array:
    layers = model.trunk.layers
    stream = model.experts.stream
    model.experts.begin_step(batch.tokens(), batch.decodes())
    if record is None and stream is not None:
        y = model.ops.run_layers(layers, x, batch.spans, stream, cancel.native if cancel else None)
        if y is not None:
            model.experts.end_streamed_step()
            return y
    model.experts.store.next_token()
    for index in range(len(layers)):
        if cancel:
            cancel.check()
        x = layer_forward(model, index, x, batch.spans(index), record, cancel=cancel)
    return x


def layer_forward(
    model: Model,
    index: int,
    x: Array,
    spans: Sequence[Span],
    record: LayerRecord | None = None,
    routing: Routing | None = None,
    cancel: CancelFlag | None = None,
) -> Array:
    """One layer over [T, hidden], perhaps in place. `routing` forces the experts: for comparing kernels only."""
    ops, layer, eps = model.ops, model.trunk.layers[index], model.spec.norm_eps
    note = partial(record, index) if record else None
    if note:
        note("input", x)
    try:
        x, h, ids, weights = ops.run_mixer(layer, x, spans, eps, note)
    except NumericError as error:
        error.where = f"layer {index}"
        raise
    if ids is None:
        x = ops.run_ffn(layer, x, h, None, None, (), note)
    else:
        ids, weights = routing or (ids, weights)
        if note:
            note("router_ids", ids)
            note("router_weights", weights)
        with model.experts.acquire(index, ops.to_numpy(ids), spans) as lease:
            model.ring.begin(partial(ops.run_ffn, layer, x, h, ids, weights, lease.arrivals(cancel), note))
            x = model.ring.complete()
    if note:
        note("output", x)
    return x


def _recorder(ops: Ops, batch: Batch) -> LayerRecord | None:
    """None where nothing is traced: backends may then run a layer as a whole."""
    traced = [(s.trace, start, s) for s, start in zip(batch.segments, batch.starts, strict=True) if s.trace is not None]
    if not traced:
        return None

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
        n = segment.n_returned
        result.append(logits[at : at + n] if n else None)
        at += n
    return result
