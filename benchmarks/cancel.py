"""How soon a cancelled prompt ends, and what listening costs: `python benchmarks/cancel.py FOLDER [--slots N] [--times N]`.

Runs chunks of 4,096 tokens and sets the flag after a random share of their time: milliseconds until the error, beside the
time of one layer. Then steps with and without a flag in turn, in the main thread (which looks for signals) and in another.
"""

from __future__ import annotations

import argparse
import time
from concurrent.futures import ThreadPoolExecutor
from threading import Timer

import numpy as np

import moeflux
from moeflux import CancelFlag, Segment

CHUNK, STEPS = 4096, 40


def cancel_once(engine: moeflux.Engine, tokens: list[int], after_s: float) -> float | None:
    """Milliseconds from the flag to the error; None where the chunk ended first."""
    flag, at = CancelFlag(), 0.0

    def stop() -> None:
        nonlocal at
        at = time.perf_counter()
        flag.set()

    timer = Timer(after_s, stop)
    timer.start()
    try:
        engine.forward(Segment(engine.sequence(), tokens, "none"), cancel=flag)
    except moeflux.CancelledError:
        return (time.perf_counter() - at) * 1e3
    finally:
        timer.join()
    return None


def timed(engine: moeflux.Engine, tokens: list[int]) -> float:
    start = time.perf_counter()
    engine.forward(Segment(engine.sequence(), tokens, "none"))
    return time.perf_counter() - start


def step_ms(engine: moeflux.Engine, flag: CancelFlag | None) -> float:
    sequence = engine.sequence()
    engine.forward(Segment(sequence, [1]))
    start = time.perf_counter()
    for i in range(STEPS):
        engine.forward(Segment(sequence, [i]), cancel=flag)
    return (time.perf_counter() - start) / STEPS * 1e3


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("folder")
    parser.add_argument("--slots", type=int)
    parser.add_argument("--times", type=int, default=50)
    chosen = parser.parse_args()
    random = np.random.default_rng(0)
    with moeflux.load(chosen.folder, slots=chosen.slots, context=2 * CHUNK) as engine:
        tokens = random.integers(0, engine.spec.vocab, CHUNK).tolist()
        whole = min(timed(engine, tokens) for _ in range(2))
        layer = whole / len(engine.spec.layers) * 1e3
        found = [cancel_once(engine, tokens, whole * float(random.uniform(0.02, 0.7))) for _ in range(chosen.times)]
        took = [ms for ms in found if ms is not None]
        p50, p99 = np.percentile(took, (50, 99))
        print(f"chunk {whole:.2f} s, a layer {layer:.0f} ms")
        print(f"heard {len(took)} times, after p50 {p50:.1f} p99 {p99:.1f} max {max(took):.1f} ms")
        with ThreadPoolExecutor(1) as other:
            for _ in range(3):
                main_thread = step_ms(engine, None), step_ms(engine, CancelFlag())
                another = other.submit(step_ms, engine, None).result()
                print(f"step: {main_thread[0]:.3f} ms, with a flag {main_thread[1]:.3f}, in another thread {another:.3f}")


if __name__ == "__main__":
    main()
