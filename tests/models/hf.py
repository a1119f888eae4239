"""HF transformers as the oracle: tiny seeded models with weights away from their trivial initial values."""

from __future__ import annotations

import os
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

os.environ["HF_HUB_OFFLINE"] = "1"

import torch
from transformers import AutoModelForCausalLM
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from models.configs import VOCAB, config

N_TOKENS = 75  # past the 64 of the delta net's chunks


@dataclass(frozen=True)
class Reference:
    model: Any
    ids: npt.NDArray[np.int64]
    logits: npt.NDArray[np.float32]  # one prefill, [T, V]
    stepped: npt.NDArray[np.float32]  # the same through the cache, token by token
    outputs: list[npt.NDArray[np.float32]]  # of each layer, [T, hidden]


@cache
def reference(family: str, name: str) -> Reference:
    model = build(family, name)
    ids = np.random.default_rng(7).integers(0, VOCAB, N_TOKENS)
    outputs: list[npt.NDArray[np.float32]] = []
    hooks = [
        layer.register_forward_hook(lambda _m, _i, out: outputs.append(_first(out)[0].numpy().copy()))
        for layer in model.model.layers
    ]
    logits = run(model, ids)
    for hook in hooks:
        hook.remove()
    return Reference(model, ids, logits, run_stepped(model, ids), outputs)


def build(family: str, name: str) -> Any:
    hf_config = CONFIG_MAPPING[family](**config(family, name))
    model = AutoModelForCausalLM.from_config(
        hf_config, dtype=torch.float32, attn_implementation="eager", experts_implementation="eager"
    )
    randomize(model)
    return model.eval()


def randomize(model: Any, seed: int = 0) -> None:
    """Norms, biases, decay rates and score corrections too: their initial values hide mistakes."""
    generator = torch.Generator().manual_seed(seed)

    def normal(tensor: torch.Tensor, std: float, mean: float = 0.0) -> None:
        tensor.copy_(torch.randn(tensor.shape, generator=generator) * std + mean)

    with torch.no_grad():
        for key, tensor in [*model.named_parameters(), *model.named_buffers()]:
            if key.endswith("A_log"):
                tensor.copy_(torch.log(torch.rand(tensor.shape, generator=generator) * 4 + 0.05))
            elif key.endswith("dt_bias"):
                normal(tensor, 0.7, -0.5)
            elif key.endswith("e_score_correction_bias"):
                normal(tensor, 0.1)
            elif "norm" in key:
                centre = 0.0 if tensor.abs().max() == 0 else 1.0
                normal(tensor, 0.25, centre)
            elif key.endswith("conv1d.weight"):
                normal(tensor, 0.5)
            elif key.endswith(".bias"):
                normal(tensor, 0.3)
            elif "embed_tokens" in key:
                normal(tensor, 1.0)
            elif key.endswith("mlp.gate.weight"):
                normal(tensor, 2.0 * tensor.shape[-1] ** -0.5)
            elif tensor.dim() >= 2:
                normal(tensor, tensor.shape[-1] ** -0.5)


def run(model: Any, ids: npt.NDArray[np.int64]) -> npt.NDArray[np.float32]:
    with torch.no_grad():
        result: npt.NDArray[np.float32] = model(torch.tensor(ids)[None]).logits[0].numpy()
    return result


def run_stepped(model: Any, ids: npt.NDArray[np.int64]) -> npt.NDArray[np.float32]:
    rows, cache = [], None
    with torch.no_grad():
        for token in ids:
            out = model(torch.tensor([[int(token)]]), past_key_values=cache, use_cache=True)
            cache = out.past_key_values
            rows.append(out.logits[0, 0].numpy())
    return np.stack(rows)


def save(model: Any, folder: Path, **options: Any) -> Path:
    model.save_pretrained(folder, **options)
    return folder


def _first(out: Any) -> Any:
    return out[0] if isinstance(out, tuple) else out
