"""Decode and prefill of a whole model, beside the machine's limits measured in the same run."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise
from statistics import median
from typing import Any

import numpy as np

from moeflux.backends.native.ops import NativeOps
from moeflux.bench.limits import Limits, Samples
from moeflux.core.errors import OptionError
from moeflux.runtime.batch import Segment
from moeflux.runtime.engine import Engine
from moeflux.runtime.inspect import inspect_model

SEED = 0
Progress = Callable[[int, int], None]


@dataclass(frozen=True)
class SpeedRow:
    """One measurement of a whole model. Rates are per second."""

    kind: str  # decode or prefill
    model_type: str
    layers: int
    threads: int
    isa: str
    tokens: int  # per repeat
    context: int  # tokens before them
    bytes_per_token: int  # weights touched
    state_bytes_per_token: int  # recurrent state read and written, keys and values read
    macs_per_token: int
    rate: Samples  # tokens
    read: Samples  # bytes; before the first repeat and after each
    multiply: Samples  # multiply-adds
    python_share: float

    @property
    def share_of_read(self) -> tuple[float, float]:
        """The rate against what the read bandwidth allows for weights and state."""
        return self._share_of_read(self.bytes_per_token + self.state_bytes_per_token)

    def _share_of_read(self, n_bytes: int) -> tuple[float, float]:
        """Best against best; and the median over the repeats, each beside the bandwidth just before and after it."""
        around = [(a + b) / 2 for a, b in pairwise(self.read.values)]
        shares = [rate * n_bytes / read for rate, read in zip(self.rate.values, around, strict=True)]
        return self.rate.best * n_bytes / self.read.best, median(shares)

    @property
    def share_of_multiply(self) -> tuple[float, float]:
        n = self.macs_per_token
        return self.rate.best * n / self.multiply.best, self.rate.median * n / self.multiply.median

    def as_dict(self) -> dict[str, Any]:
        return {
            "bench": self.kind,
            "model_type": self.model_type,
            "layers": self.layers,
            "threads": self.threads,
            "isa": self.isa,
            "tokens": self.tokens,
            "context": self.context,
            "bytes_per_token": self.bytes_per_token,
            "state_bytes_per_token": self.state_bytes_per_token,
            "macs_per_token": self.macs_per_token,
            "tok_s": [self.rate.best, self.rate.median],
            "gb_s": [self.rate.best * self.bytes_per_token / 1e9, self.rate.median * self.bytes_per_token / 1e9],
            "read_gb_s": [self.read.best / 1e9, self.read.median / 1e9],
            "share_of_read": list(self.share_of_read),
            "share_of_read_weights_only": list(self._share_of_read(self.bytes_per_token)),
            "gmac_s": [self.rate.best * self.macs_per_token / 1e9, self.rate.median * self.macs_per_token / 1e9],
            "share_of_multiply": list(self.share_of_multiply),
            "python_share": self.python_share,
        }


def bench_decode(
    engine: Engine, tokens: int = 16, context: int = 32, repeats: int = 5, progress: Progress | None = None
) -> SpeedRow:
    """Random tokens, one at a time, so that routing is close to uniform: the worst case for any cache."""
    random = np.random.default_rng(SEED)
    sequence = engine.sequence()
    engine.forward(Segment(sequence, random.integers(0, engine.spec.vocab, context).tolist(), "last"))

    def run() -> int:
        for token in random.integers(0, engine.spec.vocab, tokens).tolist():
            engine.forward(Segment(sequence, [token]))
        return tokens

    return _measure(engine, "decode", run, tokens, context, repeats, progress)


def bench_prefill(engine: Engine, tokens: int = 512, repeats: int = 5, progress: Progress | None = None) -> SpeedRow:
    """A fresh prompt of random tokens each time; logits of the last one."""
    random = np.random.default_rng(SEED)

    def run() -> int:
        prompt = random.integers(0, engine.spec.vocab, tokens).tolist()
        engine.forward(Segment(engine.sequence(), prompt, "last"))
        return tokens

    return _measure(engine, "prefill", run, tokens, 0, repeats, progress)


def _measure(
    engine: Engine, kind: str, run: Callable[[], int], tokens: int, context: int, repeats: int, progress: Progress | None
) -> SpeedRow:
    ops = engine.model.ops
    if not isinstance(ops, NativeOps):
        raise OptionError("speed is measured on the native backend", where="option 'backend'")
    sizes = inspect_model(engine.config.model).sizes
    limits = Limits(ops, 2**28)
    rates, total, inside = [], 0.0, 0.0
    run()  # warms up
    limits.sample()
    for repeat in range(repeats):
        start, before = time.perf_counter(), ops.native_seconds
        n = run()
        elapsed = time.perf_counter() - start
        rates.append(n / elapsed)
        total += elapsed
        inside += ops.native_seconds - before
        limits.sample()
        if progress:
            progress(repeat + 1, repeats)
    head = engine.spec.hidden * engine.spec.vocab
    skipped_head = 0 if kind == "decode" else head * (tokens - 1) // tokens  # a prompt needs one row of logits
    return SpeedRow(
        kind,
        engine.spec.model_type,
        len(engine.spec.layers),
        ops.threads,
        ops.isa,
        tokens,
        context,
        sizes.trunk_read_per_token + sizes.streamed_per_token,
        2 * sizes.state_per_sequence + sizes.kept_per_token(engine.config.kv) * (context + len(rates) * tokens // 2),
        sizes.active_params - skipped_head,
        Samples(tuple(rates)),
        limits.read,
        limits.multiply,
        1 - inside / total,
    )
