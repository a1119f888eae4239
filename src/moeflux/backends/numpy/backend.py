"""The numpy backend: the reference. Decodes weights to float32 and obeys no budget."""

from __future__ import annotations

from moeflux.backends.base import Backend, Costs, OpenModel, TierCosts, Tiers, WeightSizes
from moeflux.backends.composed import ComposedRunner
from moeflux.backends.native.scratch import scratch_bytes
from moeflux.backends.numpy.ops import NumpyOps
from moeflux.backends.ops import F32_BYTES
from moeflux.core.config import EngineConfig
from moeflux.models.spec import ModelSpec


class NumpyBackend(Backend):
    name = "numpy"
    obeys_budget = False
    streams = False  # slow enough for reads not to matter

    def __init__(self, config: EngineConfig) -> None:
        self._ring = config.ring
        self._ops = NumpyOps()

    @property
    def ops(self) -> NumpyOps:
        return self._ops

    def costs(self, spec: ModelSpec, sizes: WeightSizes, chunk: int) -> Costs:
        """All but the embedding table is decoded."""
        tied = spec.head is None
        weights = sum(weight.count for weight in spec.weights()) - (0 if tied else spec.embedding.count)
        trunk = weights * F32_BYTES + sizes.trunk - (0 if tied else sizes.trunk_read_per_token)
        return Costs(TierCosts(trunk, scratch_bytes(spec, chunk, 1, False), keeps_states=True))  # about as much as native

    def runner(self, model: OpenModel, tiers: Tiers) -> ComposedRunner:
        return ComposedRunner(self.ops, model, self._ring)
