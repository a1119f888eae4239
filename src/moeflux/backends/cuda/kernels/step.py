"""One decoded token in six phases a layer, each one kernel: what `ops` composes from primitives, with the same bits.

A phase loads its weights before it waits for the phase before it (programmatic dependent launch, `PDL`), then lets the next
one start. It therefore touches before the wait only constants and what an earlier phase than its predecessor wrote.
Weights: 4-bit codes in groups of 64; 8 bits for the router.
"""

from __future__ import annotations

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from moeflux.backends.cuda.kernels.arith import (
    dot_bytes,
    dot_nibbles,
    high,
    inverse,
    join_groups,
    magnitude,
    ordered_rows,
    pack4,
    round_int,
    sigmoid,
    silu,
    softplus,
    step_of,
    term,
    tree_rows,
    tree_sum,
)


@triton.jit
def turn(PDL: tl.constexpr):
    """Wait for the phase before, then let the next one start."""
    if PDL:
        gdc_wait()
        gdc_launch_dependents()


@triton.jit
def places(G: tl.constexpr):
    """[G, 8, 4, 2]: place of an input by group, word of eight codes, byte and nibble."""
    g = tl.arange(0, G)[:, None, None, None] * 64 + tl.arange(0, 8)[None, :, None, None] * 8
    return g + tl.arange(0, 4)[None, None, :, None] * 2 + tl.arange(0, 2)[None, None, None, :]


@triton.jit
def root(SQUARES, eps, LOG: tl.constexpr):
    """1 / rms of a vector of 2^LOG, of which whoever wrote it left the squares' sums over each 16 neighbours."""
    total = tree_sum(tl.load(SQUARES + tl.arange(0, 1 << (LOG - 4))), LOG - 4)
    return tl.rsqrt(total * (1.0 / (1 << LOG)) + eps)


