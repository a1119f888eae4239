"""Kernels at the shapes of a published model, streamed from memory: bytes per second beside the machine's read bandwidth."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import product
from typing import Any

import numpy as np

from moeflux.backends.native.ops import NativeOps
from moeflux.bench.limits import Limits, Samples
from moeflux.formats.dtypes import encode_float
from moeflux.formats.experts import ExpertLayout, Projection
from moeflux.formats.files import Bytes
from moeflux.formats.quant import Affine, Matrix, nbytes

POOL_BYTES = 3 * 2**29  # weights of one case: far more than any cache holds
CODEC = Affine(4, 64, "BF16")

# Qwen3.5-35B-A3B: rows and columns
MATRICES = {"q_proj": (8192, 2048), "in_proj_qkv": (8192, 2048), "o_proj": (2048, 4096), "lm_head": (248320, 2048)}
EXPERT_WIDTH, HIDDEN, N_CHOSEN = 512, 2048, 8


@dataclass(frozen=True)
class OpRow:
    isa: str
    name: str
    shape: str
    threads: int
    tokens: int
    bytes_touched: int  # per call
    rate: Samples  # bytes per second
    read: Samples
    macs: Samples  # multiply-adds per second
    multiply: Samples

    def as_dict(self) -> dict[str, Any]:
        return {
            "isa": self.isa,
            "name": self.name,
            "shape": self.shape,
            "threads": self.threads,
            "tokens": self.tokens,
            "bytes": self.bytes_touched,
            "gb_s": [self.rate.best / 1e9, self.rate.median / 1e9],
            "read_gb_s": [self.read.best / 1e9, self.read.median / 1e9],
            "share_of_read": [self.rate.best / self.read.best, self.rate.median / self.read.median],
            "gmac_s": [self.macs.best / 1e9, self.macs.median / 1e9],
            "share_of_multiply": [self.macs.best / self.multiply.best, self.macs.median / self.multiply.median],
        }


def bench_ops(
    threads: int, isas: Sequence[str] = ("auto",), tokens: Sequence[int] = (1,), repeats: int = 7
) -> Iterator[OpRow]:
    """One row for each case, as it is done: the same case on all instruction sets, then the next."""
    machines = [NativeOps(threads, isa) for isa in isas]
    for name, (rows, cols) in MATRICES.items():
        n = max(1, POOL_BYTES // nbytes(CODEC, (rows, cols)))
        matrices = [_random_matrix(rows, cols, seed) for seed in range(min(n, 96))]
        for n_tokens, ops in product(tokens, machines):
            yield _bench_linear(ops, name, matrices, n_tokens, repeats)
    for n_tokens, ops in product(tokens, machines):
        yield _bench_experts(ops, n_tokens, repeats)


def _bench_linear(ops: NativeOps, name: str, matrices: list[Matrix], tokens: int, repeats: int) -> OpRow:
    rows, cols = matrices[0].shape
    weights = [ops.load_matrix(matrix) for matrix in matrices]
    x = np.random.default_rng(0).normal(size=(tokens, cols)).astype(np.float32)

    def run(i: int) -> None:
        ops.linear(x, weights[i])

    n_bytes = nbytes(CODEC, (rows, cols))
    return _measure(ops, name, f"{rows}x{cols}", tokens, n_bytes, rows * cols, len(weights), run, repeats)


def _bench_experts(ops: NativeOps, tokens: int, repeats: int) -> OpRow:
    one = 2 * nbytes(CODEC, (EXPERT_WIDTH, HIDDEN)) + nbytes(CODEC, (HIDDEN, EXPERT_WIDTH))
    n = POOL_BYTES // one
    bank, slots = ops.new_bank(n), ops.allocate(n * one)  # side by side, as a model's experts lie in memory
    for expert in range(n):
        ops.put_expert(bank, expert, _random_expert(slots[expert * one : (expert + 1) * one], expert))
    random = np.random.default_rng(1)
    x = random.normal(size=(tokens, HIDDEN)).astype(np.float32)
    weights = np.full((tokens, N_CHOSEN), 1 / N_CHOSEN, dtype=np.float32)
    calls = n // N_CHOSEN
    order = random.permutation(n)[: calls * N_CHOSEN].reshape(calls, N_CHOSEN)

    def run(i: int) -> None:
        ops.experts(x, np.repeat(order[i][None], tokens, axis=0), weights, [(bank, order[i])])

    macs = 3 * EXPERT_WIDTH * HIDDEN * N_CHOSEN
    return _measure(ops, "8 experts", f"3x{EXPERT_WIDTH}x{HIDDEN}", tokens, one * N_CHOSEN, macs, calls, run, repeats)


def _measure(
    ops: NativeOps,
    name: str,
    shape: str,
    tokens: int,
    n_bytes: int,
    macs: int,
    calls: int,
    run: Callable[[int], None],
    repeats: int,
) -> OpRow:
    """Alternates a pass over all weights with a sample of the machine's limits. Time is that inside native calls."""
    limits = Limits(ops)
    seconds = []
    for repeat in range(repeats + 1):
        limits.sample()
        before = ops.native_seconds
        for i in range(calls):
            run(i)
        if repeat:  # the first pass warms up
            seconds.append((ops.native_seconds - before) / calls)
    return OpRow(
        ops.isa,
        name,
        shape,
        ops.threads,
        tokens,
        n_bytes,
        Samples(tuple(n_bytes / s for s in seconds)),
        limits.read,
        Samples(tuple(macs * tokens / s for s in seconds)),
        limits.multiply,
    )


def _random_matrix(rows: int, cols: int, seed: int) -> Matrix:
    random = np.random.default_rng(seed)
    scale = np.full((rows, cols // 64), 0.002, dtype=np.float32)  # sane scales: denormal ones would slow every multiply
    parts = {
        "weight": np.frombuffer(random.bytes(rows * cols // 2), dtype=np.uint32).reshape(rows, cols // 8),
        "scales": encode_float(scale, "BF16"),
        "biases": encode_float(-7.5 * scale, "BF16"),
    }
    return Matrix(CODEC, (rows, cols), parts, "random")


def _random_expert(slot: Bytes, seed: int) -> dict[str, Matrix]:
    """Fills a slot."""
    shapes = {"gate": (EXPERT_WIDTH, HIDDEN), "up": (EXPERT_WIDTH, HIDDEN), "down": (HIDDEN, EXPERT_WIDTH)}
    layout = ExpertLayout(tuple(Projection(name, CODEC, shape) for name, shape in shapes.items()))
    matrices = layout.matrices(slot, "random")
    for i, (name, shape) in enumerate(shapes.items()):
        for part, values in _random_matrix(*shape, 3 * seed + i).parts.items():
            matrices[name].parts[part][...] = values
    return matrices
