"""A model's layers as the decode step wants them: matrices that take the same input joined by rows, and which models fit."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from moeflux.backends.cuda.memory import AffineMatrix, Tensor
from moeflux.backends.ops import LayerWeights
from moeflux.models.spec import Attention, DeltaNet, Mixer, Moe

FILL = 64  # joined input projections are filled up to a multiple of so many rows
ROUTER_FILL = 32


@dataclass(frozen=True)
class Ends:
    """What stands before and behind the layers."""

    embedding: AffineMatrix
    final_norm: Tensor
    head: AffineMatrix


@dataclass(frozen=True)
class StepLayer:
    """One layer as its kernels want it: input projections joined by rows, and the router with the shared expert's gate."""

    w: LayerWeights
    inputs: AffineMatrix
    router: AffineMatrix

    @property
    def delta(self) -> bool:
        return isinstance(self.w.spec.mixer, DeltaNet)


def prepare(w: LayerWeights) -> StepLayer:
    if isinstance(w.spec.mixer, DeltaNet):
        inputs = join_rows([w.mixer[f"in_proj_{name}"] for name in ("qkv", "z", "b", "a")])
    else:
        inputs = join_rows([w.mixer[f"{name}_proj"] for name in ("q", "k", "v")])
    return StepLayer(w, inputs, join_rows([w.ffn["router"], w.ffn["shared_gate"]], ROUTER_FILL))


def output_matrix(layer: StepLayer) -> AffineMatrix:
    found = layer.w.mixer["out_proj" if layer.delta else "o_proj"]
    assert isinstance(found, AffineMatrix)
    return found


def join_rows(parts: Sequence[AffineMatrix], fill: int = FILL) -> AffineMatrix:
    """By rows, filled up with zeros to a multiple of `fill`."""
    first, rows = parts[0], sum(part.rows for part in parts)

    def join(name: str) -> Tensor:
        tensors = [getattr(part, name) for part in parts]
        zeros = torch.zeros(-rows % fill, tensors[0].shape[1], dtype=tensors[0].dtype, device=tensors[0].device)
        return torch.cat([*tensors, zeros])

    return AffineMatrix(join("codes"), join("scales"), join("biases"), first.bits, first.group)


def pack_tiles(m: AffineMatrix) -> Tensor:
    """4-bit codes and scales by sixteen rows, as source/tile.cuh wants them in shared memory: [tiles, bytes]."""
    tiles, slices = m.rows // 16, m.cols // 256
    # row half, row, slice, half of the slice, part of 32 codes, word
    codes = m.codes.view(tiles, 2, 8, slices, 2, 4, 4).permute(0, 3, 1, 4, 2, 5, 6).contiguous()
    codes[:, :, :, 1] = codes[:, :, :, 1][:, :, :, [1, 0, 3, 2, 5, 4, 7, 6]]  # neighbours apart, for the banks
    scales = torch.cat([m.scales.view(torch.int16), m.biases.view(torch.int16)], 1).view(tiles, 16, -1)
    if m.cols > 256:
        scales = torch.nn.functional.pad(scales, (0, 8))
    parts = (part.contiguous().view(tiles, -1).view(torch.uint8) for part in (codes, scales))
    return torch.cat(list(parts), 1)


def refusal(layers: Sequence[LayerWeights], ends: Ends) -> str | None:
    """Why these layers have no fast step, or None."""
    hidden = len(ends.final_norm)
    if hidden & (hidden - 1) or hidden < 256:
        return f"a hidden size of {hidden}: the step wants a power of two"
    if ends.head.rows % FILL or any(n % FILL for w in layers for n in widths(w.spec.mixer)[:2]):
        return f"a vocabulary of {ends.head.rows} or a delta net whose widths are no multiples of {FILL}"
    for i, w in enumerate(layers):
        mixer, ffn = w.spec.mixer, w.spec.ffn
        if not isinstance(ffn, Moe) or ffn.router.kind != "softmax" or not ffn.router.normalize or not ffn.shared_gated:
            return f"layer {i}: the step wants softmax routing with normalised weights and a gated shared expert"
        if not isinstance(mixer, Attention | DeltaNet) or (isinstance(mixer, DeltaNet) and mixer.fused):
            return f"layer {i}: the step has no {type(mixer).__name__} of this kind"
        if any(role.endswith(".bias") for role in w.mixer):
            return f"layer {i}: the step has no biases"
        for role, m in {**w.mixer, **w.ffn}.items():
            bits = 8 if role in ("router", "shared_gate") else 4
            if not isinstance(m, torch.Tensor) and (not isinstance(m, AffineMatrix) or (m.bits, m.group) != (bits, 64)):
                return f"layer {i}: {role} is not of {bits} bits in groups of 64"
    return None


def widths(spec: Mixer) -> tuple[int, int, int]:
    """Rows of the joined input projections: through the convolution, gates of the output, heads of the two last."""
    if isinstance(spec, DeltaNet):
        return spec.channels, spec.n_value_heads * spec.value_dim, spec.n_value_heads
    return 0, 0, 0
