"""Decode and prefill of a whole model, beside the machine's limits measured in the same run."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import closing
from dataclasses import dataclass
from statistics import median
from typing import Any

from moeflux.bench.limits import AtOnce, DriveLimit, Limits, Samples
from moeflux.bench.room import BUFFER_BYTES, MemoryUse, Room, memory_use
from moeflux.bench.routing import TokenStream
from moeflux.bench.streaming import Ceilings, Streaming, Work
from moeflux.bench.watch import Lap, Watch
from moeflux.plan.inspect import inspect_model
from moeflux.runtime.batch import Segment
from moeflux.runtime.engine import Engine
from moeflux.runtime.sequence import Sequence
from moeflux.store.trace import TraceRecorder

Progress = Callable[[int, int], None]
WARM_UP = 256  # tokens at most until memory is full of experts; with local routing that takes a while


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
    routing: str
    overlap: float | None  # of a token's experts with the token before; None where that was not watched
    bytes_per_token: int  # weights touched
    state_bytes_per_token: int  # recurrent state read and written, keys and values read
    macs_per_token: int
    rate: Samples  # tokens
    read: Samples  # bytes; before the first repeat and after each
    multiply: Samples  # multiply-adds
    python_share: float
    streaming: Streaming | None  # None where every expert is in memory
    memory: MemoryUse | None

    @property
    def share_of_read(self) -> tuple[float, float]:
        """The rate against what the read bandwidth allows for weights and state."""
        return self._share_of_read(self.bytes_per_token + self.state_bytes_per_token)

    def _share_of_read(self, n_bytes: int) -> tuple[float, float]:
        """Best against best; and the median over the repeats, each beside the bandwidth just before and after it."""
        shares = [rate * n_bytes / read for rate, read in zip(self.rate.values, self.read.around, strict=True)]
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
            "routing": self.routing,
            "overlap": self.overlap,
            "bytes_per_token": self.bytes_per_token,
            "state_bytes_per_token": self.state_bytes_per_token,
            "macs_per_token": self.macs_per_token,
            "rates": list(self.rate.values),
            "tok_s": [self.rate.best, self.rate.median],
            "gb_s": [self.rate.best * self.bytes_per_token / 1e9, self.rate.median * self.bytes_per_token / 1e9],
            "read_gb_s": [self.read.best / 1e9, self.read.median / 1e9],
            "share_of_read": list(self.share_of_read),
            "share_of_read_weights_only": list(self._share_of_read(self.bytes_per_token)),
            "gmac_s": [self.rate.best * self.macs_per_token / 1e9, self.rate.median * self.macs_per_token / 1e9],
            "share_of_multiply": list(self.share_of_multiply),
            "python_share": self.python_share,
            "streaming": self.streaming.as_dict() if self.streaming else None,
            "memory": self.memory.as_dict() if self.memory else None,
        }


def bench_decode(
    engine: Engine,
    tokens: int = 16,
    context: int = 32,
    repeats: int = 5,
    *,
    routing: str = "uniform",
    recorder: TraceRecorder | None = None,
    room: Room | None = None,
    progress: Progress | None = None,
) -> SpeedRow:
    """One token at a time, in one sequence. `recorder`: where routing is recorded anyway. `room`: what memory was for."""
    with closing(_Bench(engine, routing, recorder)) as bench:
        sequence = engine.sequence()
        bench.prompt(sequence, context)
        first = bench.watch.lap()

        def run() -> None:
            for token in bench.tokens.take(tokens):
                bench.watch.forward(Segment(sequence, [token]))

        for _ in range(max(1, WARM_UP // tokens)):
            run()
            if bench.full:
                break
        bench.watch.lap()
        return bench.row("decode", tokens, context, bench.measure(run, repeats, progress), first, room)


def bench_prefill(
    engine: Engine,
    tokens: int = 512,
    repeats: int = 5,
    *,
    routing: str = "uniform",
    room: Room | None = None,
    progress: Progress | None = None,
) -> SpeedRow:
    """A fresh prompt each time, in chunks as planned; logits of the last token."""
    with closing(_Bench(engine, routing, None)) as bench:

        def run() -> None:
            bench.prompt(engine.sequence(), tokens)

        run()  # warms up
        first = bench.watch.lap()
        return bench.row("prefill", tokens, 0, bench.measure(run, repeats, progress), first, room)


class _Bench:
    """Routing is recorded only where somebody asks for it or experts are streamed: else nothing is to be in the way."""

    def __init__(self, engine: Engine, routing: str, recorder: TraceRecorder | None) -> None:
        self.engine = engine
        self.tokens = TokenStream(routing, engine.spec.vocab)
        if recorder is None and (not engine.plan.resident or routing != "uniform"):
            recorder = engine.record_routing()
        self.watch = Watch(engine, recorder)
        self.limits = Limits(self.watch.ops, BUFFER_BYTES)
        self.drive = None if engine.plan.resident else DriveLimit(engine)
        self.at_once = AtOnce(self.limits, self.drive) if self.drive else None

    @property
    def full(self) -> bool:
        """Whether experts fill the memory that is theirs, so that each new one takes another's place."""
        stats = self.engine.stats()
        return stats.slots_used >= stats.slots

    def prompt(self, sequence: Sequence, n: int) -> None:
        ids = self.tokens.take(n)
        step = self.engine.plan.chunk_tokens
        for start in range(0, n, step):
            self.watch.forward(Segment(sequence, ids[start : start + step], "last" if start + step >= n else "none"))

    def measure(self, run: Callable[[], None], repeats: int, progress: Progress | None) -> list[Lap]:
        """The limits before the first repeat and after each."""
        laps = []
        self._sample()
        for repeat in range(repeats):
            run()
            laps.append(self.watch.lap())
            self._sample()
            if progress:
                progress(repeat + 1, repeats)
        return laps

    def row(self, kind: str, tokens: int, context: int, laps: list[Lap], first: Lap, room: Room | None) -> SpeedRow:
        engine, watch = self.engine, self.watch
        sizes = inspect_model(engine.config.model).sizes
        skipped_head = 0 if kind == "decode" else engine.spec.hidden * engine.spec.vocab * (tokens - 1) // tokens
        kept = sizes.kept_per_token(engine.config.kv)
        state = 2 * sizes.state_per_sequence + kept * (context + len(laps) * tokens // 2)
        macs = sizes.active_params - skipped_head  # a prompt needs one row of logits
        work = Work(sizes.trunk_read_per_token, state if kind == "decode" else 0, macs if kind == "prefill" else 0)
        native, seconds = sum(lap.native_seconds for lap in laps), sum(lap.seconds for lap in laps)
        return SpeedRow(
            kind=kind,
            model_type=engine.spec.model_type,
            layers=len(engine.spec.layers),
            threads=watch.ops.threads,
            isa=watch.ops.isa,
            tokens=tokens,
            context=context,
            routing=self.tokens.kind,
            overlap=watch.overlap,
            bytes_per_token=sizes.trunk_read_per_token + sizes.streamed_per_token,
            state_bytes_per_token=state,
            macs_per_token=macs,
            rate=Samples(tuple(lap.tokens / lap.seconds for lap in laps)),
            read=self.limits.read,
            multiply=self.limits.multiply,
            python_share=1 - native / seconds,
            streaming=self._streaming(laps, first, work),
            memory=memory_use(room, engine.plan.memory.total) if room else None,
        )

    def close(self) -> None:
        if self.drive:
            self.drive.close()

    def _sample(self) -> None:
        self.limits.sample()
        if self.drive and self.at_once:
            self.drive.sample()
            self.at_once.sample()

    def _streaming(self, laps: list[Lap], first: Lap, work: Work) -> Streaming | None:
        if self.drive is None or self.at_once is None:
            return None
        plan, config, stream = self.engine.plan, self.engine.config, self.engine.model.runner.stream
        setting = {
            "n_slots": plan.n_slots,
            "n_experts": plan.n_experts,
            "chunk_tokens": plan.chunk_tokens,
            "hints": config.hints,
            "hint_width": stream.width if stream else 0,
            "policy": config.policy,
            "reader": config.reader,
            "direct": plan.direct,
            "n_readers": plan.n_readers,
            "keep_scales": plan.keep_scales,
        }
        ceilings = Ceilings(self.drive.rate, self.limits.read, self.limits.multiply, self.at_once.drive, self.at_once.read)
        return Streaming(tuple(laps), ceilings, work, first, setting, self.drive.cold)
