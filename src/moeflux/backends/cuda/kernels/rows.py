"""What is done to each row by itself: norms, activations, gates, rotation, the router's choice."""

from __future__ import annotations

import triton
import triton.language as tl

from moeflux.backends.cuda.kernels.arith import sigmoid, silu, softplus, tree_sum


@triton.jit
def norm_kernel(X, W, Y, D, inverse, eps, LOG: tl.constexpr, MEAN: tl.constexpr):
    """MEAN: x / sqrt(mean x^2 + eps) * weight; else x / sqrt(sum x^2 + eps). One row of D = 1 / inverse a program."""
    row = tl.program_id(0).to(tl.int64)
    c = tl.arange(0, 1 << LOG)
    x = tl.load(X + row * D + c, mask=c < D, other=0.0)
    total = tree_sum(x * x, LOG)
    if MEAN:
        y = x * tl.rsqrt(total * inverse + eps) * tl.load(W + c, mask=c < D, other=0.0)
    else:
        y = x * tl.rsqrt(total + eps)
    tl.store(Y + row * D + c, y, mask=c < D)


@triton.jit
def gated_norm_kernel(X, W, Z, Y, D, inverse, eps, LOG: tl.constexpr):
    """x * weight * silu(z) / sqrt(mean x^2 + eps), in this order. One row of D a program."""
    row = tl.program_id(0).to(tl.int64)
    c = tl.arange(0, 1 << LOG)
    x = tl.load(X + row * D + c, mask=c < D, other=0.0)
    gate = silu(tl.load(Z + row * D + c, mask=c < D, other=0.0))
    r = tl.rsqrt(tree_sum(x * x, LOG) * inverse + eps)
    tl.store(Y + row * D + c, x * tl.load(W + c, mask=c < D, other=0.0) * gate * r, mask=c < D)


@triton.jit
def map_kernel(X, Y, n, SILU: tl.constexpr, BLOCK: tl.constexpr):
    i = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    x = tl.load(X + i, mask=i < n, other=0.0)
    tl.store(Y + i, silu(x) if SILU else sigmoid(x), mask=i < n)


@triton.jit
def gates_kernel(A, B, A_LOG, DT, DECAY, BETA, H, BLOCK: tl.constexpr):
    """decay = exp(-exp(A_log) softplus(a + dt)), beta = sigmoid(b). One token a program."""
    c = tl.arange(0, BLOCK)
    at = tl.program_id(0).to(tl.int64) * H + c
    a = tl.load(A + at, mask=c < H, other=0.0) + tl.load(DT + c, mask=c < H, other=0.0)
    decay = tl.exp(-tl.exp(tl.load(A_LOG + c, mask=c < H, other=0.0)) * softplus(a))
    tl.store(DECAY + at, decay, mask=c < H)
    tl.store(BETA + at, sigmoid(tl.load(B + at, mask=c < H, other=0.0)), mask=c < H)


@triton.jit
def rotate_kernel(X, COS, SIN, Y, n_heads, D: tl.constexpr, HALF: tl.constexpr, PAD: tl.constexpr, PAIRED: tl.constexpr):
    """The pair (a, b) turns to (a cos - b sin, b cos + a sin). One head of one token a program; rows of COS by token."""
    i = tl.program_id(0).to(tl.int64)
    c = tl.arange(0, PAD)
    ok = c < HALF
    a = c * 2 if PAIRED else c
    b = a + (1 if PAIRED else HALF)
    x = tl.load(X + i * D + a, mask=ok, other=0.0)
    y = tl.load(X + i * D + b, mask=ok, other=0.0)
    cos = tl.load(COS + (i // n_heads) * HALF + c, mask=ok, other=0.0)
    sin = tl.load(SIN + (i // n_heads) * HALF + c, mask=ok, other=0.0)
    tl.store(Y + i * D + a, x * cos - y * sin, mask=ok)
    tl.store(Y + i * D + b, y * cos + x * sin, mask=ok)


@triton.jit
def route_kernel(LOGITS, IDS, WEIGHTS, n_experts, k, scale, LOG: tl.constexpr, PAD: tl.constexpr, NORMALIZE: tl.constexpr):
    """The k largest logits, the lower index first where two are equal, and their softmax. One token a program."""
    t = tl.program_id(0).to(tl.int64)
    i = tl.arange(0, 1 << LOG)
    logits = tl.load(LOGITS + t * n_experts + i, mask=i < n_experts, other=float("-inf"))
    top = tl.max(logits, 0)
    total = tree_sum(tl.exp(logits - top), LOG)
    rank = tl.arange(0, PAD)
    ids = tl.zeros((PAD,), tl.int32)
    shares = tl.zeros((PAD,), tl.float32)
    chosen = 0.0
    for n in range(k):
        best = tl.max(logits, 0)
        index = tl.argmax(logits, 0).to(tl.int32)
        share = tl.exp(best - top)
        chosen += share
        ids = tl.where(rank == n, index, ids)
        shares = tl.where(rank == n, share, shares)
        logits = tl.where(i == index, float("-inf"), logits)
    if NORMALIZE:
        total = chosen
    tl.store(IDS + t * k + rank, ids, mask=rank < k)
    tl.store(WEIGHTS + t * k + rank, shares / total * scale, mask=rank < k)


@triton.jit
def combine_kernel(Y, INVERSE, WEIGHTS, OUT, D, k, BLOCK: tl.constexpr):
    """OUT[t] = sum of the token's k outputs, in rank order. INVERSE[t, rank]: the row of Y."""
    t = tl.program_id(0).to(tl.int64)
    c = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    ok = c < D
    acc = tl.zeros((BLOCK,), tl.float32)
    for n in range(k):
        row = tl.load(INVERSE + t * k + n).to(tl.int64)
        acc += tl.load(WEIGHTS + t * k + n) * tl.load(Y + row * D + c, mask=ok, other=0.0)
    tl.store(OUT + t * D + c, acc, mask=ok)


@triton.jit
def count_kernel(IDS, COUNT, PLACE, n, BLOCK: tl.constexpr):
    """How many choices each expert has, and which of them a choice is. Their order does not matter: rows stay apart."""
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    expert = tl.load(IDS + i, mask=i < n, other=0)
    tl.store(PLACE + i, tl.atomic_add(COUNT + expert, 1, mask=i < n), mask=i < n)


@triton.jit
def spread_kernel(IDS, OFFSETS, PLACE, ROWS, n, k, BLOCK: tl.constexpr):
    """Choices side by side by expert: ROWS says whose token a row is, PLACE becomes the row of a choice."""
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    expert = tl.load(IDS + i, mask=i < n, other=0)
    place = tl.load(OFFSETS + expert, mask=i < n, other=0) + tl.load(PLACE + i, mask=i < n, other=0)
    tl.store(ROWS + place, i // k, mask=i < n)
    tl.store(PLACE + i, place, mask=i < n)
