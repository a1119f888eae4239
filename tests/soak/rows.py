"""Random rows: every row of logits must be, bit for bit, the one that a sequence alone gives with all experts in memory.

One trial opens a model with random slots, policy, hints, reader, kept scales and threads, and runs up to sixteen sequences
through the scheduler: texts that share beginnings, cut at random, begun, forked and cancelled at random, while the drive
fails at random. A sequence may end with a ReadError, never with a wrong bit.

    make soak                     50,000 rows
    python -m soak.rows --rows N --seed S
"""

from __future__ import annotations

import argparse
import ctypes
import time
from functools import cache, partial

import numpy as np

import moeflux
from conftest import DATA
from moeflux.core.errors import CancelledError, ReadError
from moeflux.runtime.scheduler import Scheduler

FAMILIES = ["qwen3_moe-4bit-f32", "qwen3_next-4bit-f32", "qwen3_5_moe_vl_fused-4bit-f32", "deepseek_v3-4bit-f32"]
LONGEST = 48
MOST_SEQUENCES = 16
LINES = {"trials": "trials", "rows": "rows", "failed": "sequences failed", "wrong": "rows differ"}


@cache
def whole(name):
    """Every expert in memory, one thread."""
    return moeflux.load(DATA / "mlx" / name, threads=1, context=LONGEST)


class Reader:
    """Goes through a text in random cuts and compares what it is given; may stop early."""

    def __init__(self, tally, random, tokens, rows, start):
        self.tally, self.random, self.tokens, self.rows, self.at = tally, random, tokens, rows, start

    def cut(self):
        n = int(self.random.choice([1, 1, 1, 2, 5, 17]))
        tokens = self.tokens[self.at : self.at + n]
        self.at += len(tokens)
        return tokens

    def __call__(self, logits):
        self.tally["rows"] += 1
        if not np.array_equal(logits, self.rows[self.at - 1]):
            self.tally["wrong"] += 1
        return self.cut()


def texts(random, n):
    """Some begin as others do."""
    made = []
    for _ in range(n):
        text = random.integers(0, 512, int(random.integers(2, LONGEST + 1))).tolist()
        if made and random.random() < 0.5:
            other = made[int(random.integers(len(made)))]
            shared = int(random.integers(1, len(other) + 1))
            text = [*other[:shared], *text][:LONGEST]
        made.append(text)
    return made


def options(random):
    return {
        "slots": int(random.integers(2, 64)),
        "policy": str(random.choice(["lru", "lfru"])),
        "hints": str(random.choice(["none", "previous", "lookahead", "both"])),
        "reader": str(random.choice(["native", "native", "python"])),
        "scales": str(random.choice(["kept", "streamed"])),
        "threads": int(random.integers(1, 4)),
    }


def trial(random, fail, tally):
    name = str(random.choice(FAMILIES))
    made = texts(random, int(random.integers(1, MOST_SEQUENCES + 1)))
    rows = [whole(name).score(text) for text in made]
    with moeflux.load(DATA / "mlx" / name, context=LONGEST, sequences=MOST_SEQUENCES, **options(random)) as engine:
        scheduler, jobs = Scheduler(engine), []
        ready = engine.sequence()
        forward_shared(engine, ready, made[0], rows[0], tally)
        fail(int(random.choice([0, 0, 100, 300])))
        for i, text in enumerate(made):
            sequence = engine.sequence()
            if i == 0 and len(ready) < len(text):  # a fork of a sequence that goes on
                sequence.adopt(ready.snapshot())
            reader = Reader(tally, random, text, rows[i], len(sequence))
            jobs.append(scheduler.submit(sequence, reader.cut(), reader))
            for _ in range(int(random.integers(0, 4))):
                scheduler.step()
            if random.random() < 0.1:
                scheduler.cancel(jobs[int(random.integers(len(jobs)))])
        scheduler.run()
        fail(0)
    for job in jobs:
        tally["failed"] += isinstance(job.error, ReadError)
        if job.error is not None and not isinstance(job.error, (ReadError, CancelledError)):
            raise job.error
    tally["trials"] += 1


def forward_shared(engine, sequence, text, rows, tally):
    """Half of a text at once, with the logits of all its rows."""
    n = max(1, len(text) // 2)
    (logits,) = engine.forward(moeflux.Segment(sequence, text[:n], "all"))
    tally["rows"] += n
    tally["wrong"] += int((logits != rows[:n]).any(axis=1).sum())


def soak(n_rows, seed, fail=lambda rate: None, say=lambda line: None):
    """Until so many rows were compared."""
    tally = {"rows": 0, "wrong": 0, "failed": 0, "trials": 0}
    random, begin = np.random.default_rng(seed), time.monotonic()
    while tally["rows"] < n_rows and not tally["wrong"]:
        trial(random, fail, tally)
        if tally["trials"] % 20 == 0:
            say(
                f"{tally['rows']:,} of {n_rows:,} rows, {tally['failed']} sequences failed, {time.monotonic() - begin:.0f} s"
            )
    return tally


def shim():
    """How to make the drive fail; None where the shim is not in place."""
    return getattr(ctypes.CDLL(None), "moeflux_shim_rate", None)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--rows", type=int, default=50_000)
    parser.add_argument("--seed", type=int, default=0)
    chosen = parser.parse_args()
    rate = shim()
    if rate is None:
        print("the drive does not fail in this run: start it with `make soak`")
    tally = soak(chosen.rows, chosen.seed, rate or (lambda _: None), partial(print, flush=True))
    counts = ", ".join(f"{tally[name]:,} {what}" for name, what in LINES.items())
    print(counts)
    raise SystemExit(1 if tally["wrong"] else 0)


if __name__ == "__main__":
    main()
