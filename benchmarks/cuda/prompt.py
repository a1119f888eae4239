"""A prompt on one GPU with every expert in its memory: tokens per second, and where the time goes.

python benchmarks/cuda/prompt.py --out benchmarks/results/h200/prompt.json
"""

from __future__ import annotations

import argparse
import json
import time
from pathlib import Path

import torch
from decode import timed
from model import EPS, RandomModel, Shape, random_affine

from moeflux.backends.cuda.device import open_device
from moeflux.backends.cuda.ops import CudaOps
from moeflux.backends.cuda.products import Tile
from moeflux.backends.ops import Span
from moeflux.models.spec import Attention

SIZES = [(32, 128, 4, 2), (64, 64, 4, 2), (32, 256, 8, 2), (16, 128, 4, 2), (32, 128, 4, 1), (16, 256, 4, 2)]
TILES = [Tile(*size) for size in SIZES]


def tune(ops: CudaOps, n: int) -> dict[str, object]:
    """Tiles for a dense product; all give the same bits."""
    products, found, weight = ops._products, {}, random_affine(12352, 2048)
    digits = products.digits(torch.randn(n, 2048, device="cuda"), 64, 4)
    first, best = None, None
    for tile in TILES:
        products.tile = tile
        try:
            y = products._together(digits, weight)
            first = y if first is None else first
            ms = timed(lambda: products._together(digits, weight), 5)
            same = bool(torch.equal(first, y))
            found[str(tile)] = {"us": ms * 1e3, "tflops": 2 * n * 12352 * 2048 / ms / 1e9, "same_bits": same}
            if same and (best is None or ms < best[0]):
                best = (ms, tile)
        except Exception as error:
            found[str(tile)] = repr(error)[:200]
        print(tile, found[str(tile)], flush=True)
    assert best
    products.tile = best[1]
    return found


def forward(model: RandomModel, tokens: torch.Tensor, states, position: int):
    ops = model.ops
    x = ops.embed(model.ends.embedding, tokens)
    for i, (w, state) in enumerate(zip(model.layers, states, strict=True)):
        x, h, ids, weights = ops.run_mixer(w, x, [Span(0, len(x), position, state)], EPS, None)
        x = x + (ops.pooled_experts(h, ids, weights, model.pool, i) + ops.shared_expert(h, w.ffn))
    return ops.head(x[-1:], model.ends.final_norm, model.ends.head, EPS)


def parts(model: RandomModel, n: int) -> dict[str, float]:
    """Milliseconds of the parts of one layer of each kind."""
    ops, found = model.ops, {}
    x = torch.randn(n, model.shape.hidden, device="cuda")
    for w in model.layers[2:4]:
        kind = "attention" if isinstance(w.spec.mixer, Attention) else "delta"
        state = model.states(0)[3 if kind == "attention" else 2]

        def mix(w=w, state=state):
            for rows in state.rows.values():
                rows.cut(0)
            return ops.mix(x, w.mixer, w.spec.mixer, [Span(0, n, 0, state)], EPS)

        found[f"{kind}: mixer"] = timed(mix, 3)
    w = model.layers[2]
    _, ids, weights = ops.router(x, w.ffn["router"], None, w.spec.ffn.router)
    found["input projection"] = timed(lambda: ops.linear(x, w.mixer["in_proj_qkv"]), 3)
    q = torch.nn.functional.normalize(torch.randn(n, 16, 128, device="cuda"), dim=-1)
    v, g = torch.randn(n, 32, 128, device="cuda"), torch.rand(n, 32, device="cuda")
    state = model.states(0)[2]
    for columns, warps in ((16, 4), (16, 2), (8, 2), (8, 1), (4, 1), (32, 4)):
        ops.delta_tile = (columns, warps)
        found[f"delta rule {columns}x{warps}"] = timed(lambda: ops.delta_rule(q, q, v, g, g, state), 3)
    ops.delta_tile = (8, 1)
    keys = torch.randn(n, 2, 256, device="cuda").bfloat16()
    found["attention alone"] = timed(lambda: ops.attend(torch.randn(n, 16, 256, device="cuda"), keys, keys, 0, 0.1), 3)
    found["router"] = timed(lambda: ops.router(x, w.ffn["router"], None, w.spec.ffn.router), 3)
    found["shared expert"] = timed(lambda: ops.shared_expert(x, w.ffn), 3)
    found["experts"] = timed(lambda: ops.pooled_experts(x, ids, weights, model.pool, 2), 3)
    return found


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--out", type=Path)
    parser.add_argument("--tokens", type=int, default=2048)
    args = parser.parse_args()
    device = open_device()
    ops, n = CudaOps(device), args.tokens
    result: dict[str, object] = {"device": device.title, "tokens": n, "tiles": tune(ops, n), "tile": str(ops._products.tile)}
    model = RandomModel(ops, Shape())
    ops.defer_checks = True
    result["parts_ms"] = parts(model, n)
    print(json.dumps(result["parts_ms"], indent=1), flush=True)
    tokens, times, last = torch.randint(0, model.shape.vocab, (n,)), [], None
    for _ in range(4):
        states = model.states(0)
        torch.cuda.synchronize()
        began = time.perf_counter()
        logits = forward(model, tokens, states, 0)
        ops.check()
        torch.cuda.synchronize()
        times.append(time.perf_counter() - began)
        result["same_bits"] = last is None or bool(torch.equal(last, logits))
        last = logits
    states, rows = model.states(0), None
    for start, stop in ((0, 700), (700, 701), (701, n)):
        rows = forward(model, tokens[start:stop], states, start)
    result["same_bits_in_chunks"] = bool(torch.equal(rows, last))
    queued = time.perf_counter()
    forward(model, tokens, model.states(0), 0)
    result["host_s"] = time.perf_counter() - queued
    result |= {"tok_s": n / sorted(times[1:])[1], "seconds": times}
    print({k: v for k, v in result.items() if k not in ("tiles", "parts_ms")})
    if args.out:
        args.out.write_text(json.dumps(result, indent=1))


if __name__ == "__main__":
    main()