@triton.jit
def leave_squares(SQUARES, first, h, R: tl.constexpr):
    """Sums of squares of rows first..first + R, for each 16 of them."""
    sums = tree_rows(tl.reshape(h * h, (R // 16, 16)), R // 16, 4)
    tl.store(SQUARES + first // 16 + tl.arange(0, R // 16), sums)


@triton.jit
def nibble_digits(x):
    """[G, 8, 4, 2] -> words [G, 8] of high and low digits at even and odd places; step and mass of each group."""
    m = tl.max(tl.max(tl.max(magnitude(x), 3), 2), 1)
    q = round_int(x * inverse(m)[:, None, None, None])
    h = high(q)
    he, ho = tl.split(h)
    le, lo = tl.split(q - h * 256)
    step = step_of(m)
    total = tl.sum(tl.sum(tl.sum(q, 3), 2), 1)
    return pack4(he), pack4(ho), pack4(le), pack4(lo), step, step * total.to(tl.float32)


@triton.jit
def tile(W, S, B, r, G: tl.constexpr):
    """Codes [R, G, 8] and scales and biases [R, G] of rows r."""
    g = tl.arange(0, G)
    at = r[:, None] * G + g[None, :]
    w = tl.load(W + at[:, :, None] * 8 + tl.arange(0, 8)[None, None, :])
    return w, tl.load(S + at), tl.load(B + at)


@triton.jit
def terms(w, s, b, he, ho, le, lo, step, mass, DP4A: tl.constexpr):
    d = tl.sum(dot_nibbles(w, he[None, :, :], ho[None, :, :], le[None, :, :], lo[None, :, :], DP4A), 2)
    return term(d, s, b, step[None, :], mass[None, :])


@triton.jit
def product(w, s, b, he, ho, le, lo, step, mass, R: tl.constexpr, G: tl.constexpr, DP4A: tl.constexpr):
    start = tl.zeros((R,), tl.float32)
    return join_groups(terms(w, s, b, he, ho, le, lo, step, mass, DP4A), start, R, G)


@triton.jit
def project_kernel(W, S, B, H, SQUARES, NORM, eps, OUT, BASE, CONV, TAPS, A_LOG, DT, CHANNELS, GATES, HEADS,
                   G: tl.constexpr, LOG: tl.constexpr, R: tl.constexpr, DELTA: tl.constexpr, DP4A: tl.constexpr,
                   PDL: tl.constexpr):  # fmt: skip
    """Norm and all input projections. DELTA: rows are q, k, v (through the convolution), z, b, a, each ready to be used.

    The state of the convolution lies CONV[0] * 16 bytes behind BASE.
    """
    first = tl.program_id(0) * R
    r = first + tl.arange(0, R)
    w, s, b = tile(W, S, B, r, G)
    turn(PDL)
    i = places(G)
    x = tl.load(H + i) * root(SQUARES, eps, LOG) * tl.load(NORM + i)
    he, ho, le, lo, step, mass = nibble_digits(x)
    y = product(w, s, b, he, ho, le, lo, step, mass, R, G, DP4A)
    if DELTA:
        if first < CHANNELS:
            state = BASE + tl.load(CONV) * 4 + r
            c0 = tl.load(state)
            c1 = tl.load(state + CHANNELS)
            c2 = tl.load(state + 2 * CHANNELS)
            tl.store(state, c1)
            tl.store(state + CHANNELS, c2)
            tl.store(state + 2 * CHANNELS, y)
            a = c0 * tl.load(TAPS + r * 4) + c1 * tl.load(TAPS + r * 4 + 1)
            a = a + c2 * tl.load(TAPS + r * 4 + 2) + y * tl.load(TAPS + r * 4 + 3)
            tl.store(OUT + r, silu(a))
        elif first < CHANNELS + GATES:
            tl.store(OUT + r, silu(y))
        else:
            n = r - CHANNELS - GATES
            last = n >= HEADS
            n = tl.where(last, n - HEADS, n)
            ok = n < HEADS
            a = y + tl.load(DT + n, mask=ok, other=0.0)
            decay = tl.exp(-tl.exp(tl.load(A_LOG + n, mask=ok, other=0.0)) * softplus(a))
            tl.store(OUT + r, tl.where(last, decay, sigmoid(y)), mask=ok)
    else:
        tl.store(OUT + r, y)


@triton.jit
def delta_kernel(Y, BASE, STATE, NORM, O, SIZES, KEY_HEADS, RATIO, CHANNELS, GATES, HEADS, scale, DV: tl.constexpr,
                 BV: tl.constexpr, LOG: tl.constexpr, PDL: tl.constexpr):  # fmt: skip
    """The delta rule of one token over BV columns of one value head.

    Left for the output projection: the readings times norm weight and gate, and the sums of squares over each 4 readings.
    """
    DK: tl.constexpr = 1 << LOG
    parts: tl.constexpr = DV // BV
    head = tl.program_id(0) // parts
    v = (tl.program_id(0) % parts) * BV + tl.arange(0, BV)
    c = tl.arange(0, DK)
    place = BASE + tl.load(STATE) * 4 + (head * DV + v)[:, None] * DK + c[None, :]
    state = tl.load(place)
    turn(PDL)
    key = head // RATIO
    q = tl.load(Y + key * DK + c)
    k = tl.load(Y + (KEY_HEADS + key) * DK + c)
    value = tl.load(Y + 2 * KEY_HEADS * DK + head * DV + v)
    beta = tl.load(Y + CHANNELS + GATES + head)
    decay = tl.load(Y + CHANNELS + GATES + HEADS + head)
    q = q * tl.rsqrt(tree_sum(q * q, LOG) + 1e-6) * scale
    k = k * tl.rsqrt(tree_sum(k * k, LOG) + 1e-6)
    key_query = tree_sum(k * q, LOG)
    by_key = tree_rows(state * k[None, :], BV, LOG)
    by_query = tree_rows(state * q[None, :], BV, LOG)
    change = beta * (value - decay * by_key)
    tl.store(place, tl.fma(tl.broadcast_to(change[:, None], (BV, DK)), tl.broadcast_to(k[None, :], (BV, DK)), state * decay))
    o = decay * by_query + change * key_query
    tl.store(O + head * DV + v, o * tl.load(NORM + v) * tl.load(Y + CHANNELS + head * DV + v))
    sums = tree_rows(tl.reshape(o * o, (BV // 4, 4)), BV // 4, 2)
    first = (head * DV + (tl.program_id(0) % parts) * BV) // 4
    tl.store(SIZES + first + tl.arange(0, BV // 4), sums)


@triton.jit
def output_kernel(W, S, B, O, SIZES, eps, H, SQUARES, G: tl.constexpr, HEADS: tl.constexpr, LOG: tl.constexpr,
                  R: tl.constexpr, DELTA: tl.constexpr, DP4A: tl.constexpr, PDL: tl.constexpr):  # fmt: skip
    """Output projection onto the residual stream. DELTA: each head of 2^LOG is divided by its root mean square first."""
    r = tl.program_id(0) * R + tl.arange(0, R)
    w, s, b = tile(W, S, B, r, G)
    turn(PDL)
    before = tl.load(H + r)
    if DELTA:
        i = tl.arange(0, HEADS)[:, None]
        quarters: tl.constexpr = 1 << (LOG - 2)
        total = tree_rows(tl.load(SIZES + i * quarters + tl.arange(0, quarters)[None, :]), HEADS, LOG - 2)
        o = tl.load(O + i * (1 << LOG) + tl.arange(0, 1 << LOG)[None, :])
        o = o * tl.rsqrt(total * (1.0 / (1 << LOG)) + eps)[:, None]
        x = tl.reshape(o, (G, 8, 4, 2))
    else:
        x = tl.load(O + places(G))
    he, ho, le, lo, step, mass = nibble_digits(x)
    h = before + product(w, s, b, he, ho, le, lo, step, mass, R, G, DP4A)
    tl.store(H + r, h)
    leave_squares(SQUARES, tl.program_id(0) * R, h, R)


@triton.jit
def route_kernel(RW, RS, RB, GW, GS, GB, UW, US, UB, H, SQUARES, NORM, eps, LOGITS, ACT, ROUTERS,
                 G: tl.constexpr, LOG: tl.constexpr, R: tl.constexpr, DP4A: tl.constexpr, PDL: tl.constexpr):  # fmt: skip
    """Norm, then in the first ROUTERS programs rows of the 8-bit router, in the others of the shared gate and up."""
    if tl.program_id(0) < ROUTERS:
        r = tl.program_id(0) * R + tl.arange(0, R)
        g = tl.arange(0, G)
        k = tl.arange(0, 16)
        at = r[:, None] * G + g[None, :]
        w = tl.load(RW + at[:, :, None] * 16 + k[None, None, :])
        s = tl.load(RS + at)
        b = tl.load(RB + at)
        turn(PDL)
        i = g[:, None, None] * 64 + k[None, :, None] * 4 + tl.arange(0, 4)[None, None, :]
        x = tl.load(H + i) * root(SQUARES, eps, LOG) * tl.load(NORM + i)
        m = tl.max(tl.max(magnitude(x), 2), 1)
        q = round_int(x * inverse(m)[:, None, None])
        h = high(q)
        step = step_of(m)
        mass = step * tl.sum(tl.sum(q, 2), 1).to(tl.float32)
        d = tl.sum(dot_bytes(w, pack4(h)[None, :, :], pack4(q - h * 256)[None, :, :], DP4A), 2)
        start = tl.zeros((R,), tl.float32)
        tl.store(LOGITS + r, join_groups(term(d, s, b, step[None, :], mass[None, :]), start, R, G))
    else:  # other names than above: Triton wants one type for a name that both branches use
        r1 = (tl.program_id(0) - ROUTERS) * R + tl.arange(0, R)
        w1, s1, b1 = tile(GW, GS, GB, r1, G)
        w2, s2, b2 = tile(UW, US, UB, r1, G)
        turn(PDL)
        i1 = places(G)
        x1 = tl.load(H + i1) * root(SQUARES, eps, LOG) * tl.load(NORM + i1)
        he, ho, le, lo, step1, mass1 = nibble_digits(x1)
        gate = product(w1, s1, b1, he, ho, le, lo, step1, mass1, R, G, DP4A)
        up = product(w2, s2, b2, he, ho, le, lo, step1, mass1, R, G, DP4A)
        tl.store(ACT + r1, silu(gate) * up)


@triton.jit
def gate_up_kernel(POOL, SCALES, TABLE, LOGITS, H, SQUARES, NORM, eps, ACT, SLOT: tl.constexpr, K: tl.constexpr,
                   EXPERTS: tl.constexpr, WIDTH: tl.constexpr, G: tl.constexpr, LOG: tl.constexpr, R: tl.constexpr,
                   DP4A: tl.constexpr, PDL: tl.constexpr):  # fmt: skip
    """silu(gate) * up of R rows of the expert of one rank. POOL in words, SCALES the same memory in bf16.

    SLOT: words of a slot: codes, scales and biases of gate, then of up, then of down. TABLE: slot of each expert.
    """
    CODES: tl.constexpr = WIDTH * G * 8  # words of one matrix
    MATRIX: tl.constexpr = CODES + WIDTH * G
    rank = tl.program_id(0) % K
    part = tl.program_id(0) // K
    turn(PDL)
    i = tl.arange(0, EXPERTS)
    logits = tl.load(LOGITS + i)
    expert = tl.argmax(logits, 0)
    for _ in range(rank):
        logits = tl.where(i == expert, float("-inf"), logits)
        expert = tl.argmax(logits, 0)
    slot = tl.load(TABLE + expert).to(tl.int64) * SLOT
    r = part * R + tl.arange(0, R)
    scales = SCALES + slot * 2 + CODES * 2
    w1, s1, b1 = tile(POOL + slot, scales, scales + WIDTH * G, r, G)
    scales += MATRIX * 2
    w2, s2, b2 = tile(POOL + slot + MATRIX, scales, scales + WIDTH * G, r, G)
    p = places(G)
    x = tl.load(H + p) * root(SQUARES, eps, LOG) * tl.load(NORM + p)
    he, ho, le, lo, step, mass = nibble_digits(x)
    gate = product(w1, s1, b1, he, ho, le, lo, step, mass, R, G, DP4A)
    up = product(w2, s2, b2, he, ho, le, lo, step, mass, R, G, DP4A)
    tl.store(ACT + rank * WIDTH + r, silu(gate) * up)


@triton.jit
def down_kernel(POOL, SCALES, TABLE, SW, SS, SB, LOGITS, ACT, H, SQUARES, scale, SLOT: tl.constexpr, K: tl.constexpr,
                EXPERTS: tl.constexpr, WIDTH: tl.constexpr, G: tl.constexpr, R: tl.constexpr, DP4A: tl.constexpr,
                PDL: tl.constexpr):  # fmt: skip
    """R rows of: residual + (experts in rank order, by their weights + shared expert by its gate)."""
    GI: tl.constexpr = WIDTH // 64  # groups of an inner vector
    CODES: tl.constexpr = WIDTH * G * 8
    MATRIX: tl.constexpr = CODES + WIDTH * G
    r = tl.program_id(0) * R + tl.arange(0, R)
    w2, s2, b2 = tile(SW, SS, SB, r, GI)
    i = tl.arange(0, EXPERTS)
    logits = tl.load(LOGITS + i)
    top = tl.max(logits, 0)
    g = tl.arange(0, K * GI)
    rank = tl.arange(0, K)
    experts = tl.zeros((K * GI,), tl.int32)
    shares = tl.zeros((K,), tl.float32)
    total = 0.0
    for n in range(K):
        best = tl.max(logits, 0)
        expert = tl.argmax(logits, 0).to(tl.int32)
        logits = tl.where(i == expert, float("-inf"), logits)
        share = tl.exp(best - top)
        total += share
        experts = tl.where(g // GI == n, expert, experts)
        shares = tl.where(rank == n, share, shares)
    slots = tl.load(TABLE + experts).to(tl.int64) * SLOT + 2 * MATRIX
    at = r[:, None] * GI + (g % GI)[None, :]
    w = tl.load(POOL + slots[None, :, None] + at[:, :, None] * 8 + tl.arange(0, 8)[None, None, :])
    scales = SCALES + (slots + CODES)[None, :] * 2 + at
    s = tl.load(scales)
    b = tl.load(scales + WIDTH * G)
    gate = sigmoid(tl.load(LOGITS + EXPERTS))
    turn(PDL)
    before = tl.load(H + r)
    he, ho, le, lo, step, mass = nibble_digits(tl.load(ACT + places(K * GI)))
    pairs = tl.sum(tl.reshape(terms(w, s, b, he, ho, le, lo, step, mass, DP4A), (R, K * GI // 2, 2)), 2)
    blocks = tl.sum(tl.reshape(pairs, (R, K * GI // 4, 2)), 2)
    if GI > 4:
        blocks = tl.sum(tl.reshape(blocks, (R, K, 2)), 2)
    weights = shares / total * scale
    y = ordered_rows(blocks * weights[None, :], tl.zeros((R,), tl.float32), R, K)
    he, ho, le, lo, step, mass = nibble_digits(tl.load(ACT + K * WIDTH + places(GI)))
    y = y + product(w2, s2, b2, he, ho, le, lo, step, mass, R, GI, DP4A) * gate
    h = before + y
    tl.store(H + r, h)
    leave_squares(SQUARES, tl.program_id(0) * R, h, R)


@triton.jit
def head_kernel(W, S, B, H, SQUARES, NORM, eps, LOGITS, BEST, INDEX, N, G: tl.constexpr, LOG: tl.constexpr, R: tl.constexpr,
                STAGES: tl.constexpr, DP4A: tl.constexpr, PDL: tl.constexpr):  # fmt: skip
    """Logits of the vocabulary, and of each program's rows the largest with its lowest place. N is a multiple of R."""
    turn(PDL)
    i = places(G)
    x = tl.load(H + i) * root(SQUARES, eps, LOG) * tl.load(NORM + i)
    he, ho, le, lo, step, mass = nibble_digits(x)
    best = float("-inf")
    index = 0
    for block in tl.range(tl.program_id(0), N // R, tl.num_programs(0), num_stages=STAGES):
        r = block * R + tl.arange(0, R)
        w, s, b = tile(W, S, B, r, G)
        y = product(w, s, b, he, ho, le, lo, step, mass, R, G, DP4A)
        tl.store(LOGITS + r, y)
        largest = tl.max(y, 0)
        index = tl.where(largest > best, block * R + tl.argmax(y, 0).to(tl.int32), index)
        best = tl.maximum(best, largest)
    tl.store(BEST + tl.program_id(0), best)
    tl.store(INDEX + tl.program_id(0), index)


@triton.jit
def next_kernel(BEST, INDEX, N, EW, ES, EB, H, SQUARES, POSITION, TOKENS, LIMIT, PAD: tl.constexpr, K: tl.constexpr,
                PDL: tl.constexpr):  # fmt: skip
    """The token of the largest logit, the lowest where several are; its embedding; the position moves on."""
    turn(PDL)
    i = tl.arange(0, PAD)
    best = tl.load(BEST + i, mask=i < N, other=float("-inf"))
    index = tl.load(INDEX + i, mask=i < N, other=2147483647)
    token = tl.min(tl.where(best == tl.max(best, 0), index, 2147483647), 0)
    position = tl.load(POSITION)
    c = tl.arange(0, K)
    row = token.to(tl.int64)
    code = (tl.load(EW + row * (K // 8) + c // 8) >> ((c % 8) * 4)) & 15
    group = row * (K // 64) + c // 64
    h = code.to(tl.float32) * tl.load(ES + group).to(tl.float32) + tl.load(EB + group).to(tl.float32)
    tl.store(H + c, h)
    leave_squares(SQUARES, 0, h, K)
    tl.store(TOKENS + (position + 1) % LIMIT, token)
    tl.store(POSITION, position + 1)
