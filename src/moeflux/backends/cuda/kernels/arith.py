"""The arithmetic that all kernels share, and with it the order of every sum.

Affine products: activations become 16-bit integers per group, two signed 8-bit digits each; codes stay as they are. The sum
of a group is an exact integer in any order. Groups then join in float32: four neighbours as a tree, blocks of four in
ascending order. So a matrix-vector kernel and a tensor-core kernel give the same bits.

Other sums are trees of neighbours, spelled out as sums of two, which commute: first within threads, last between warps.
Kernels are launched without contraction of a product and a sum into one rounding (`enable_fp_fusion=False`); where one
rounding is meant, `tl.fma` says so.
"""

from __future__ import annotations

import triton
import triton.language as tl

RANGE = tl.constexpr(32512.0)  # of a 16-bit activation: 127 * 256, so that both digits fit 8 bits
SMALLEST = tl.constexpr(1e-30)  # a group whose largest activation is below counts as zero
ROUND = tl.constexpr(12582912.0)  # 1.5 * 2^23: adding it rounds to the nearest integer
ROUND_BITS = tl.constexpr(0x4B400000)
TREE = tl.constexpr(4)  # groups that join as a tree


@triton.jit
def tree_sum(x, LOG: tl.constexpr):
    """Of a vector of 2^LOG: neighbours are added until one number is left."""
    for i in tl.static_range(LOG):
        x = tl.sum(tl.reshape(x, (1 << (LOG - 1 - i), 2)), 1)
    return tl.sum(x, 0)


@triton.jit
def tree_rows(x, ROWS: tl.constexpr, LOG: tl.constexpr):
    """The same for each row of [ROWS, 2^LOG]."""
    for i in tl.static_range(LOG):
        x = tl.sum(tl.reshape(x, (ROWS, 1 << (LOG - 1 - i), 2)), 2)
    return tl.reshape(x, (ROWS,))


@triton.jit
def ordered_rows(x, start, ROWS: tl.constexpr, N: tl.constexpr):
    """start + x[:, 0] + x[:, 1] + ..., in this order. A column is picked by adding zeros, which is exact."""
    column = tl.arange(0, N)[None, :]
    for i in tl.static_range(N):
        start = start + tl.sum(tl.where(column == i, x, 0.0), 1)
    return start


@triton.jit
def join_groups(terms, start, ROWS: tl.constexpr, N: tl.constexpr):
    """[ROWS, N] terms of groups onto [ROWS]: trees of four, blocks in order. N is a multiple of four."""
    pairs = tl.sum(tl.reshape(terms, (ROWS, N // 2, 2)), 2)
    blocks = tl.sum(tl.reshape(pairs, (ROWS, N // 4, 2)), 2)
    return ordered_rows(blocks, start, ROWS, N // 4)


@triton.jit
def sigmoid(x):
    return 1.0 / (1.0 + tl.exp(-x))


@triton.jit
def silu(x):
    return x * sigmoid(x)


@triton.jit
def softplus(x):
    return tl.maximum(x, 0.0) + tl.log(1.0 + tl.exp(-tl.abs(x)))


@triton.jit
def magnitude(x):
    """What a group's scale is taken from. NaN counts as infinity, so that it is not lost on the way through integers."""
    return tl.where(x == x, tl.abs(x), float("inf"))


@triton.jit
def inverse(m):
    return tl.where((m > SMALLEST) & (m < float("inf")), RANGE / m, 0.0)


@triton.jit
def step_of(m):
    """What one unit of a group's integers is worth."""
    return tl.where(m > SMALLEST, m * (1.0 / RANGE), 0.0)


@triton.jit
def round_int(x):
    return (x + ROUND).to(tl.int32, bitcast=True) - ROUND_BITS


@triton.jit
def high(q):
    return (q + 128) >> 8


@triton.jit
def pack4(bytes_):
    """[A, B, 4] integers, the low byte of each -> [A, B] words, the first lowest."""
    return tl.sum((bytes_ & 255) << (tl.arange(0, 4) * 8)[None, None, :], 2)


@triton.jit
def dot4(a, b):
    """Unsigned bytes of `a` times signed bytes of `b`, in plain operations: for the interpreter."""
    d = (a & 255) * ((b << 24) >> 24)
    d += ((a >> 8) & 255) * ((b << 16) >> 24)
    d += ((a >> 16) & 255) * ((b << 8) >> 24)
    return d + ((a >> 24) & 255) * (b >> 24)


@triton.jit
def dot_nibbles(w, he, ho, le, lo, DP4A: tl.constexpr):
    """Eight 4-bit codes times eight activations: high and low digits of those at even and at odd places."""
    if DP4A:
        return tl.inline_asm_elementwise(
            """{ .reg .b32 a, b, d;
            and.b32 a, $1, 0x0f0f0f0f; shr.u32 b, $1, 4; and.b32 b, b, 0x0f0f0f0f;
            dp4a.u32.s32 d, a, $2, 0; dp4a.u32.s32 d, b, $3, d; shl.b32 d, d, 8;
            dp4a.u32.s32 d, a, $4, d; dp4a.u32.s32 $0, b, $5, d; }""",
            "=r,r,r,r,r,r",
            [w, he, ho, le, lo],
            dtype=tl.int32,
            is_pure=True,
            pack=1,
        )
    else:
        a = w & 0x0F0F0F0F
        b = (w >> 4) & 0x0F0F0F0F
        return ((dot4(a, he) + dot4(b, ho)) << 8) + dot4(a, le) + dot4(b, lo)


@triton.jit
def dot_bytes(w, h, l, DP4A: tl.constexpr):
    """Four 8-bit codes times four activations."""
    if DP4A:
        return tl.inline_asm_elementwise(
            """{ .reg .b32 d; dp4a.u32.s32 d, $1, $2, 0; shl.b32 d, d, 8; dp4a.u32.s32 $0, $1, $3, d; }""",
            "=r,r,r,r",
            [w, h, l],
            dtype=tl.int32,
            is_pure=True,
            pack=1,
        )
    else:
        return (dot4(w, h) << 8) + dot4(w, l)


@triton.jit
def term(d, scale, bias, step, mass):
    """scale * sum(code * x) + bias * sum(x) of a group: `d` counts in units of `step`, `mass` is the sum of x."""
    return tl.fma(scale.to(tl.float32) * step, d.to(tl.float32), bias.to(tl.float32) * mass)
