"""A prompt on one GPU with every expert in its memory: tokens per second, and where the device's time goes.

python benchmarks/cuda/prompt.py --out benchmarks/results/h200/prompt.json
"""

from __future__ import annotations

import argparse
import json
import time
from pathlib import Path

import torch
from model import EPS, RandomModel, Shape

from moeflux.backends.cuda.decode import Decoder
from moeflux.backends.cuda.device import open_device
from moeflux.backends.cuda.ops import CudaOps
from moeflux.backends.cuda.phases import DecodeOptions
from moeflux.backends.ops import Span


class Composed:
    """Block by block, experts in slots."""

    def __init__(self, model: RandomModel) -> None:
        self._model = model
        model.ops.defer_checks = True

    def run(self, tokens, states, position):
        model, ops = self._model, self._model.ops
        x = ops.embed(model.ends.embedding, tokens)
        for i, (w, state) in enumerate(zip(model.layers, states, strict=True)):
            x, h, ids, weights = ops.run_mixer(w, x, [Span(0, len(x), position, state)], EPS, None)
            x = x + (ops.pooled_experts(h, ids, weights, model.pool, i) + ops.shared_expert(h, w.ffn))
        return x

    def logits(self, x):
        return self._model.ops.head(x, self._model.ends.final_norm, self._model.ends.head, EPS)

    def check(self):
        self._model.ops.check()


def device_times(run) -> dict[str, float]:
    """Milliseconds of each kernel, all of its launches together."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        run()
        torch.cuda.synchronize()
    found = {e.key[:60]: (e.device_time_total / 1e3, e.count) for e in profile.key_averages() if e.device_time_total}
    return {f"{name} x{n}": round(ms, 3) for name, (ms, n) in sorted(found.items(), key=lambda i: -i[1][0])[:24]}


def measure(model: RandomModel, step, n: int, runs: int) -> dict[str, object]:
    tokens = torch.randint(0, model.shape.vocab, (n,), generator=torch.manual_seed(5)).tolist()
    times, hosts, last, found = [], [], None, {}
    for _ in range(runs + 1):
        states = model.states(0)
        torch.cuda.synchronize()
        began = time.perf_counter()
        logits = step.logits(step.run(tokens, states, 0)[-1:])
        hosts.append(time.perf_counter() - began)
        step.check()
        torch.cuda.synchronize()
        times.append(time.perf_counter() - began)
        found["same_bits"] = last is None or bool(torch.equal(last, logits))
        last = logits
    states, rows = model.states(0), None
    for start, stop in ((0, 700), (700, 701), (701, n)):
        rows = step.logits(step.run(tokens[start:stop], states, start)[-1:])
    step.check()
    found["same_bits_in_chunks"] = bool(torch.equal(rows, last))
    states = model.states(0)
    torch.cuda.synchronize()
    found["kernels_ms"] = device_times(lambda: step.run(tokens, states, 0))
    found["first_logits"] = last[0, :4].tolist()
    median = sorted(times[1:])[runs // 2]
    return found | {"tok_s": n / median, "seconds": times, "host_s": sorted(hosts[1:])[runs // 2]}


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--out", type=Path)
    parser.add_argument("--tokens", type=int, nargs="*", default=[2048, 8192])
    parser.add_argument("--kernels", nargs="*", default=["cuda", "triton"])
    parser.add_argument("--runs", type=int, default=5)
    parser.add_argument("--attend", type=int, nargs=2, help="rows and warps of a program of attention; changes no bit")
    args = parser.parse_args()
    device = open_device()
    model = RandomModel(CudaOps(device), Shape())
    if args.attend:
        model.ops.attend_tile = tuple(args.attend)
    result: dict[str, object] = {"device": device.title, "attend_tile": model.ops.attend_tile}
    for kernels in args.kernels:
        options = DecodeOptions(16384, EPS, kernels="cuda")
        step = (
            Decoder(model.ops, model.layers, model.ends, model.pool, options).prompt
            if kernels == "cuda"
            else Composed(model)
        )
        for n in args.tokens:
            try:
                result[f"{kernels}, {n} tokens"] = found = measure(model, step, n, args.runs)
                print(kernels, n, {k: v for k, v in found.items() if k != "kernels_ms"})
                print(json.dumps(found["kernels_ms"], indent=1), flush=True)
            except Exception as error:
                result[f"{kernels}, {n} tokens"] = repr(error)[:500]
                print(kernels, n, repr(error)[:500], flush=True)
            if args.out:
                args.out.write_text(json.dumps(result, indent=1))


if __name__ == "__main__":
    main()
