"""Triton kernels of the chunked delta rule: the two parts that are sequential and so have no fast form in torch.

All arrays are contiguous float32. A head is one recurrence of `n` chunks; programs of one head share nothing but reads.
"""

# ruff: noqa: ANN001 (arguments are pointers, which have no Python type)

import triton
import triton.language as tl


@triton.jit
def invert(a, t, C: tl.constexpr) -> None:
    """t = (I + strict lower part of a)^-1 of one C x C matrix per program, row by row."""
    base = tl.program_id(0).to(tl.int64) * C * C
    i, j = tl.arange(0, C)[:, None], tl.arange(0, C)[None, :]
    at = base + i * C + j
    below = -tl.load(a + at)
    strict = tl.where(i > j, below, 0.0)
    for n in range(1, C):
        col = tl.arange(0, C)
        row = tl.where(col < n, -tl.load(a + base + n * C + col), 0.0)
        row += tl.sum(row[:, None] * strict, 0)
        strict = tl.where(i == n, row[None, :], strict)
    tl.store(t + at, tl.where(i == j, 1.0, strict))


@triton.jit
def scan_forward(
    w, u, k, d, v, states, n: tl.constexpr, C: tl.constexpr, DK: tl.constexpr, DV: tl.constexpr, BV: tl.constexpr
) -> None:
    """For each chunk: keep S; v = u - w S; S = d S + k^T v. Columns of S are independent: a program has BV of them."""
    head = tl.program_id(0).to(tl.int64) * n
    c, dk = tl.arange(0, C), tl.arange(0, DK)
    dv = tl.program_id(1) * BV + tl.arange(0, BV)
    at_ck = c[:, None] * DK + dk[None, :]
    at_kc = dk[:, None] + c[None, :] * DK
    at_cv = c[:, None] * DV + dv[None, :]
    at_kv = dk[:, None] * DV + dv[None, :]
    s = tl.zeros((DK, BV), dtype=tl.float32)
    for i in range(n):
        chunk = head + i
        tl.store(states + chunk * DK * DV + at_kv, s)
        fresh = tl.load(u + chunk * C * DV + at_cv) - tl.dot(tl.load(w + chunk * C * DK + at_ck), s)
        tl.store(v + chunk * C * DV + at_cv, fresh)
        s = s * tl.load(d + chunk) + tl.dot(tl.load(k + chunk * C * DK + at_kc), fresh)


@triton.jit
def scan_backward(
    w, k, d, dv, ds, du, g, n: tl.constexpr, C: tl.constexpr, DK: tl.constexpr, DV: tl.constexpr, BV: tl.constexpr
) -> None:
    """From the last chunk to the first: `g` is the gradient of the state after a chunk, `du` that of v and of u."""
    head = tl.program_id(0).to(tl.int64) * n
    c, dk = tl.arange(0, C), tl.arange(0, DK)
    cols = tl.program_id(1) * BV + tl.arange(0, BV)
    at_ck = c[:, None] * DK + dk[None, :]
    at_kc = dk[:, None] + c[None, :] * DK
    at_cv = c[:, None] * DV + cols[None, :]
    at_kv = dk[:, None] * DV + cols[None, :]
    grad = tl.zeros((DK, BV), dtype=tl.float32)
    for step in range(n):
        chunk = head + n - 1 - step
        tl.store(g + chunk * DK * DV + at_kv, grad)
        fresh = tl.load(dv + chunk * C * DV + at_cv) + tl.dot(tl.load(k + chunk * C * DK + at_ck), grad)
        tl.store(du + chunk * C * DV + at_cv, fresh)
        carried = grad * tl.load(d + chunk) - tl.dot(tl.load(w + chunk * C * DK + at_kc), fresh)
        grad = tl.load(ds + chunk * DK * DV + at_kv) + carried
