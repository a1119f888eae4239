"""The gated delta rule in chunks of 64 tokens, exact up to rounding, differentiable.

Within a chunk everything is matrix products and one triangular inverse; from chunk to chunk a small state is carried.
The inverse and the carrying are operators of their own, with Triton kernels on a GPU and plain torch elsewhere.
"""

import torch
from torch import Tensor

CHUNK = 64


def gated_delta_rule(q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor) -> Tensor:
    """q, k [B, T, Hk, dk] (normalised, q scaled), v [B, T, Hv, dv], log decay and beta [B, T, Hv]; T in whole chunks."""
    batch, length = k.shape[:2]
    heads, out_dim, shared = v.shape[2], v.shape[3], v.shape[2] // k.shape[2]
    q, k, v = (_chunks(x.float()) for x in (q, k, v))  # [B, H, N, C, D]
    g, beta = (_chunks(x.float()[..., None])[..., 0] for x in (g, beta))  # [B, Hv, N, C]
    total = g.cumsum(-1)
    i = torch.arange(CHUNK, device=q.device)
    lower = i[:, None] >= i[None, :]
    decay = torch.where(lower, total[..., :, None] - total[..., None, :], -torch.inf).exp()

    def spread(x: Tensor) -> Tensor:
        """Key heads repeated for the value heads that share them."""
        return x[:, :, None].expand(-1, -1, shared, *x.shape[2:]).reshape(batch, heads, *x.shape[2:])

    keys, queries = spread(k), spread(q)
    mixing = unit_lower_inverse((spread(k @ k.mT) * decay * beta[..., None]).flatten(0, 2)).view_as(decay)
    fresh = mixing @ (v * beta[..., None])
    read = mixing @ (keys * (beta * total.exp())[..., None])
    last = total[..., -1:]
    written = keys * (last - total).exp()[..., None]
    values, states = chunk_scan(*(x.flatten(0, 1) for x in (read, fresh, written)), last[..., 0].exp().flatten(0, 1))
    values, states = values.view_as(fresh), states.view(batch, heads, *states.shape[1:])
    out = (queries * total.exp()[..., None]) @ states + (spread(q @ k.mT) * decay) @ values
    return out.permute(0, 2, 3, 1, 4).reshape(batch, length, heads, out_dim)


def _chunks(x: Tensor) -> Tensor:
    """[B, T, H, D] to [B, H, N, C, D]."""
    return x.unflatten(1, (-1, CHUNK)).permute(0, 3, 1, 2, 4)


@torch.library.custom_op("demo::unit_lower_inverse", mutates_args=())
def unit_lower_inverse(a: Tensor) -> Tensor:
    """(I + strict lower part of a)^-1 for a stack [M, C, C]."""
    if not a.is_cuda:
        eye = torch.eye(a.shape[-1], dtype=a.dtype, device=a.device).expand_as(a)
        return torch.linalg.solve_triangular(a, eye, upper=False, unitriangular=True).contiguous()
    from training import kernels

    a = a.contiguous()
    out = torch.empty_like(a)
    kernels.invert[(a.shape[0],)](a, out, C=a.shape[-1], num_warps=4)
    return out


@unit_lower_inverse.register_fake
def _(a: Tensor) -> Tensor:
    return torch.empty_like(a, memory_format=torch.contiguous_format)


def _keep_inverse(ctx: torch.autograd.function.FunctionCtx, inputs: tuple[Tensor], output: Tensor) -> None:
    ctx.save_for_backward(output)


def _inverse_grad(ctx: torch.autograd.function.FunctionCtx, grad: Tensor) -> Tensor:
    (t,) = ctx.saved_tensors
    return -(t.mT @ grad @ t.mT).tril(-1)


unit_lower_inverse.register_autograd(_inverse_grad, setup_context=_keep_inverse)


@torch.library.custom_op("demo::chunk_scan", mutates_args=())
def chunk_scan(w: Tensor, u: Tensor, k: Tensor, d: Tensor) -> tuple[Tensor, Tensor]:
    """w, k [M, N, C, dk], u [M, N, C, dv], d [M, N] to v = u - w S of each chunk and the state S before it.

    S starts at zero and becomes d S + k^T v.
    """
    w, u, k, d = (x.contiguous() for x in (w, u, k, d))
    heads, n, chunk, dk = w.shape
    dv = u.shape[-1]
    v, states = torch.empty_like(u), u.new_empty(heads, n, dk, dv)
    if w.is_cuda:
        from training import kernels

        block = min(dv, 32)
        kernels.scan_forward[(heads, dv // block)](w, u, k, d, v, states, n, C=chunk, DK=dk, DV=dv, BV=block, num_warps=4)
        return v, states
    s = u.new_zeros(heads, dk, dv)
    for i in range(n):
        states[:, i] = s
        v[:, i] = u[:, i] - w[:, i] @ s
        s = s * d[:, i, None, None] + k[:, i].mT @ v[:, i]
    return v, states


@chunk_scan.register_fake
def _(w: Tensor, u: Tensor, k: Tensor, d: Tensor) -> tuple[Tensor, Tensor]:
    states = u.new_empty(w.shape[0], w.shape[1], w.shape[3], u.shape[3])
    return torch.empty_like(u, memory_format=torch.contiguous_format), states


@torch.library.custom_op("demo::chunk_scan_backward", mutates_args=())
def chunk_scan_backward(w: Tensor, k: Tensor, d: Tensor, dv: Tensor, ds: Tensor) -> tuple[Tensor, Tensor]:
    """Gradients of v (all its uses) and of the state after each chunk, from those of the outputs of `chunk_scan`."""
    w, k, d, dv, ds = (x.contiguous() for x in (w, k, d, dv, ds))
    heads, n, chunk, dk = w.shape
    width = dv.shape[-1]
    du, g = torch.empty_like(dv), torch.empty_like(ds)
    if w.is_cuda:
        from training import kernels

        block = min(width, 32)
        grid = (heads, width // block)
        kernels.scan_backward[grid](w, k, d, dv, ds, du, g, n, C=chunk, DK=dk, DV=width, BV=block, num_warps=4)
        return du, g
    grad = dv.new_zeros(heads, dk, width)
    for i in reversed(range(n)):
        g[:, i] = grad
        du[:, i] = dv[:, i] + k[:, i] @ grad
        grad = ds[:, i] + grad * d[:, i, None, None] - w[:, i].mT @ du[:, i]
    return du, g


@chunk_scan_backward.register_fake
def _(w: Tensor, k: Tensor, d: Tensor, dv: Tensor, ds: Tensor) -> tuple[Tensor, Tensor]:
    new = torch.contiguous_format
    return torch.empty_like(dv, memory_format=new), torch.empty_like(ds, memory_format=new)


def _keep_scan(ctx: torch.autograd.function.FunctionCtx, inputs: tuple[Tensor, ...], output: tuple[Tensor, Tensor]) -> None:
    w, _, k, d = inputs
    ctx.save_for_backward(w, k, d, *output)


def _scan_grad(ctx: torch.autograd.function.FunctionCtx, dv: Tensor, ds: Tensor) -> tuple[Tensor, ...]:
    w, k, d, v, states = ctx.saved_tensors
    du, g = chunk_scan_backward(w, k, d, dv, ds)
    return -(du @ states.mT), du, v @ g.mT, (g * states).sum((-2, -1))


chunk_scan.register_autograd(_scan_grad, setup_context=_keep_scan)
