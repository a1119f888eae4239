"""The CUDA backend: one GPU."""

from __future__ import annotations

from functools import cached_property

from moeflux.backends.base import Backend, Costs, DeviceRoom, OpenModel, Tiers, WeightSizes
from moeflux.backends.cuda.costs import model_costs, shape_refusal
from moeflux.backends.cuda.device import Device
from moeflux.backends.cuda.ops import CudaOps
from moeflux.backends.cuda.runner import CudaRunner
from moeflux.core.config import EngineConfig
from moeflux.models.spec import ModelSpec


class CudaBackend(Backend):
    name = "cuda"

    def __init__(self, config: EngineConfig, device: Device) -> None:
        self.device = device

    @cached_property
    def ops(self) -> CudaOps:
        return CudaOps(self.device)

    def costs(self, spec: ModelSpec, sizes: WeightSizes, chunk: int) -> Costs:
        return model_costs(spec, sizes, chunk)

    @property
    def room(self) -> DeviceRoom:
        return DeviceRoom(self.device.title, self.device.total_bytes, self.device.free_bytes)

    def refusal(self, spec: ModelSpec, sizes: WeightSizes) -> str | None:
        return shape_refusal(spec, sizes)

    def runner(self, model: OpenModel, tiers: Tiers) -> CudaRunner:
        return CudaRunner(self.ops, model, tiers)
