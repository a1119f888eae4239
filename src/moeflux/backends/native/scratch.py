"""Bytes that a run over T tokens needs besides weights and state: what native/{machine,mixers,experts,layer}.cpp ask for.

Each buffer there is used by several blocks in turn and only grows, so it costs what its largest use does. The names below
are those of the C++ code. A test compares the sum with what the machine says it used.
"""

from __future__ import annotations

from collections.abc import Iterator

from moeflux.core.pages import HUGE_PAGE, PAGE, round_up
from moeflux.models.spec import Attention, DeltaNet, Dense, Layer, Mixer, Mla, ModelSpec, Moe

F32, POINTER = 4, 8
ATTEND_TOKENS, ATTEND_HEADS, ATTEND_BLOCK, ATTEND_TURNED = 16, 8, 64, 32  # as in native/kernels.h
LOOK_AHEAD_ROWS = 128  # as in native/stream.h
TURN_TOKENS = 256  # as in native/layer.cpp
TURN_PAIRS = 2048  # as in native/experts.cpp
WORKSPACE_BYTES = 2**20  # of one thread: kernels unpack rows there
Use = tuple[str, int]  # buffer, bytes


def scratch_bytes(spec: ModelSpec, tokens: int, threads: int, integer: bool) -> int:
    """Resident bytes for chunks of so many tokens. `integer`: the experts are affine, their inputs rounded to int8."""
    buffers = machine_bytes(spec, tokens, threads, integer)
    k = max(moe.router.k for _, moe in spec.moe_layers())
    rows = 2 * tokens * spec.hidden * F32 + 2 * tokens * k * 8  # x twice, and who chose what
    return sum(_resident(n) for n in buffers.values()) + threads * WORKSPACE_BYTES + rows


def machine_bytes(spec: ModelSpec, tokens: int, threads: int, integer: bool) -> dict[str, int]:
    """Of each of the machine's buffers."""
    most: dict[str, int] = {}
    for layer in {(layer.mixer, layer.ffn): layer for layer in spec.layers}.values():
        for name, n in _uses(spec, layer, tokens, threads, integer):
            most[name] = max(most.get(name, 0), n)
    return most


def _uses(spec: ModelSpec, layer: Layer, t: int, threads: int, integer: bool) -> Iterator[Use]:
    yield "floats7", t * spec.hidden * F32
    yield "floats8", t * spec.hidden * F32
    yield "kPointers", 4 * _turn(t) * POINTER
    yield "kRecords0", _records(t, spec.hidden)
    yield "kRecords1", _records(t, spec.hidden)  # where two codecs meet, as 4-bit weights and 8-bit gates do
    yield from _mixer(layer.mixer, _turn(t), threads)
    if isinstance(layer.ffn, Dense):
        yield from _mlp(layer.ffn.width, _turn(t))
    else:
        yield from _experts(spec, layer.ffn, t, integer)


