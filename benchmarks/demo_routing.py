"""The demo model's routing on text that it writes: `python benchmarks/demo_routing.py [--record]`.

Tables and a picture for docs/performance.md: hits by size of the store and by policy, from the recorded trace; how many of a
token's experts each way of foreseeing names, and how many of those it names are asked for. `--record` writes the trace anew.
"""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np
import numpy.typing as npt

import moeflux
from moeflux.bench.replay import bench_replay
from moeflux.runtime.engine import Engine
from moeflux.store.trace import RoutingTrace

FOLDER = Path(__file__).parent
TRACE = FOLDER / "traces" / "demo.npz"
PICTURE = FOLDER.parent / "docs" / "images" / "demo-routing.png"
PROMPTS = ("Once upon a time", "The captain looked at the sea and", '"I do not believe you," said the girl.', "Chapter I.")
TOKENS = 400  # of each
SHARES = (0.1, 0.15, 0.2, 0.25, 0.3, 0.4, 0.5, 0.6, 0.75, 0.9)
POLICIES = ("lru", "lfru")
WARMUP = 64  # steps that fill the store and do not count
DEPTHS = (1, 2, 3, 4)

Sets = npt.NDArray[np.bool_]  # [tokens, experts]


def record() -> None:
    """Four texts, one after the other, token by token."""
    with moeflux.load() as engine:
        recorder = engine.record_routing()
        for seed, prompt in enumerate(PROMPTS):
            for _ in engine.generate(prompt, max_tokens=TOKENS, temperature=0.7, seed=seed):
                pass
        recorder.save(TRACE)


def show_hits() -> None:
    report = bench_replay(TRACE, shares=SHARES, policies=POLICIES, predictions=("none",), warmup=WARMUP)
    trace = report.trace
    print(f"{len(trace)} tokens, {trace.ids.shape[1]} layers, {trace.ids.shape[2]} of {trace.n_experts} experts each")
    print(f"a token shares {report.overlap:.1%} of its experts with the one before\n")
    print(f"{'in memory':>9}  " + "  ".join(f"{policy:>6}" for policy in POLICIES))
    rates = {policy: [r.hit_rate for r in report.results if r.policy == policy] for policy in POLICIES}
    for i, share in enumerate(SHARES):
        print(f"{share:>9.0%}  " + "  ".join(f"{rates[policy][i]:>6.1%}" for policy in POLICIES))
    draw(rates, foresight())


def foresight() -> dict[str, tuple[float, float]]:
    """Recall and precision by method, over the tokens that the trace has."""
    trace = RoutingTrace.load(TRACE)
    prompts = np.searchsorted(trace.steps, np.flatnonzero(np.bincount(trace.steps) > 1))  # a text begins with many tokens
    found: dict[str, list[tuple[int, int, int]]] = {}
    with moeflux.load() as engine:
        for part in np.split(trace.tokens, prompts[1:]):
            for method, layers in guesses(engine, part.tolist()).items():
                found.setdefault(method, []).extend(layers)
    print(f"\n{'foreseen by':<32} {'recall':>7} {'precision':>9}")
    shares = {}
    for method, counts in found.items():
        named, asked, both = np.sum(counts, axis=0)
        shares[method] = (both / asked, both / named)
        print(f"{method:<32} {both / asked:>7.1%} {both / named:>9.1%}")
    return shares


def guesses(engine: Engine, tokens: list[int]) -> dict[str, list[tuple[int, int, int]]]:
    """By method, for each layer: experts named, asked for, and both."""
    inside = moeflux.Trace()
    engine.score(tokens, trace=inside)
    ops, layers, eps = engine.model.ops, engine.model.trunk.layers, engine.spec.norm_eps
    n = layers[0].spec.ffn.router.n_experts
    asked = [as_sets(inside[i, "router_ids"], n) for i in range(len(layers))]
    before = [np.concatenate([np.zeros((1, n), bool), sets[:-1]]) for sets in asked]
    methods: dict[str, list[tuple[Sets, Sets]]] = {"the token before, same layer": list(zip(before, asked, strict=True))}
    for depth in DEPTHS:
        name = f"the router {depth} layer{'s' if depth > 1 else ''} ahead"
        for i in range(len(layers) - depth):
            later = layers[i + depth]
            x = ops.rms_norm(inside[i, "input"] + inside[i, "mixer"], later.ffn_norm, eps)
            _, ids, _ = ops.router(x, later.ffn["router"], later.ffn.get("router_bias"), later.spec.ffn.router)
            methods.setdefault(name, []).append((as_sets(ops.to_numpy(ids), n), asked[i + depth]))
    near = methods["the router 1 layer ahead"]
    both = [(guess | before[i + 1], wanted) for i, (guess, wanted) in enumerate(near)]
    methods["the token before and 1 ahead"] = both
    return {
        name: [(int(g[1:].sum()), int(a[1:].sum()), int((g & a)[1:].sum())) for g, a in pairs]
        for name, pairs in methods.items()
    }


def as_sets(ids: npt.NDArray[np.integer], n: int) -> Sets:
    sets = np.zeros((len(ids), n), bool)
    np.put_along_axis(sets, ids.astype(np.intp), True, axis=1)
    return sets


def draw(rates: dict[str, list[float]], shares: dict[str, tuple[float, float]]) -> None:
    from matplotlib.figure import Figure

    figure = Figure(figsize=(11, 4), layout="constrained")
    left, right = figure.subplots(1, 2)
    for policy, marker in zip(POLICIES, "os", strict=True):
        left.plot(SHARES, rates[policy], marker=marker, label=policy)
    left.plot((0, 1), (0, 1), color="grey", linestyle=":", label="no locality")
    left.set(xlabel="share of the experts in memory", ylabel="found in memory", ylim=(0, 1), xlim=(0, 1), title="Hits")
    left.legend()
    places = np.arange(len(shares))[::-1]
    for offset, (name, column) in zip((0.2, -0.2), (("recall", 0), ("precision", 1)), strict=True):
        right.barh(places + offset, [values[column] for values in shares.values()], height=0.38, label=name)
    right.set(xlim=(0, 1), title="Foreseen", yticks=places, yticklabels=list(shares))
    right.legend(loc="upper right")
    figure.savefig(PICTURE, dpi=110)


if __name__ == "__main__":
    if "--record" in sys.argv[1:]:
        record()
    show_hits()
