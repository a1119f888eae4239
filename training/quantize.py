"""MLX's affine quantisation in torch, as values: what a weight becomes when it is stored in 4 or 8 bits.

Same arithmetic as `moeflux.formats.quant.quantize`, which writes the files; `check.py` compares the two.
"""

import torch
from torch import Tensor

from training.config import GROUP


def quantized(weight: Tensor, bits: int) -> Tensor:
    """float32 [..., in] to the float32 values that its codes, scales and biases stand for."""
    w = weight.float().unflatten(-1, (-1, GROUP))
    low, high = w.amin(-1, keepdim=True), w.amax(-1, keepdim=True)
    top = float(2**bits - 1)
    low_is_edge = low.abs() > high.abs()
    edge = torch.where(low_is_edge, low, high)
    scale = ((high - low) / top).clamp(min=1e-7)
    scale = torch.where(low_is_edge, scale, -scale)
    edge_code = (edge / scale).round()
    on_grid = edge_code != 0
    scale = torch.where(on_grid, edge / torch.where(on_grid, edge_code, 1.0), scale)
    bias = torch.where(on_grid, edge, 0.0)
    codes = ((w - bias) / scale).round().clamp(0, top)
    return (codes * _rounded(scale) + _rounded(bias)).flatten(-2)


def _rounded(x: Tensor) -> Tensor:
    return x.bfloat16().float()
