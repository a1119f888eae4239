"""More experts than slots: each layer has a share of the slots, which the device fills by itself while a token is decoded.

Every expert has a record in pinned host memory, laid out as a slot is. A decoded token's missing experts are fetched inside
of its graph (kernels/fetch.py). A prompt takes no slot away: experts that it misses pass through slots set apart for that.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import numpy as np
import torch

from moeflux.backends.base import ExpertSource, TrunkWeights
from moeflux.backends.cuda.device import Device, device_errors
from moeflux.backends.cuda.kernels import fetch
from moeflux.backends.cuda.memory import Tensor
from moeflux.backends.cuda.ops import CudaOps
from moeflux.backends.cuda.pool import ExpertPool, leased, pool_shape
from moeflux.models.spec import Moe

Progress = Callable[[int, int], None]
PARTS = 8  # programs that copy one expert
BLOCK = 4096  # words that a program copies at a time


class RecordedExperts:
    """`per_layer`: slots of each layer, no fewer than a token chooses. `staged`: others, that a prompt's pass through."""

    def __init__(
        self,
        ops: CudaOps,
        trunk: TrunkWeights,
        experts: ExpertSource,
        per_layer: int,
        staged: int,
        progress: Progress | None = None,
    ) -> None:
        moe, n_layers = trunk.layers[0].spec.ffn, len(trunk.layers)
        assert isinstance(moe, Moe)
        self._ops, self._count, self._k = ops, moe.router.n_experts, moe.router.k
        self._per_layer = min(per_layer, self._count)
        self._staged = range(n_layers * self._per_layer, n_layers * self._per_layer + staged)
        assert self._per_layer >= self._k
        assert staged >= 1
        self.pool = ExpertPool(ops.device, pool_shape(trunk), self._staged.stop, n_layers, self._count)
        self.pool.fetch = self._fetch
        n_bytes = n_layers * self._count * self.pool.shape.slot_words * 4
        with device_errors(ops.device, "experts in pinned host memory", n_bytes):
            pinned = ops.device.name != "cpu"
            self._records = torch.empty(
                n_layers * self._count, self.pool.shape.slot_words, dtype=torch.int32, pin_memory=pinned
            )
            self._owner = _ints(ops.device, n_layers, self._per_layer)
            self._owner += torch.arange(self._per_layer, dtype=torch.int32, device=ops.device.name)
            self._stamp, self._clock = _ints(ops.device, n_layers, self._per_layer), _ints(ops.device, n_layers)
            self._jobs = _ints(ops.device, n_layers, 2, self._k)
        self._fill(trunk, experts, n_bytes, progress)

    def _fill(self, trunk: TrunkWeights, experts: ExpertSource, n_bytes: int, progress: Progress | None) -> None:
        """A record is what the slot holds, so that only the pool knows how experts lie there."""
        words, record_bytes = self.pool.words, self.pool.shape.slot_words * 4
        for turn, (layer, expert, matrices) in enumerate(leased(trunk, experts), start=1):
            stays = expert < self._per_layer
            slot = layer * self._per_layer + expert if stays else self._staged[turn % len(self._staged)]
            self.pool.put(layer, expert, slot, matrices)
            self._records[layer * self._count + expert].copy_(words[slot], non_blocking=True)
            if not stays:
                self.pool.table[layer, expert] = -1
            if progress and turn % self._count == 0:
                progress(turn * record_bytes, n_bytes)
        if self._ops.device.name != "cpu":
            torch.cuda.synchronize()

    def _fetch(self, layer: int, logits: Tensor) -> None:
        """Launches: whoever is missing of a token's experts gets a slot and is copied there."""
        k, slots, jobs = self._k, self._per_layer, self._jobs[layer]
        fetch.claim_kernel[(1,)](
            logits, self.pool.table[layer], self._owner[layer], self._stamp[layer], self._clock[layer:], jobs,
            layer * slots, slots, k, self._count, 1 << (slots - 1).bit_length(), num_warps=1,
        )  # fmt: skip
        fetch.fetch_kernel[(k, PARTS)](
            self._records, self.pool.words, jobs, layer * self._count, self.pool.shape.slot_words, k, BLOCK, num_warps=8,
        )  # fmt: skip

    def run(self, x: Tensor, ids: Tensor, weights: Tensor, layer: int) -> Tensor:
        """Experts of a prompt's rows."""
        return self._ops.experts_in_rounds(x, ids, weights, self.pool, layer, self._rounds(layer, self._ops.to_numpy(ids)))

    def _rounds(self, layer: int, chosen: np.ndarray) -> Iterator[Sequence[int]]:
        """Experts that are in slots: at first all that are there already, with as many others as pass through at a time."""
        table = self.pool.table[layer]
        there = table.cpu().numpy() >= 0
        needed = np.unique(chosen)
        missing = needed[~there[needed]].tolist()
        first = needed[there[needed]].tolist()
        for start in range(0, max(1, len(missing)), len(self._staged)):
            passing = missing[start : start + len(self._staged)]
            for slot, expert in zip(self._staged, passing, strict=False):
                self.pool.words[slot].copy_(self._records[layer * self._count + expert], non_blocking=True)
            where = torch.tensor(passing, dtype=torch.int64, device=table.device)
            table[where] = torch.tensor(list(self._staged)[: len(passing)], dtype=torch.int32, device=table.device)
            yield [*first, *passing]
            table[where] = -1
            first = []


def _ints(device: Device, *shape: int) -> Tensor:
    return torch.zeros(shape, dtype=torch.int32, device=device.name)
