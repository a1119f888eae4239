"""Bits per character of the validation file, and how evenly its tokens use the experts."""

import argparse
import math
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from training.batches import ValidationSet, validation_set
from training.config import ModelShape
from training.model import Layer, Model, token_losses
from training.optimizer import Optimizer
from training.prepare import load_arrays

ROWS = 16  # windows run together


@dataclass(frozen=True)
class Score:
    bits: float  # per character
    bits_by_kind: dict[str, float]
    nats: float  # per token
    counts: Tensor  # [layers, experts], uses on the validation text and the padding of its last windows

    def summary(self) -> str:
        kinds = ", ".join(f"{kind} {bits:.4f}" for kind, bits in self.bits_by_kind.items())
        used = f"least used expert {int(self.counts.min())} times, load {self.load()}"
        return f"{self.bits:.4f} bits/char ({kinds}), {self.nats:.4f} nats/token; {used}"

    def load(self) -> str:
        """Least and most used expert of each layer, relative to the mean."""
        mean = self.counts.float().mean(1, keepdim=True)
        relative = self.counts / mean
        pairs = zip(relative.amin(1).tolist(), relative.amax(1).tolist(), strict=True)
        return " ".join(f"{low:.2f}-{high:.2f}" for low, high in pairs)


@torch.no_grad()
def evaluate(model: Model, data: ValidationSet) -> Score:
    """Layers run uncompiled: compiling once more would cost more than it saves."""
    compiled = model.run_layer, model.run_head
    model.run_layer, model.run_head = Layer.forward, token_losses
    sums = {True: 0.0, False: 0.0}
    n_tokens, counts = 0, torch.zeros(model.shape.layers, model.shape.experts, dtype=torch.long)
    for start in range(0, len(data.tokens), ROWS):
        rows = slice(start, start + ROWS)
        losses, routing = model.losses(data.tokens[rows], data.targets[rows])
        for kind in sums:
            sums[kind] += float(losses.double().sum(1)[data.is_tale[rows] == kind].sum())
        n_tokens += int((data.targets[rows] >= 0).sum())
        counts += routing.counts.cpu()
    model.run_layer, model.run_head = compiled
    by_kind = {"tales": sums[True], "novels": sums[False]}
    return Score(
        bits=sum(sums.values()) / math.log(2) / sum(data.chars.values()),
        bits_by_kind={kind: nats / math.log(2) / max(1, data.chars[kind]) for kind, nats in by_kind.items()},
        nats=sum(sums.values()) / n_tokens,
        counts=counts,
    )


def main() -> None:
    parser = argparse.ArgumentParser(description="`python -m training.evaluate WEIGHTS DATA`: both figures of saved weights")
    parser.add_argument("weights", type=Path)
    parser.add_argument("data", type=Path)
    arguments = parser.parse_args()
    device = "cuda" if torch.cuda.is_available() else "cpu"
    content = torch.load(arguments.weights, map_location="cpu")
    model = Model(ModelShape(**content["shape"]))
    model.load_state_dict(content["weights"])
    optimizer = Optimizer(model.to(device))
    data = validation_set(load_arrays(arguments.data), model.shape.context, device)
    for quantize in (False, True):
        optimizer.publish(quantize)
        print(("4-bit" if quantize else "bf16") + f": {evaluate(model, data).summary()}", flush=True)


if __name__ == "__main__":
    main()
