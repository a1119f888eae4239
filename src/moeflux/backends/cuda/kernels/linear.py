"""Matrix products: activations to digits, a vector or a few with coded weights, many at once on tensor cores."""

from __future__ import annotations

import triton
import triton.language as tl

from moeflux.backends.cuda.kernels.arith import (
    dot_bytes,
    dot_nibbles,
    high,
    inverse,
    join_groups,
    magnitude,
    round_int,
    silu,
    step_of,
    term,
)


@triton.jit
def quantise_kernel(X, U, Q, STEP, TOTAL, K, n_groups, GROUP: tl.constexpr, NIBBLES: tl.constexpr, GB: tl.constexpr,
                    GATED: tl.constexpr):  # fmt: skip
    """A row of X, or silu(X) * U -> digits [2, K] of bytes, and of each group its step and the sum of its integers.

    Beside 4-bit codes the activations of a group lie with even places first, as the nibbles of a word want them.
    """
    t = tl.program_id(0).to(tl.int64)
    g = tl.program_id(1) * GB + tl.arange(0, GB)
    p = tl.arange(0, GROUP)
    source = p
    if NIBBLES:
        source = (p % (GROUP // 2)) * 2 + p // (GROUP // 2)
    ok = (g < n_groups)[:, None]
    x = tl.load(X + t * K + g[:, None] * GROUP + source[None, :], mask=ok, other=0.0)
    if GATED:
        x = silu(x) * tl.load(U + t * K + g[:, None] * GROUP + source[None, :], mask=ok, other=0.0)
    m = tl.max(magnitude(x), 1)
    q = round_int(x * inverse(m)[:, None])
    h = high(q)
    place = t * 2 * K + g[:, None] * GROUP + p[None, :]
    tl.store(Q + place, h.to(tl.int8), mask=ok)
    tl.store(Q + place + K, (q - h * 256).to(tl.int8), mask=ok)
    tl.store(STEP + t * n_groups + g, step_of(m), mask=g < n_groups)
    tl.store(TOTAL + t * n_groups + g, tl.sum(q, 1), mask=g < n_groups)


@triton.jit
def vector_kernel(W, S, B, Q, STEP, TOTAL, Y, N, K, n_groups, GROUP: tl.constexpr, BITS: tl.constexpr, ROWS: tl.constexpr,
                  GB: tl.constexpr, DP4A: tl.constexpr):  # fmt: skip
    """ROWS rows of W times one vector of digits. W and Q in words of four bytes."""
    r = (tl.program_id(0) * ROWS + tl.arange(0, ROWS)).to(tl.int64)
    t = tl.program_id(1).to(tl.int64)
    row_ok = r < N
    WORDS: tl.constexpr = GROUP * BITS // 32
    k = tl.arange(0, WORDS)
    y = tl.zeros((ROWS,), tl.float32)
    for g0 in range(0, n_groups, GB):
        g = g0 + tl.arange(0, GB)
        g_ok = g < n_groups
        ok = row_ok[:, None] & g_ok[None, :]
        at = r[:, None] * n_groups + g[None, :]
        w = tl.load(W + at[:, :, None] * WORDS + k[None, None, :], mask=ok[:, :, None], other=0)
        s = tl.load(S + at, mask=ok, other=0.0)
        b = tl.load(B + at, mask=ok, other=0.0)
        q = Q + t * (K // 2) + (g * (GROUP // 4))[:, None] + k[None, :]
        if BITS == 4:
            he = tl.load(q, mask=g_ok[:, None], other=0)[None, :, :]
            ho = tl.load(q + WORDS, mask=g_ok[:, None], other=0)[None, :, :]
            le = tl.load(q + K // 4, mask=g_ok[:, None], other=0)[None, :, :]
            lo = tl.load(q + K // 4 + WORDS, mask=g_ok[:, None], other=0)[None, :, :]
            d = tl.sum(dot_nibbles(w, he, ho, le, lo, DP4A), 2)
        else:
            h = tl.load(q, mask=g_ok[:, None], other=0)[None, :, :]
            l = tl.load(q + K // 4, mask=g_ok[:, None], other=0)[None, :, :]
            d = tl.sum(dot_bytes(w, h, l, DP4A), 2)
        step = tl.load(STEP + t * n_groups + g, mask=g_ok, other=0.0)
        mass = step * tl.load(TOTAL + t * n_groups + g, mask=g_ok, other=0).to(tl.float32)
        y = join_groups(term(d, s, b, step[None, :], mass[None, :]), y, ROWS, GB)
    tl.store(Y + t * N + r, y, mask=row_ok)


@triton.jit
def nibbles(w, PACKED: tl.constexpr):
    """Bytes of codes -> the codes at even and at odd places, as signed bytes. PACKED: four bytes with one instruction."""
    if PACKED:
        return tl.inline_asm_elementwise(
            "and.b32 $0, $2, 0x0f0f0f0f; shr.u32 $1, $2, 4; and.b32 $1, $1, 0x0f0f0f0f;",
            "=&r,=r,r",
            [w],
            dtype=(tl.int8, tl.int8),
            is_pure=True,
            pack=4,
        )
    else:
        return (w & 15).to(tl.int8), (w >> 4).to(tl.int8)


@triton.jit
def less_128(w, PACKED: tl.constexpr):
    """Unsigned bytes less 128, as signed ones: their highest bit turned."""
    if PACKED:
        return tl.inline_asm_elementwise("xor.b32 $0, $1, 0x80808080;", "=r,r", [w], dtype=tl.int8, is_pure=True, pack=4)
    else:
        return (w.to(tl.int32) - 128).to(tl.int8)


@triton.jit
def group_dot(q, w, LOW: tl.constexpr, HALF: tl.constexpr, BITS: tl.constexpr, PACKED: tl.constexpr):
    """Sums [BM, BN] of one group. q: pointers to the high digits, the low ones lie LOW further. w: bytes of codes [BN, ...].

    8-bit codes are taken less 128, to fit signed bytes: the caller adds that back.
    """
    if BITS == 4:
        even, odd = nibbles(w, PACKED)
        even = tl.trans(even)
        odd = tl.trans(odd)
        d = tl.dot(tl.load(q), even, out_dtype=tl.int32)
        d = tl.dot(tl.load(q + HALF), odd, d, out_dtype=tl.int32) << 8
        d = tl.dot(tl.load(q + LOW), even, d, out_dtype=tl.int32)
        return tl.dot(tl.load(q + HALF + LOW), odd, d, out_dtype=tl.int32)
    else:
        code = tl.trans(less_128(w, PACKED))
        d = tl.dot(tl.load(q), code, out_dtype=tl.int32) << 8
        return tl.dot(tl.load(q + LOW), code, d, out_dtype=tl.int32)


@triton.jit
def quarters(x, N: tl.constexpr):
    """The four columns of [N, 4]."""
    even, odd = tl.split(tl.reshape(x, (N, 2, 2)))
    first, third = tl.split(even)
    second, fourth = tl.split(odd)
    return first, second, third, fourth


@triton.jit
def group_term(q, w, total, step, s, b, LOW: tl.constexpr, GROUP: tl.constexpr, BITS: tl.constexpr, PACKED: tl.constexpr):
    d = group_dot(q, w, LOW, GROUP // 2, BITS, PACKED)
    if BITS == 8:
        d += (total * 128)[:, None]
    mass = step * total.to(tl.float32)
    return term(d, s[None, :], b[None, :], step[:, None], mass[:, None])


@triton.jit
def matrix_kernel(W, S, B, Q, STEP, TOTAL, ROWS, OFFSETS, SLOTS, Y, N, stride_w, stride_s, n_columns, n_m,
                  K: tl.constexpr, GROUP: tl.constexpr, BITS: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr,
                  STAGES: tl.constexpr, PACKED: tl.constexpr):  # fmt: skip
    """Rows OFFSETS[e]..OFFSETS[e + 1] of Y are rows ROWS[...] of the digits times the weights in slot SLOTS[e].

    stride_w, stride_s: elements of codes (bytes) and of scales from one slot to the next. The number of groups is a
    multiple of four; every element is summed as in `vector_kernel`.
    """
    NG: tl.constexpr = K // GROUP
    BYTES: tl.constexpr = GROUP * BITS // 8
    e = tl.program_id(0) // n_columns
    slot = tl.load(SLOTS + e).to(tl.int64)
    lo = tl.load(OFFSETS + e)
    hi = tl.load(OFFSETS + e + 1)
    n = (tl.program_id(0) % n_columns) * BN + tl.arange(0, BN)
    rn = tl.minimum(n, N - 1).to(tl.int64)
    four = tl.arange(0, 4)[None, :]
    weights = W + slot * stride_w + rn[:, None] * (NG * BYTES) + tl.arange(0, BYTES)[None, :]
    scales = slot * stride_s + rn[:, None] * NG + four
    for m0 in range(lo + tl.program_id(1) * BM, hi, BM * n_m):
        m = m0 + tl.arange(0, BM)
        ok = m < hi
        t = tl.load(ROWS + m, mask=ok, other=0).to(tl.int64)
        q = Q + t[:, None] * (2 * K) + tl.arange(0, GROUP // 2 if BITS == 4 else GROUP)[None, :]
        groups = t[:, None] * NG + four
        acc = tl.zeros((BM, BN), tl.float32)
        for g in tl.range(0, NG, 4, num_stages=STAGES):
            p0, p1, p2, p3 = quarters(tl.load(STEP + groups + g), BM)
            t0, t1, t2, t3 = quarters(tl.load(TOTAL + groups + g), BM)
            s0, s1, s2, s3 = quarters(tl.load(S + scales + g), BN)
            b0, b1, b2, b3 = quarters(tl.load(B + scales + g), BN)
            w = weights + g * BYTES
            x = q + g * GROUP
            pair = group_term(x, tl.load(w), t0, p0, s0, b0, K, GROUP, BITS, PACKED)
            pair += group_term(x + GROUP, tl.load(w + BYTES), t1, p1, s1, b1, K, GROUP, BITS, PACKED)
            other = group_term(x + 2 * GROUP, tl.load(w + 2 * BYTES), t2, p2, s2, b2, K, GROUP, BITS, PACKED)
            other += group_term(x + 3 * GROUP, tl.load(w + 3 * BYTES), t3, p3, s3, b3, K, GROUP, BITS, PACKED)
            acc = acc + (pair + other)
        tl.store(Y + m.to(tl.int64)[:, None] * N + n[None, :], acc, mask=ok[:, None] & (n < N)[None, :])
