"""Attention over kept rows and the gated delta rule: the same arithmetic for a prompt and for a token."""

from __future__ import annotations

import triton
import triton.language as tl

from moeflux.backends.cuda.kernels.arith import tree_rows

CHUNK = tl.constexpr(32)  # positions whose scores are joined first; chunks lie at absolute positions


@triton.jit
def thirds(x):
    """float32 as three bf16 parts, largest first, which together hold all of its bits. Cut off, so each part is exact."""
    first = (x.to(tl.int32, bitcast=True) & -65536).to(tl.float32, bitcast=True)
    rest = x - first
    second = (rest.to(tl.int32, bitcast=True) & -65536).to(tl.float32, bitcast=True)
    return first.to(tl.bfloat16), second.to(tl.bfloat16), (rest - second).to(tl.bfloat16)


@triton.jit
def exact_dot(x, y, BF16: tl.constexpr):
    """A product as good as in float32, on tensor cores. BF16: y is bf16, so three products with the parts of x suffice."""
    if BF16:
        first, second, third = thirds(x)
        return tl.dot(first, y, tl.dot(second, y, tl.dot(third, y)))
    else:
        return tl.dot(x, y, input_precision="tf32x3")


@triton.jit
def attend_chunk(q, k, v, seen, first, scale, BF16: tl.constexpr, ROWS: tl.constexpr):
    """Rows q [ROWS, D] over one chunk: the largest score, the sum of the shares and the shared values. Row i sees `seen[i]`
    positions; the chunk begins at `first`."""
    n = first + tl.arange(0, CHUNK)
    scores = exact_dot(q, tl.trans(k), BF16) * scale
    scores = tl.where(n[None, :] < seen[:, None], scores, float("-inf"))
    best = tl.max(scores, 1)
    share = tl.exp(scores - tl.where(best == float("-inf"), 0.0, best)[:, None])
    return best, tree_rows(share, ROWS, 5), exact_dot(share, v, BF16)


@triton.jit
def part(best, joined):
    """The factor of what was computed beside `best`, now that `joined` is the largest score."""
    return tl.where(best == float("-inf"), 0.0, tl.exp(best - tl.where(joined == float("-inf"), 0.0, joined)))


@triton.jit
def attend_kernel(Q, K, V, OUT, n_rows, position, scale, stride_k, stride_v, head_k, head_v, GROUPS, RATIO, D, DV,
                  PAD_D: tl.constexpr, PAD_V: tl.constexpr, BF16: tl.constexpr, ROWS: tl.constexpr):  # fmt: skip
    """Q [T, GROUPS * RATIO, D]. ROWS (16 or 32) of one group a program: they go through a group's heads, then tokens."""
    g = tl.program_id(1)
    i = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    ok = i < n_rows
    t = i // RATIO
    row = (t * (GROUPS * RATIO) + g * RATIO + i % RATIO).to(tl.int64)
    c, cv, p = tl.arange(0, PAD_D), tl.arange(0, PAD_V), tl.arange(0, CHUNK)
    q = tl.load(Q + row[:, None] * D + c[None, :], mask=ok[:, None] & (c < D)[None, :], other=0.0)
    seen = tl.where(ok, position + t + 1, 0)
    longest = tl.max(seen, 0)
    best = tl.full((ROWS,), float("-inf"), tl.float32)
    total = tl.zeros((ROWS,), tl.float32)
    out = tl.zeros((ROWS, PAD_V), tl.float32)
    for first in range(0, longest, CHUNK):
        at = (first + p).to(tl.int64)
        there = (first + p) < longest
        k = tl.load(K + at[:, None] * stride_k + g * head_k + c[None, :], mask=there[:, None] & (c < D)[None, :], other=0.0)
        v = tl.load(V + at[:, None] * stride_v + g * head_v + cv[None, :], mask=there[:, None] & (cv < DV)[None, :],
                    other=0.0)  # fmt: skip
        b, s, o = attend_chunk(q, k, v, seen, first, scale, BF16, ROWS)
        joined = tl.maximum(best, b)
        old, new = part(best, joined), part(b, joined)
        total = total * old + s * new
        out = out * old[:, None] + o * new[:, None]
        best = joined
    tl.store(OUT + row[:, None] * DV + cv[None, :], out / total[:, None], mask=ok[:, None] & (cv < DV)[None, :])


@triton.jit
def delta_step(state, q, k, v, decay, beta, BV: tl.constexpr, LOG: tl.constexpr):
    """One token over BV columns of a head's matrix [BV, 2^LOG]: the new matrix and its reading by q."""
    key_query = tl.sum(tree_rows(tl.reshape(k * q, (1, 1 << LOG)), 1, LOG), 0)
    by_key = tree_rows(state * k[None, :], BV, LOG)
    by_query = tree_rows(state * q[None, :], BV, LOG)
    change = beta * (v - decay * by_key)
    DK: tl.constexpr = 1 << LOG
    added = tl.fma(tl.broadcast_to(change[:, None], (BV, DK)), tl.broadcast_to(k[None, :], (BV, DK)), state * decay)
    return added, decay * by_query + change * key_query


@triton.jit
def delta_kernel(Q, K, V, DECAY, BETA, STATE, OUT, T, HEADS, RATIO, DV, BV: tl.constexpr, LOG: tl.constexpr):
    """Token by token, the matrix in registers. STATE [heads, dv, dk]; BV columns of one value head a program."""
    DK: tl.constexpr = 1 << LOG
    parts = tl.cdiv(DV, BV)
    head = tl.program_id(0) // parts
    v = (tl.program_id(0) % parts) * BV + tl.arange(0, BV)
    c = tl.arange(0, DK)
    ok = v < DV
    place = STATE + (head * DV + v).to(tl.int64)[:, None] * DK + c[None, :]
    state = tl.load(place, mask=ok[:, None], other=0.0)
    row = head.to(tl.int64)
    key = ((head // RATIO) * DK + c).to(tl.int64)
    q, k, x = tl.load(Q + key), tl.load(K + key), tl.load(V + row * DV + v, mask=ok, other=0.0)
    decay, beta = tl.load(DECAY + row), tl.load(BETA + row)
    for t in range(T):
        # What the next token needs is under way while this one is computed.
        more = tl.where(t < T - 1, 1, 0)
        after = row + more * HEADS
        key += more * (HEADS // RATIO) * DK
        next_q, next_k = tl.load(Q + key), tl.load(K + key)
        next_x = tl.load(V + after * DV + v, mask=ok, other=0.0)
        next_decay, next_beta = tl.load(DECAY + after), tl.load(BETA + after)
        state, out = delta_step(state, q, k, x, decay, beta, BV, LOG)
        tl.store(OUT + row * DV + v, out, mask=ok)
        q, k, x, decay, beta, row = next_q, next_k, next_x, next_decay, next_beta, after
    tl.store(place, state, mask=ok[:, None])
