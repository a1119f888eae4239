"""Decoding and prompts through the engine on one GPU, with all experts in its memory and with a share of them.

python benchmarks/cuda/engine.py /tmp/model --shares 1 0.5 0.25 --out benchmarks/results/h200/engine.json

The folder is written first where it is not there: random weights of a published shape. Tokens are random ("uniform"
routing), stay with a topic ("local"), or are the model's own by the largest logit. The host reads the logits of every token.
"""

from __future__ import annotations

import argparse
import gc
import json
import statistics
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

import numpy as np
import torch

import moeflux
from moeflux import Segment
from moeflux.backends.cuda.costs import model_costs
from moeflux.bench.routing import TokenStream
from moeflux.bench.shapes import published_config
from moeflux.bench.synthetic import write_checkpoint
from moeflux.models.spec import ModelSpec
from moeflux.plan.plan import Plan
from moeflux.plan.sizes import Sizes
from moeflux.plan.vram import STAGED

CHUNK = 2048
COMPARED = 12  # decoded tokens whose logits are compared to the bit


def make(folder: Path, shape: str, layers: int | None) -> None:
    if folder.exists():
        return
    config = published_config(shape)
    text = config.get("text_config", config)
    text["num_hidden_layers"] = layers or text["num_hidden_layers"]
    write_checkpoint(config, folder)


def decode(
    engine: moeflux.Engine, prompt: list[int], tokens: list[int] | None, n: int, runs: int
) -> tuple[dict, np.ndarray]:
    """Tokens per second, and the first logits. `tokens` None: those of the largest logit."""
    found, kept = [], []
    for run in range(runs):
        sequence = engine.sequence()
        logits = engine.prefill(sequence, prompt)
        for i in range(3):  # the first step captures the graph
            (rows,) = engine.forward(Segment(sequence, [int(np.argmax(logits)) if tokens is None else tokens[i]]))
            logits = rows[0]
        began = time.perf_counter()
        for i in range(n):
            token = int(np.argmax(logits)) if tokens is None else tokens[3 + i]
            (rows,) = engine.forward(Segment(sequence, [token]))
            logits = rows[0]
            if run == 0 and i < COMPARED:
                kept.append(logits)
        found.append(n / (time.perf_counter() - began))
    return {"tok_s": statistics.median(found), "all": sorted(found)}, np.array(kept)


def prompts(engine: moeflux.Engine, tokens: list[int]) -> dict:
    found = []
    for _ in range(3):
        began = time.perf_counter()
        engine.prefill(engine.sequence(), tokens)
        found.append(len(tokens) / (time.perf_counter() - began))
    return {"tok_s": statistics.median(found), "first": found[0], "all": sorted(found)}


def measure(folder: Path, vram: int | None, args: argparse.Namespace) -> tuple[dict, np.ndarray, Callable[[float], int]]:
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.mem_get_info()[0]
    began = time.perf_counter()
    with moeflux.load(folder, backend="cuda", vram=vram, context=args.context, text="none") as engine:
        result = {"load_s": time.perf_counter() - began, "notes": list(engine.notes), "vram": engine.plan.vram.as_dict()}
        result["records"] = engine.plan.memory.records
        vocab, held = engine.spec.vocab, partial(budget, engine.spec, engine.sizes, engine.plan)
        streams = {kind: TokenStream(kind, vocab).take(args.tokens + 16) for kind in ("uniform", "local")}
        prompt = TokenStream("uniform", vocab).take(64)
        result["uniform"], kept = decode(engine, prompt, [int(t) for t in streams["uniform"]], args.tokens, args.runs)
        result["local"], _ = decode(engine, prompt, [int(t) for t in streams["local"]], args.tokens, args.runs)
        result["greedy"], _ = decode(engine, prompt, None, args.tokens, args.runs)
        result["prompt"] = prompts(engine, [int(t) for t in TokenStream("uniform", vocab).take(args.prompt)])
        result["peak_bytes"] = torch.cuda.max_memory_allocated()
        result["used_bytes"] = before - torch.cuda.mem_get_info()[0]
    del engine
    gc.collect()
    torch.cuda.empty_cache()
    return result, kept, held


def budget(spec: ModelSpec, sizes: Sizes, plan: Plan, share: float) -> int:
    """Of device memory, for about this share of the experts, with prompts in chunks of CHUNK tokens."""
    costs = model_costs(spec, sizes, CHUNK).vram
    slots = round(share * sizes.n_experts) + STAGED + len(spec.layers) // 2
    return costs.trunk + plan.vram.states + costs.scratch + slots * costs.slot


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("folder", type=Path)
    parser.add_argument("--shape", default="qwen3.5-35b-a3b")
    parser.add_argument("--layers", type=int)
    parser.add_argument("--shares", type=float, nargs="+", default=[1.0, 0.5, 0.25])
    parser.add_argument("--tokens", type=int, default=100)
    parser.add_argument("--runs", type=int, default=3)
    parser.add_argument("--prompt", type=int, default=2048)
    parser.add_argument("--context", type=int, default=4096)
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    began = time.perf_counter()
    make(args.folder, args.shape, args.layers)
    results: dict = {"device": torch.cuda.get_device_name(), "shape": args.shape, "made_s": time.perf_counter() - began}
    whole = reference = None
    for share in sorted(args.shares, reverse=True):
        vram = None
        if whole is not None and share < 1:
            vram = whole(share)
        found, kept, held = measure(args.folder, vram, args)
        whole = whole or held
        reference = kept if reference is None else reference
        found["same_bits"] = bool(np.array_equal(kept, reference))
        results[f"share {share}"] = found
        print(share, json.dumps({k: v for k, v in found.items() if k != "vram"}), flush=True)
        if args.out:
            args.out.write_text(json.dumps(results, indent=1))


if __name__ == "__main__":
    main()
