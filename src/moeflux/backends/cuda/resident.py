"""A decoder of an open model with every expert in device memory: the slots are filled from the store, once."""

from __future__ import annotations

import numpy as np

from moeflux.backends.base import ExpertSource, TrunkWeights
from moeflux.backends.cuda.decode import Decoder
from moeflux.backends.cuda.memory import AffineMatrix
from moeflux.backends.cuda.ops import CudaOps
from moeflux.backends.cuda.phases import DecodeOptions
from moeflux.backends.cuda.pool import ExpertPool, ExpertShape
from moeflux.backends.cuda.step_weights import Ends, refusal
from moeflux.core.errors import DeviceError
from moeflux.core.units import format_bytes
from moeflux.models.spec import Moe

WHERE = "backend 'cuda'"
AT_ONCE = 64  # experts that are leased together


def open_decoder(ops: CudaOps, trunk: TrunkWeights, experts: ExpertSource, options: DecodeOptions) -> Decoder:
    """Raises where the model has no decode step or its experts do not fit."""
    if not isinstance(trunk.embedding, AffineMatrix) or not isinstance(trunk.head, AffineMatrix):
        raise DeviceError("no decode step for this model: its embedding is not quantised", where=WHERE)
    ends = Ends(trunk.embedding, trunk.final_norm, trunk.head)
    if reason := refusal(trunk.layers, ends):
        raise DeviceError(f"no decode step for this model: {reason}", where=WHERE, hint="run it block by block")
    return Decoder(ops, trunk.layers, ends, fill_pool(ops, trunk, experts), options)


def fill_pool(ops: CudaOps, trunk: TrunkWeights, experts: ExpertSource) -> ExpertPool:
    """Every expert of every layer in a slot."""
    moe = trunk.layers[0].spec.ffn
    assert isinstance(moe, Moe)
    count, n_layers = moe.router.n_experts, len(trunk.layers)
    shape = ExpertShape(len(trunk.final_norm), moe.width)
    need = count * n_layers * shape.slot_words * 4
    if need > ops.device.free_bytes:
        raise DeviceError(
            f"{count * n_layers} experts need {format_bytes(need)}, {ops.device.title} has "
            f"{format_bytes(ops.device.free_bytes)} of {format_bytes(ops.device.total_bytes)} free",
            where=WHERE,
            hint="end what else uses the GPU, or use backend='native'",
        )
    pool = ExpertPool(ops.device, shape, count * n_layers, n_layers, count)
    for layer in range(n_layers):
        for start in range(0, count, AT_ONCE):
            with experts.acquire(layer, np.arange(start, min(start + AT_ONCE, count))[None]) as lease:
                for bank, arrived in lease.arrivals():
                    for expert in arrived:
                        pool.put(layer, expert, layer * count + expert, bank[expert])
    return pool
