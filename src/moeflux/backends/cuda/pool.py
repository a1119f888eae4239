"""Routed experts in device memory: slots of one size, and for each layer a table that says which slot an expert is in.

A slot holds gate, up and down one after the other, each as codes, scales, biases, as they are in the file. Kernels read the
table, so where an expert lies never changes a result.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass

import numpy as np
import torch

from moeflux.backends.base import ExpertSource, TrunkWeights
from moeflux.backends.cuda.device import Device, device_errors
from moeflux.backends.cuda.memory import AffineMatrix, Tensor, Uploader
from moeflux.backends.cuda.products import Slots
from moeflux.core.errors import DeviceError
from moeflux.formats.quant import Affine, Matrix
from moeflux.models.spec import Moe

PARTS = ("gate", "up", "down")
BITS, GROUP = 4, 64
AT_ONCE = 64  # experts that are leased together


@dataclass(frozen=True)
class ExpertShape:
    """Of experts in 4 bits, groups of 64, with bf16 scales."""

    hidden: int
    width: int

    @property
    def code_words(self) -> int:
        return self.hidden * self.width * BITS // 32

    @property
    def matrix_words(self) -> int:
        return self.code_words + self.hidden * self.width // GROUP  # a scale and a bias are one word

    @property
    def slot_words(self) -> int:
        return 3 * self.matrix_words


class ExpertPool:
    """`words` [slots, slot_words]; `table` [layers, experts], -1 where an expert has no slot."""

    def __init__(self, device: Device, shape: ExpertShape, n_slots: int, n_layers: int, n_experts: int) -> None:
        n_bytes = n_slots * shape.slot_words * 4
        with device_errors(device, f"{n_slots} expert slots", n_bytes):
            self.words = torch.empty(n_slots, shape.slot_words, dtype=torch.int32, device=device.name)
            self.table = torch.full((n_layers, n_experts), -1, dtype=torch.int32, device=device.name)
        self.shape = shape
        self.fetch: Callable[[int, Tensor], None] | None = (
            None  # launched behind a layer's router, where experts may lack slots
        )
        self._up = Uploader(device)

    def put(self, layer: int, expert: int, slot: int, matrices: Mapping[str, Matrix]) -> None:
        """Copy an expert into a slot and enter it into the table."""
        at, row = 0, self.words[slot]
        for name in PARTS:
            matrix = matrices[name]
            if not isinstance(matrix.codec, Affine) or (matrix.codec.bits, matrix.codec.group, matrix.codec.scales) != (
                BITS, GROUP, "BF16",
            ):  # fmt: skip
                raise DeviceError(f"experts of {matrix.codec}: slots hold 4 bits in groups of 64", where=matrix.source)
            coded = self._up.matrix(matrix)
            assert isinstance(coded, AffineMatrix)
            for part in (coded.codes, coded.scales, coded.biases):
                flat = part.reshape(-1).view(torch.int32)
                row[at : at + len(flat)] = flat
                at += len(flat)
        self.table[layer, expert] = slot

    def matrices(self, layer: int, name: str) -> Slots:
        """gate, up or down of all experts of a layer."""
        start = PARTS.index(name) * self.shape.matrix_words
        flat = self.words.view(-1)
        scales = flat.view(torch.bfloat16)[(start + self.shape.code_words) * 2 :]
        biases = scales[self.shape.hidden * self.shape.width // GROUP :]
        return Slots(flat.view(torch.uint8)[start * 4 :], scales, biases, self.table[layer], self.shape.slot_words)

    @property
    def scales(self) -> Tensor:
        """The whole memory as bf16."""
        return self.words.view(torch.bfloat16)


def pool_shape(trunk: TrunkWeights) -> ExpertShape:
    moe = trunk.layers[0].spec.ffn
    assert isinstance(moe, Moe)
    return ExpertShape(len(trunk.final_norm), moe.width)


def leased(trunk: TrunkWeights, experts: ExpertSource) -> Iterator[tuple[int, int, Mapping[str, Matrix]]]:
    """Every expert of every layer: layer, number, matrices, which are good until the next is asked for."""
    for layer, weights in enumerate(trunk.layers):
        assert isinstance(weights.spec.ffn, Moe)
        count = weights.spec.ffn.router.n_experts
        for start in range(0, count, AT_ONCE):
            with experts.acquire(layer, np.arange(start, min(start + AT_ONCE, count))[None]) as lease:
                for bank, arrived in lease.arrivals():
                    for expert in arrived:
                        yield layer, expert, bank[expert]
