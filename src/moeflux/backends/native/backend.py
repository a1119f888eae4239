"""The native backend: one native call runs all layers and the head; layer by layer where something is traced."""

from __future__ import annotations

from functools import cached_property

import numpy as np

from moeflux.backends.base import F32, Backend, Batch, Cancel, Costs, OpenModel, TierCosts, Tiers, WeightSizes
from moeflux.backends.composed import ComposedRunner, finite
from moeflux.backends.native.arena import arena_bytes
from moeflux.backends.native.ops import NativeOps, available_isas
from moeflux.backends.native.scratch import scratch_bytes
from moeflux.core.config import EngineConfig, Hints
from moeflux.core.errors import OptionError
from moeflux.models.spec import ModelSpec


class NativeBackend(Backend):
    name = "native"

    def __init__(self, config: EngineConfig) -> None:
        if config.isa not in ("auto", *available_isas()):
            hint = f"available: {', '.join(available_isas())}"
            raise OptionError(f"this machine has no {config.isa}", where="option 'isa'", hint=hint)
        self._threads, self._isa, self._hints = config.n_threads, config.isa, config.hints

    @cached_property
    def ops(self) -> NativeOps:
        return NativeOps(self._threads, self._isa)

    def costs(self, spec: ModelSpec, sizes: WeightSizes, chunk: int) -> Costs:
        """Matrices as they are stored, on huge pages; vectors in float32."""
        trunk = sizes.trunk_vectors + arena_bytes(sizes.trunk_matrices)
        return Costs(TierCosts(trunk, scratch_bytes(spec, chunk, self._threads, sizes.integer), keeps_states=True))

    def measure(self, n_bytes: int) -> tuple[int, float, float]:
        ops = NativeOps(self._threads, self._isa)
        buffer = ops.allocate(n_bytes)
        buffer[:] = 1  # so that every page is there
        seconds = min(ops.time_read(buffer) for _ in range(3))
        return self._threads, n_bytes / seconds, ops.multiply_rate()

    def runner(self, model: OpenModel, tiers: Tiers) -> NativeRunner:
        return NativeRunner(self.ops, model, self._hints)


class NativeRunner(ComposedRunner):
    def __init__(self, ops: NativeOps, model: OpenModel, hints: Hints = "both") -> None:
        super().__init__(ops, model)
        self._native, self._recording = ops, False
        self._layers = [layer for layer, _ in model.spec.moe_layers()]
        self._k = max(moe.router.k for _, moe in model.spec.moe_layers())
        if model.experts.native is not None and all(layer.fused is not None for layer in model.trunk.layers):
            self.stream = ops.open_stream(model.experts.native, hints, self._k)

    def run(self, batch: Batch, cancel: Cancel | None = None) -> F32 | None:
        if self.stream is None or batch.recorder(self.ops.to_numpy) is not None:
            return super().run(batch, cancel)
        trunk, experts, spec = self.model.trunk, self.model.experts, self.model.spec
        if experts.recording != self._recording:
            self._recording = experts.recording
            self.stream.record(self._recording)
        experts.begin_step(batch.tokens(), batch.decodes())
        x = self._native.embed(trunk.embedding, batch.tokens())
        wanted = batch.wanted_rows()
        head = (trunk.final_norm, spec.norm_eps, trunk.head, wanted) if wanted else None
        logits = self._native.run_layers(trunk.layers, x, batch.spans, self.stream, cancel.native if cancel else None, head)
        if self._recording:
            self._tell(len(x))
        for rows, take in batch.handed_rows(spec.vocab):
            take(self.head(x[rows]))
        return None if logits is None else finite(logits)

    def _tell(self, n_tokens: int) -> None:
        """Who records routing is told what the step chose."""
        assert self.stream is not None
        ids = np.frombuffer(self.stream.routed, dtype=np.int16).reshape(len(self._layers), n_tokens, self._k)
        for layer, chosen in zip(self._layers, ids, strict=True):
            self.model.experts.record(layer, chosen)
