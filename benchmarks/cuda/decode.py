"""Decoding on one GPU with every expert in its memory, batch 1: tokens per second with the host reading every token.

python benchmarks/cuda/decode.py --out benchmarks/results/h200/decode.json
"""

from __future__ import annotations

import argparse
import json
import time
from dataclasses import replace
from pathlib import Path

import torch
from model import EPS, RandomModel, Shape

from moeflux.backends.cuda.decode import Decoder
from moeflux.backends.cuda.device import open_device
from moeflux.backends.cuda.ops import CudaOps
from moeflux.backends.cuda.phases import DecodeOptions, Tile, Tiles
from moeflux.models.spec import Attention, DeltaNet

PHASES = {
    1: "input projection",
    2: "mixer",
    4: "output projection",
    8: "router, shared gate and up",
    16: "experts gate and up",
    32: "down and combine",
    64: "head and next",
}


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
    decoder = Decoder(model.ops, model.layers, model.ends, model.pool, options)
    states = model.states(start)
    decoder.bind(states, start, 7)
    first = list(decoder.tokens(3))
    found = []
    for _ in range(runs):
        began = time.perf_counter()
        first += list(decoder.tokens(n))
        found.append(n / (time.perf_counter() - began))
    return {"tok_s": sorted(found)[runs // 2], "all": sorted(found), "tokens": first[:40]}


def phase_us(decoder: Decoder, mask: int, start: int) -> float:
    """Of one kind of phase alone, all layers."""
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        decoder.phases.launch(mask)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream):
        decoder.phases.launch(mask)
    found = timed(graph.replay, 7) * 1e3
    decoder._buffers.position.fill_(start)
    return found


def bound(model: RandomModel, options: DecodeOptions, start: int, chosen=None) -> Decoder:
    keep = [i for i, w in enumerate(model.layers) if chosen is None or isinstance(w.spec.mixer, chosen)]
    decoder = Decoder(model.ops, [model.layers[i] for i in keep], model.ends, model.pool, options)
    states = model.states(start)
    decoder.bind([states[i] for i in keep], start, 7)
    decoder.reserve(8)
    return decoder


def phases(model: RandomModel, options: DecodeOptions, start: int) -> dict[str, float]:
    """Each kind alone, and what the whole step loses without it."""
    decoder = bound(model, options, start)
    found = {"all": phase_us(decoder, 127, start)}
    for mask, name in PHASES.items():
        found[name] = phase_us(decoder, mask, start)
        found[f"less by {name}"] = found["all"] - phase_us(decoder, 127 - mask, start)
    found["mixer: delta rule"] = phase_us(bound(model, options, start, DeltaNet), 2, start)
    found["mixer: attention"] = phase_us(bound(model, options, start, Attention), 2, start)
    return found


TRIED = {
    "project": (1, [(64, 8), (16, 8), (32, 8), (32, 4), (64, 16)]),
    "output": (4, [(32, 8), (16, 8), (16, 4)]),
    "route": (8, [(16, 8), (16, 4), (32, 8)]),
    "gate_up": (16, [(16, 8), (16, 4), (32, 8), (32, 16)]),
    "down": (32, [(16, 4), (16, 8), (32, 8)]),
    "delta": (2, [(8, 2), (16, 4), (32, 4), (8, 1)]),
    "attend": (2, [(0, 4), (0, 8)]),
    "head": (64, [(32, 8), (16, 8), (16, 4)]),
}


def tune(model: RandomModel, start: int) -> tuple[Tiles, dict[str, dict[str, float]]]:
    """The best tile of each phase alone; no choice changes a bit."""
    best, found = Tiles(), {}
    for name, (mask, tried) in TRIED.items():
        times = {}
        for tile in tried:
            options = DecodeOptions(2048, EPS, tiles=replace(best, **{name: Tile(*tile)}), kernels="triton")
            try:
                times[tile] = phase_us(bound(model, options, start), mask, start)
            except Exception as error:
                print(name, tile, repr(error)[:200])
        best = replace(best, **{name: Tile(*min(times, key=lambda tile: times[tile]))})
        found[name] = {"x".join(map(str, tile)): round(us, 1) for tile, us in times.items()}
        print(name, found[name], flush=True)
    return best, found


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--out", type=Path)
    parser.add_argument("--start", type=int, default=900)
    parser.add_argument("--tokens", type=int, default=60)
    parser.add_argument("--kernels", nargs="*", default=["cuda", "triton"])
    parser.add_argument("--layers", type=int, default=40)
    parser.add_argument("--tune", action="store_true", help="try several tiles for each phase first")
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
    tiles = Tiles()
    if args.tune:
        tiles, result["tried_us"] = tune(model, args.start)
        result["tiles"] = str(tiles)
    reference = None
    for kernels, pdl in ((k, pdl) for k in args.kernels for pdl in (True, False)):
        options = DecodeOptions(2048, EPS, True, pdl, tiles, kernels)
        began = time.perf_counter()
        found = rate(model, options, args.start, args.tokens, 5)
        found["s"] = time.perf_counter() - began
        reference = reference or found["tokens"]
        found["same_tokens"] = found["tokens"] == reference
        found["share_of_limit"] = found["tok_s"] / result["limit_tok_s"]  # type: ignore[operator]
        result[f"{kernels}, pdl={pdl}"] = found
        print(kernels, pdl, {k: v for k, v in found.items() if k != "tokens"}, flush=True)
    for kernels in args.kernels:
        found = phases(model, DecodeOptions(2048, EPS, True, True, tiles, kernels), args.start)  # type: ignore[arg-type]
        result[f"{kernels}, phases_us"] = found
        print(kernels, json.dumps(found), flush=True)
    if args.out:
        args.out.write_text(json.dumps(result, indent=1))


if __name__ == "__main__":
    main()
