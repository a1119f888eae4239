"""Attention of one token over rows in blocks, cut into chunks of positions: the bits of `mixers.attend_kernel`."""

from __future__ import annotations

import triton
import triton.language as tl

from moeflux.backends.cuda.kernels.arith import sigmoid, tree_rows
from moeflux.backends.cuda.kernels.mixers import CHUNK, attend_chunk, part
from moeflux.backends.cuda.kernels.step import turn


@triton.jit
def to_bf16(x):
    """To the nearest, ties to even, spelled out: the interpreter cuts off instead."""
    u = x.to(tl.int32, bitcast=True)
    return ((u + 0x7FFF + ((u >> 16) & 1)) >> 16).to(tl.int16).to(tl.bfloat16, bitcast=True)


@triton.jit
def norm_rotate(X, row, ok, NORM, eps, COS, SIN, D: tl.constexpr, LOG: tl.constexpr, HALF: tl.constexpr, ROWS: tl.constexpr):
    """Rows of D at X + row, normed, the first 2 HALF channels turned: channel i with i + HALF."""
    c = tl.arange(0, D)
    other = tl.where(c < HALF, c + HALF, tl.where(c < 2 * HALF, c - HALF, c))
    x = tl.load(X + row[:, None] + c[None, :], mask=ok[:, None], other=0.0)
    y = tl.load(X + row[:, None] + other[None, :], mask=ok[:, None], other=0.0)
    r = tl.rsqrt(tree_rows(x * x, ROWS, LOG) * (1.0 / D) + eps)[:, None]
    x = x * r * tl.load(NORM + c)[None, :]
    y = y * r * tl.load(NORM + other)[None, :]
    turned = c < 2 * HALF
    cos = tl.where(turned, tl.load(COS + c % HALF), 1.0)
    sin = tl.where(turned, tl.load(SIN + c % HALF), 0.0)
    sin = tl.where(c < HALF, -sin, sin)
    return tl.where(turned[None, :], x * cos[None, :] + y * sin[None, :], x)


@triton.jit
def attend_kernel(Y, Q_NORM, K_NORM, eps, COS, SIN, BASE, KEYS, VALUES, PART, POSITION, scale, N_CHUNKS, BLOCK: tl.constexpr,
                  GROUPS: tl.constexpr, RATIO: tl.constexpr, STRIDE: tl.constexpr, D: tl.constexpr, LOG: tl.constexpr,
                  HALF: tl.constexpr, PDL: tl.constexpr):  # fmt: skip
    """One chunk of one group of heads. Y: q of STRIDE per head, then k, then v. Whose chunk holds the token's own position
    appends its row. Block i of the rows lies KEYS[i] * 16 bytes behind BASE."""
    group = tl.program_id(0) % GROUPS
    chunk = tl.program_id(0) // GROUPS
    position = tl.load(POSITION)
    first = chunk * CHUNK
    c = tl.arange(0, D)
    n = first + tl.arange(0, CHUNK)
    row = ((n % BLOCK) * GROUPS + group) * D
    kept_k = BASE + tl.load(KEYS + first // BLOCK) * 8
    kept_v = BASE + tl.load(VALUES + first // BLOCK) * 8
    # Rows of tokens before: written in earlier steps, so they need not wait.
    k = tl.load(kept_k + row[:, None] + c[None, :], mask=(n < position)[:, None], other=0.0)
    v = tl.load(kept_v + row[:, None] + c[None, :], mask=(n < position)[:, None], other=0.0)
    turn(PDL)
    if first <= position:
        i = tl.arange(0, 16)
        head = group * RATIO + i
        cos = COS + position * HALF
        sin = SIN + position * HALF
        q = norm_rotate(Y, head * STRIDE, i < RATIO, Q_NORM, eps, cos, sin, D, LOG, HALF, 16)
        if position < first + CHUNK:
            at = GROUPS * RATIO * STRIDE + group * D
            one = tl.arange(0, 1)
            new_k = to_bf16(norm_rotate(Y, at + one, one == 0, K_NORM, eps, cos, sin, D, LOG, HALF, 1))
            new_v = to_bf16(tl.load(Y + at + GROUPS * D + one[:, None] + c[None, :]))
            mine = ((position % BLOCK) * GROUPS + group) * D
            tl.store(kept_k + mine + one[:, None] + c[None, :], new_k)
            tl.store(kept_v + mine + one[:, None] + c[None, :], new_v)
            k = tl.where((n == position)[:, None], new_k, k)
            v = tl.where((n == position)[:, None], new_v, v)
        seen = tl.zeros((16,), tl.int32) + position + 1
        best, total, out = attend_chunk(q, k, v, seen, first, scale, True, 16)
        place = PART + (head * N_CHUNKS + chunk) * (D + 8)
        tl.store(place[:, None] + c[None, :], out, mask=(i < RATIO)[:, None])
        tl.store(place + D, best, mask=i < RATIO)
        tl.store(place + D + 1, total, mask=i < RATIO)


@triton.jit
def join_kernel(PART, Y, O, POSITION, N_CHUNKS, GATED: tl.constexpr, STRIDE: tl.constexpr, D: tl.constexpr,
                BD: tl.constexpr, PDL: tl.constexpr):  # fmt: skip
    """Chunks in ascending order, then the output gate. BD channels of one head a program."""
    head = tl.program_id(0) // (D // BD)
    c = (tl.program_id(0) % (D // BD)) * BD + tl.arange(0, BD)
    position = tl.load(POSITION)
    turn(PDL)
    best = float("-inf")
    total = 0.0
    out = tl.zeros((BD,), tl.float32)
    for chunk in tl.range(position // CHUNK + 1, loop_unroll_factor=8):
        place = PART + (head * N_CHUNKS + chunk) * (D + 8)
        b = tl.load(place + D)
        s = tl.load(place + D + 1)
        o = tl.load(place + c)
        joined = tl.maximum(best, b)
        old = part(best, joined)
        new = part(b, joined)
        total = total * old + s * new
        out = out * old + o * new
        best = joined
    out = out / total
    if GATED:
        out = out * sigmoid(tl.load(Y + head * STRIDE + D + c))
    tl.store(O + head * D + c, out)
