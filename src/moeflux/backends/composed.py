"""The composed runner: walks the blocks of `Ops` layer by layer. The reference for all others, and the one that traces.

Linear and expert blocks see all tokens as one [T, hidden]; mixers see each segment with its own state.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import numpy as np

from moeflux.backends.base import F32, Batch, Cancel, LayerRecord, OpenModel, Runner
from moeflux.backends.ops import LayerWeights, Ops, Record, Span
from moeflux.backends.ring import Ring
from moeflux.backends.state import Array
from moeflux.core.errors import NumericError

Routing = tuple[Array, Array]  # ids and weights, [T, k] each


class ComposedRunner(Runner):
    def __init__(self, ops: Ops, model: OpenModel, ring: int = 0) -> None:
        """`ring`: expert dispatches in flight."""
        self.ops, self.model = ops, model
        self.ring = Ring(ring)

    def run(self, batch: Batch, cancel: Cancel | None = None) -> F32 | None:
        ops, trunk, experts = self.ops, self.model.trunk, self.model.experts
        record = batch.recorder(ops.to_numpy)
        x = ops.embed(trunk.embedding, batch.tokens())
        if record:
            record(-1, "embedding", x)
        experts.begin_step(batch.tokens(), batch.decodes())
        experts.next_token()
        for index in range(len(trunk.layers)):
            if cancel:
                cancel.check()
            x = self.layer(index, x, batch.spans(index), record, cancel=cancel)
        if record:
            record(len(trunk.layers), "final", x)
        return self.logits(batch, x)

    def layer(
        self,
        index: int,
        x: Array,
        spans: Sequence[Span],
        record: LayerRecord | None = None,
        routing: Routing | None = None,
        cancel: Cancel | None = None,
    ) -> Array:
        """One layer over [T, hidden], perhaps in place. `routing` forces the experts: for comparing kernels only."""
        ops, layer, eps = self.ops, self.model.trunk.layers[index], self.model.spec.norm_eps
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
            x = self.feed(index, layer, (x, h), (ids, weights), spans, note, cancel)
        if note:
            note("output", x)
        return x

    def feed(
        self,
        index: int,
        layer: LayerWeights,
        rows: tuple[Array, Array],
        routing: Routing,
        spans: Sequence[Span],
        note: Record | None,
        cancel: Cancel | None,
    ) -> Array:
        """The second half of a layer with routed experts. `rows`: the residual stream, and its norm."""
        with self.model.experts.acquire(index, self.ops.to_numpy(routing[0]), spans) as lease:
            self.ring.begin(partial(self.ops.run_ffn, layer, *rows, *routing, lease.arrivals(cancel), note))
            return self.ring.complete()

    def logits(self, batch: Batch, x: Array) -> F32 | None:
        """Those that are wanted of the last layer's output [T, hidden]; others are handed to who takes them."""
        for rows, take in batch.handed_rows(self.model.spec.vocab):
            take(self.head(x[rows]))
        wanted = batch.wanted_rows()
        return self.head(x[wanted]) if wanted else None

    def head(self, x: Array) -> F32:
        ops, trunk = self.ops, self.model.trunk
        return finite(ops.to_numpy(ops.head(x, trunk.final_norm, trunk.head, self.model.spec.norm_eps)))

    def discard(self) -> None:
        self.ring.discard()

    def close(self) -> None:
        self.ring.close()


def finite(logits: F32) -> F32:
    if not np.isfinite(logits).all():
        raise NumericError("the logits are not finite", hint="a weight of the model is broken")
    return logits
