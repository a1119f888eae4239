"""Routed experts: tokens sorted by expert, two grouped matrix products, and the weighted sum back in token order."""

import torch
from torch import Tensor
from torch.autograd.function import FunctionCtx


class _Dispatch(torch.autograd.Function):
    """x[source]. The gradient is gathered too, instead of scattered with atomic additions."""

    @staticmethod
    def forward(ctx: FunctionCtx, x: Tensor, source: Tensor, slots: Tensor) -> Tensor:
        ctx.save_for_backward(slots)
        return x[source]

    @staticmethod
    def backward(ctx: FunctionCtx, grad: Tensor) -> tuple[Tensor, None, None]:
        (slots,) = ctx.saved_tensors
        return grad[slots].float().sum(1).to(grad.dtype), None, None


class _Combine(torch.autograd.Function):
    """Sum over a token's experts of weight times output, the outputs standing in the order of the experts."""

    @staticmethod
    def forward(ctx: FunctionCtx, y: Tensor, weights: Tensor, order: Tensor, slots: Tensor) -> Tensor:
        ctx.save_for_backward(y, weights, order, slots)
        return (y[slots].float() * weights[..., None]).sum(1).to(y.dtype)

    @staticmethod
    def backward(ctx: FunctionCtx, grad: Tensor) -> tuple[Tensor, Tensor, None, None]:
        y, weights, order, slots = ctx.saved_tensors
        per_row = weights.flatten()[order]
        dy = (grad[order // weights.shape[1]].float() * per_row[:, None]).to(y.dtype)
        dw = (y[slots].float() * grad[:, None].float()).sum(-1)
        return dy, dw, None, None


def grouped_linear(x: Tensor, weight: Tensor, ends: Tensor) -> Tensor:
    """Rows [ends[e-1], ends[e]) of x by weight[e] [out, in]."""
    if x.is_cuda and x.dtype == torch.bfloat16:
        return torch._grouped_mm(x, weight.mT, offs=ends)
    sizes = torch.diff(ends, prepend=ends.new_zeros(1)).tolist()
    return torch.cat([part @ w.T for part, w in zip(x.split(sizes), weight, strict=True)])


def run_experts(x: Tensor, ids: Tensor, weights: Tensor, gate_up: Tensor, down: Tensor) -> tuple[Tensor, Tensor]:
    """x [N, H], ids and weights [N, k] to outputs [N, H], and how many rows each expert had."""
    n_experts = gate_up.shape[0]
    sorted_ids, order = torch.sort(ids.flatten())
    slots = torch.empty_like(order).scatter_(0, order, torch.arange(order.numel(), device=x.device)).view_as(ids)
    bounds = torch.arange(n_experts, device=x.device, dtype=ids.dtype)
    ends = torch.searchsorted(sorted_ids, bounds, right=True).int()
    gate, up = grouped_linear(_Dispatch.apply(x, order // ids.shape[1], slots), gate_up, ends).chunk(2, dim=-1)
    y = grouped_linear(torch.nn.functional.silu(gate) * up, down, ends)
    return _Combine.apply(y, weights, order, slots), torch.diff(ends, prepend=ends.new_zeros(1))
