"""A decoder of an open model with every expert in device memory: the slots are filled from the store, once."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from moeflux.backends.base import ExpertSource, TrunkWeights
from moeflux.backends.cuda.costs import SLOT_CODEC, layer_refusal
from moeflux.backends.cuda.decode import Decoder
from moeflux.backends.cuda.memory import AffineMatrix
from moeflux.backends.cuda.ops import CudaOps
from moeflux.backends.cuda.phases import DecodeOptions
from moeflux.backends.cuda.pool import ExpertPool, leased, pool_shape
from moeflux.backends.cuda.step_weights import Ends, refusal
from moeflux.core.errors import DeviceError
from moeflux.core.units import format_bytes
from moeflux.models.spec import Moe

WHERE = "backend 'cuda'"


def step_refusal(trunk: TrunkWeights) -> str | None:
    """Why this model has no decode step, or None."""
    if not isinstance(trunk.embedding, AffineMatrix) or not isinstance(trunk.head, AffineMatrix):
        return "its embedding is not quantised"
    for i, layer in enumerate(trunk.layers):
        if reason := layer_refusal(i, layer.spec):
            return reason
    return refusal(trunk.layers, Ends(trunk.embedding, trunk.final_norm, trunk.head))


def expert_refusal(trunk: TrunkWeights, experts: ExpertSource) -> str | None:
    """Why experts have no slots, or None: looks at one of each layer."""
    for layer in range(len(trunk.layers)):
        with experts.acquire(layer, np.zeros((1, 1), dtype=np.int64)) as lease:
            for bank, _ in lease.arrivals():
                for matrix in bank[0].values():
                    if matrix.codec != SLOT_CODEC:
                        return f"layer {layer}: slots hold experts of {SLOT_CODEC}, these are of {matrix.codec}"
    return None


def open_decoder(
    ops: CudaOps, trunk: TrunkWeights, experts: ExpertSource, options: DecodeOptions, pool: ExpertPool | None = None
) -> Decoder:
    """With every expert in a slot, unless a pool is given. Raises where the model has no decode step."""
    if reason := step_refusal(trunk):
        raise DeviceError(f"no decode step for this model: {reason}", where=WHERE, hint="run it block by block")
    ends = Ends(trunk.embedding, trunk.final_norm, trunk.head)
    return Decoder(ops, trunk.layers, ends, pool or fill_pool(ops, trunk, experts), options)


def fill_pool(
    ops: CudaOps, trunk: TrunkWeights, experts: ExpertSource, progress: Callable[[int, int], None] | None = None
) -> ExpertPool:
    """Every expert of every layer in a slot."""
    moe, n_layers, shape = trunk.layers[0].spec.ffn, len(trunk.layers), pool_shape(trunk)
    assert isinstance(moe, Moe)
    count = moe.router.n_experts
    need = count * n_layers * shape.slot_words * 4
    if need > ops.device.free_bytes:
        raise DeviceError(
            f"{count * n_layers} experts need {format_bytes(need)}, {ops.device.title} has "
            f"{format_bytes(ops.device.free_bytes)} of {format_bytes(ops.device.total_bytes)} free",
            where=WHERE,
            hint="end what else uses the GPU, allow fewer bytes (vram=), or use backend='native'",
        )
    pool = ExpertPool(ops.device, shape, count * n_layers, n_layers, count)
    for done, (layer, expert, matrices) in enumerate(leased(trunk, experts), start=1):
        pool.put(layer, expert, layer * count + expert, matrices)
        if progress and done % count == 0:
            progress(done * shape.slot_words * 4, need)
    return pool
