"""What choosing a token costs at the vocabulary of Qwen3.5: `python benchmarks/sampling.py`.

Two distributions: one as models give it (a few likely tokens, a long tail), one nearly even, the worst case for truncation.
`constrained`: among six of seven tokens, as inside a JSON string.
"""

from __future__ import annotations

import json
import time

import numpy as np

from moeflux.sampling.params import SamplingParams
from moeflux.sampling.sampler import Sampler

VOCAB = 248_320
REPEATS = 101
CASES = {
    "greedy": SamplingParams(),
    "temperature": SamplingParams(temperature=0.8),
    "top_k 20, top_p 0.95": SamplingParams(temperature=0.8, top_k=20, top_p=0.95),
    "top_p 0.95": SamplingParams(temperature=0.8, top_p=0.95),
    "min_p 0.05": SamplingParams(temperature=0.8, min_p=0.05),
    "all, with penalties": SamplingParams(
        temperature=0.8, top_k=40, top_p=0.95, min_p=0.02, repetition_penalty=1.1, presence_penalty=0.5,
        frequency_penalty=0.2, logit_bias={5: 1.0},
    ),
    "top_k 20, 20 logprobs": SamplingParams(temperature=0.8, top_k=20, logprobs=20),
}  # fmt: skip


def main() -> None:
    random = np.random.default_rng(0)
    usual = (random.standard_normal(VOCAB) * 2.5).astype(np.float32)
    usual[random.integers(0, VOCAB, 5)] += 18
    even = (random.standard_normal(VOCAB) * 0.1).astype(np.float32)
    allowed = np.arange(VOCAB) % 7 != 0
    prompt = random.integers(0, VOCAB, 8000).tolist()
    rows = []
    for name, params in CASES.items():
        row: dict[str, object] = {"case": name}
        for kind, logits, mask in (("usual", usual, None), ("constrained", usual, allowed), ("even", even, None)):
            row[f"{kind}_ms"] = round(median_ms(params, logits, mask, prompt), 3)
        rows.append(row)
        print(f"{name:24}" + "".join(f"{key:>15} {value:6.2f}" for key, value in row.items() if key != "case"))
    print(json.dumps({"bench": "sampling", "vocab": VOCAB, "rows": rows}))


def median_ms(params: SamplingParams, logits: np.ndarray, allowed: np.ndarray | None, prompt: list[int]) -> float:
    sampler = Sampler(params, VOCAB, prompt)
    times = []
    for _ in range(REPEATS):
        start = time.perf_counter()
        sampler.sample(logits, allowed)
        times.append(time.perf_counter() - start)
    return float(np.median(times)) * 1e3


main()
