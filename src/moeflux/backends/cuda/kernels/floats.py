"""Products with weights that are floats or float8, and rows of coded tables. The same code for one row and for many."""

from __future__ import annotations

import triton
import triton.language as tl

from moeflux.backends.cuda.kernels.arith import tree_rows


@triton.jit
def e4m3(code):
    """float8 e4m3 to float32, exactly: its bits put where float32 has them, then the difference of the exponents' biases."""
    c = code.to(tl.int32)
    value = ((c & 127) << 20).to(tl.float32, bitcast=True) * 1.329227995784916e36  # 2^120
    return tl.where(c >= 128, -value, value)


@triton.jit
def float_kernel(W, SCALE, X, Y, N, K, n_heads, block, n_blocks, ROWS: tl.constexpr, BK: tl.constexpr, LOG: tl.constexpr,
                 FP8: tl.constexpr):  # fmt: skip
    """Y[t, h, n] = W[h, n] . X[t, h]. BK = 2^LOG columns at a time are multiplied and added, at the end as a tree."""
    n_parts = tl.cdiv(N, ROWS)
    head = tl.program_id(0) // n_parts
    n = (tl.program_id(0) % n_parts) * ROWS + tl.arange(0, ROWS)
    t = tl.program_id(1).to(tl.int64)
    row = head.to(tl.int64) * N + n
    c = tl.arange(0, BK)
    acc = tl.zeros((ROWS, BK), tl.float32)
    for k in range(0, K, BK):
        ok = (k + c) < K
        x = tl.load(X + (t * n_heads + head) * K + k + c, mask=ok, other=0.0)
        w = tl.load(W + row[:, None] * K + (k + c)[None, :], mask=(n < N)[:, None] & ok[None, :], other=0)
        if FP8:
            s = tl.load(SCALE + (n // block)[:, None] * n_blocks + ((k + c) // block)[None, :],
                        mask=(n < N)[:, None] & ok[None, :], other=0.0)  # fmt: skip
            v = e4m3(w) * s.to(tl.float32)
        else:
            v = w.to(tl.float32)
        acc = tl.fma(v, tl.broadcast_to(x[None, :], (ROWS, BK)), acc)
    tl.store(Y + (t * n_heads + head) * N + n, tree_rows(acc, ROWS, LOG), mask=n < N)


@triton.jit
def affine_rows_kernel(W, S, B, IDS, Y, K, GROUP: tl.constexpr, BITS: tl.constexpr, BK: tl.constexpr):
    """Rows of a coded table: scale * code + bias, one multiplication and one addition."""
    row = tl.load(IDS + tl.program_id(0)).to(tl.int64)
    c = tl.program_id(1) * BK + tl.arange(0, BK)
    ok = c < K
    w = tl.load(W + row * (K * BITS // 32) + c * BITS // 32, mask=ok, other=0)
    code = (w >> ((c * BITS) % 32)) & ((1 << BITS) - 1)
    group = row * (K // GROUP) + c // GROUP
    s = tl.load(S + group, mask=ok, other=0.0).to(tl.float32)
    b = tl.load(B + group, mask=ok, other=0.0).to(tl.float32)
    tl.store(Y + tl.program_id(0).to(tl.int64) * K + c, code.to(tl.float32) * s + b, mask=ok)
