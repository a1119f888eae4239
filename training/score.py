"""The figures of a model folder, by moeflux alone: `python -m training.score FOLDER CORPUS [--characters N]`.

Bits per character over the same windows as `evaluate` (every token is predicted once, from at most the model's context
before it), and how often each expert was used.
"""

import argparse
import math
from pathlib import Path

import numpy as np

import moeflux
from moeflux.text.tokenizer import Tokenizer
from training.config import END_OF_TEXT
from training.corpus import read_corpus


def window_nats(engine: moeflux.Engine, before: int, wanted: list[int], counts: np.ndarray) -> float:
    """Nats of the wanted tokens; adds the experts they used to `counts` [layers, experts]."""
    trace = moeflux.Trace()
    logits = engine.score([before, *wanted[:-1]], trace=trace).astype(np.float64)
    for layer, row in enumerate(counts):
        row += np.bincount(trace[layer, "router_ids"].ravel(), minlength=len(row))
    top = logits.max(axis=1)
    total = top + np.log(np.exp(logits - top[:, None]).sum(axis=1))
    return float((total - logits[np.arange(len(wanted)), wanted]).sum())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path)
    parser.add_argument("corpus", type=Path)
    parser.add_argument("--characters", type=int, default=None, help="of each document; all where not given")
    parser.add_argument("--backend", default="auto")
    arguments = parser.parse_args()
    tokenizer = Tokenizer.open(arguments.folder)
    nats, n_chars, n_tokens = 0.0, 0, 0
    with moeflux.load(arguments.folder, backend=arguments.backend) as engine:
        counts = np.zeros((len(engine.spec.layers), engine.spec.moe_layers()[0][1].router.n_experts), dtype=np.int64)
        for document in read_corpus(arguments.corpus / "validation.jsonl.xz"):
            text = document.text[: arguments.characters]
            ids = tokenizer.encode(text)
            for start in range(0, len(ids), engine.spec.context):
                before = ids[start - 1] if start else END_OF_TEXT
                nats += window_nats(engine, before, ids[start : start + engine.spec.context], counts)
            n_chars, n_tokens = n_chars + len(text), n_tokens + len(ids)
            print(f"{document.title}: {nats / math.log(2) / n_chars:.4f} bits/char so far", flush=True)
    print(f"{nats / math.log(2) / n_chars:.4f} bits/char, {nats / n_tokens:.4f} nats/token, {n_tokens} tokens")
    for layer, row in enumerate(counts):
        print(f"layer {layer}: least used expert {row.min()}, most used {row.max()}, mean {row.mean():.0f}")


if __name__ == "__main__":
    main()
