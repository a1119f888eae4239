"""Decoding on one GPU with every expert in its memory, batch 1: tokens per second with the host reading every token.

    python benchmarks/cuda/decode.py --out benchmarks/results/h200/decode.json
"""

from __future__ import annotations

import argparse
import json
import time
from pathlib import Path

import torch

from model import EPS, RandomModel, Shape
from moeflux.backends.cuda.decode import DecodeOptions, Decoder
from moeflux.backends.cuda.device import open_device
from moeflux.backends.cuda.ops import CudaOps

PHASES = {1: "input projection", 2: "mixer", 4: "output projection", 8: "router, shared gate and up", 16: "experts gate and up",
          32: "down and combine", 64: "head and next"}  # fmt: skip


def read_rate() -> float:
    """Bytes per second of a plain read, by a sum over 8 GB."""
    block = torch.ones(2**31, dtype=torch.float32, device="cuda")
    return 2**33 / (timed(lambda: block.sum(), 7) * 1e-3)


def timed(run, times: int) -> float:
    """Median milliseconds."""
    run()
    torch.cuda.synchronize()
    found = []
    for _ in range(times):
        a, b = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        a.record()
        run()
        b.record()
        b.synchronize()
        found.append(a.elapsed_time(b))
    return sorted(found)[times // 2]


def rate(model: RandomModel, options: DecodeOptions, start: int, n: int, runs: int) -> dict[str, object]:
    torch.manual_seed(1)
    decoder = Decoder(model.ops.device, model.layers, model.ends, model.pool, options)
    states = model.states(start)
    decoder.bind(states, start, 7)
    first = list(decoder.tokens(3))
    found = []
    for _ in range(runs):
        began = time.perf_counter()
        first += list(decoder.tokens(n))
        found.append(n / (time.perf_counter() - began))
    return {"tok_s": sorted(found)[runs // 2], "all": sorted(found), "tokens": first[:40]}


def phases(model: RandomModel, options: DecodeOptions, start: int) -> dict[str, float]:
    decoder = Decoder(model.ops.device, model.layers, model.ends, model.pool, options)
    decoder.bind(model.states(start), start, 7)
    decoder.reserve(8)
    found = {}
    for mask, name in PHASES.items():
        stream = torch.cuda.Stream()
        with torch.cuda.stream(stream):
            decoder.launch(mask)
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=stream):
            decoder.launch(mask)
        found[name] = timed(graph.replay, 7) * 1e3
        decoder._buffers.position.fill_(start)
    return found


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--out", type=Path)
    parser.add_argument("--start", type=int, default=900)
    parser.add_argument("--tokens", type=int, default=60)
    parser.add_argument("--layers", type=int, default=40)
    args = parser.parse_args()
    device = open_device()
    began = time.perf_counter()
    model = RandomModel(CudaOps(device), Shape(layers=args.layers))
    torch.cuda.synchronize()
    limit = read_rate()
    result: dict[str, object] = {
        "device": device.title, "token_bytes": model.token_bytes, "read_bytes_s": limit,
        "limit_tok_s": limit / model.token_bytes, "start": args.start, "made_s": time.perf_counter() - began,
    }  # fmt: skip
    reference = None
    for graph, pdl in ((True, True), (True, False)):
        options = DecodeOptions(2048, EPS, graph, pdl)
        began = time.perf_counter()
        found = rate(model, options, args.start, args.tokens, 5)
        found["s"] = time.perf_counter() - began
        reference = reference or found["tokens"]
        found["same_tokens"] = found["tokens"] == reference
        found["share_of_limit"] = found["tok_s"] / result["limit_tok_s"]  # type: ignore[operator]
        result[f"graph, pdl={pdl}"] = found
        print(pdl, {k: v for k, v in found.items() if k != "tokens"}, flush=True)
    result["phases_us"] = phases(model, DecodeOptions(2048, EPS, True, True), args.start)
    print(json.dumps({k: v for k, v in result.items() if not isinstance(v, dict) or k == "phases_us"}, indent=1))
    if args.out:
        args.out.write_text(json.dumps(result, indent=1))


if __name__ == "__main__":
    main()