def _mixer(mixer: Mixer, t: int, threads: int) -> Iterator[Use]:
    match mixer:
        case Attention(n_heads=heads, n_kv_heads=groups, head_dim=dim, gated=gated):
            yield "floats0", t * heads * dim * (2 if gated else 1) * F32
            yield "floats1", t * groups * dim * F32
            yield "floats2", t * groups * dim * F32
            yield "floats3", t * heads * dim * F32
            yield "kFirst", t * heads * dim * F32
            yield "kSecond", t * groups * dim * F32
            yield "kAngles", t * mixer.rope.dim * F32
            yield "kThird", _attend(heads // groups, dim, dim, threads)
            yield "kRecords0", _records(t, heads * dim)
        case Mla(n_heads=heads, kv_rank=rank):
            yield "floats0", t * heads * (mixer.nope_dim + mixer.rope.dim) * F32
            yield "floats1", t * mixer.latent_dim * F32
            yield "floats2", t * max(mixer.q_rank or 0, heads * mixer.nope_dim, heads * mixer.value_dim) * F32
            yield "floats3", t * heads * rank * F32
            yield "floats4", t * heads * rank * F32
            yield "kFirst", t * heads * mixer.latent_dim * F32
            yield "kAngles", t * mixer.rope.dim * F32
            yield "kThird", _attend(heads, mixer.latent_dim, rank, threads)
            yield "kRecords0", _records(t, max(mixer.q_rank or 0, heads * mixer.value_dim))
        case DeltaNet(n_value_heads=heads):
            values = heads * mixer.value_dim
            yield "floats0", t * mixer.channels * F32
            yield "floats1", t * values * F32
            yield "floats2", t * heads * F32
            yield "floats3", t * heads * F32
            yield "floats4", t * values * F32
            yield "kFirst", t * mixer.channels * F32
            yield "kSecond", t * heads * 2 * F32
            yield "kRecords0", _records(t, values)
            if mixer.fused:
                yield "floats5", t * (mixer.channels + values) * F32
                yield "floats6", t * 2 * heads * F32


def _experts(spec: ModelSpec, moe: Moe, t: int, integer: bool) -> Iterator[Use]:
    """As many as a turn takes: fewer at a time need less. Few tokens take the shared expert along."""
    pairs, shared = t * moe.router.k, t if moe.shared_width else 0
    at_once, along = min(pairs, TURN_PAIRS), shared if t <= TURN_TOKENS else 0
    inner = at_once * moe.width + along * (moe.shared_width or 0)
    yield "floats0", _turn(t) * moe.router.n_experts * F32
    yield "floats5", pairs * spec.hidden * F32
    yield "floats6", shared * spec.hidden * F32
    yield "floats9", pairs * F32
    yield "floats10", pairs * 8
    ahead = min(t, LOOK_AHEAD_ROWS)
    yield "floats11", ahead * spec.hidden * F32
    yield "floats12", ahead * moe.router.n_experts * F32
    yield "floats13", ahead * moe.router.k * F32
    yield "kFirst", inner * F32
    yield "kSecond", inner * F32
    yield "kThird", along * F32
    yield "kPointers", ((at_once + along) * 6 + along) * POINTER
    yield "kInner", at_once * _inner(moe.width, integer) + along * _inner(moe.shared_width or 0, integer)
    if moe.shared_width:
        yield from _mlp(moe.shared_width, _turn(t))


def _mlp(width: int, t: int) -> Iterator[Use]:
    yield "kFirst", t * width * F32
    yield "kSecond", t * width * F32
    yield "kThird", t * F32
    yield "kPointers", 7 * t * POINTER
    yield "kInner", t * width * F32


def _turn(t: int) -> int:
    """Tokens of the largest turn."""
    return -(-t // -(-t // TURN_TOKENS))


def _inner(width: int, integer: bool) -> int:
    return _record(width) if integer else width * F32


def _records(t: int, cols: int) -> int:
    """Pointers, then a record for each token."""
    return round_up(t * POINTER, 64) + t * _record(cols)


def _record(cols: int) -> int:
    """int8 values and eight bytes for each group, of 32 at least; or, for 4-bit weights, in pairs of groups of 64."""
    pairs = (cols // 64 + 1) // 2
    return round_up(max(round_up(cols, 64) + cols // 32 * 8, pairs * (128 + 16)), 64)


def _attend(heads: int, dim: int, value_dim: int, threads: int) -> int:
    lanes, wide = ATTEND_TOKENS * min(ATTEND_HEADS, heads), max(ATTEND_TURNED * dim, ATTEND_BLOCK * 32)
    return threads * (lanes * (value_dim + ATTEND_BLOCK) + wide + 16) * F32


def _resident(n: int) -> int:
    """Of a buffer of so many bytes, which is allocated with a quarter to spare."""
    return round_up(n, HUGE_PAGE if n + n // 4 >= HUGE_PAGE else PAGE)
