"""Re-writes a checkpoint that transformers saved into the other layouts people download. Same weights, other files."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

Tensors = dict[str, torch.Tensor]


def rewrite(source: Path, target: Path, change: Callable[[Tensors], Tensors], **config: Any) -> Path:
    target.mkdir()
    settings = json.loads((source / "config.json").read_text()) | config
    (target / "config.json").write_text(json.dumps(settings))
    tensors = change(load_file(source / "model.safetensors"))
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, target / "model.safetensors")
    return target


def fuse_experts(tensors: Tensors) -> Tensors:
    """Per-expert matrices to the 3-D stacks of the newer hub files."""
    pattern = re.compile(r"(.*\.mlp\.experts)\.(\d+)\.(gate|up|down)_proj\.weight")
    fused = {name: tensor for name, tensor in tensors.items() if not pattern.fullmatch(name)}
    bases = {m[1] for name in tensors if (m := pattern.fullmatch(name))}
    for base in bases:
        n = sum(name.startswith(f"{base}.") and name.endswith(".gate_proj.weight") for name in tensors)
        parts = {p: torch.stack([tensors[f"{base}.{e}.{p}_proj.weight"] for e in range(n)]) for p in ("gate", "up", "down")}
        fused[f"{base}.gate_up_proj"] = torch.cat([parts["gate"], parts["up"]], dim=1)
        fused[f"{base}.down_proj"] = parts["down"]
    return fused


def shard(source: Path, target: Path, n_shards: int) -> Path:
    """Tensors dealt out over shards, with an index."""
    target.mkdir()
    (target / "config.json").write_text((source / "config.json").read_text())
    tensors = load_file(source / "model.safetensors")
    weight_map = {}
    for i in range(n_shards):
        file = f"model-{i + 1:05}-of-{n_shards:05}.safetensors"
        part = dict(list(tensors.items())[i::n_shards])
        save_file(part, target / file)
        weight_map |= dict.fromkeys(part, file)
    index = {"metadata": {"total_size": 0}, "weight_map": weight_map}
    (target / "model.safetensors.index.json").write_text(json.dumps(index))
    return target


def to_fp8(tensors: Tensors) -> Tensors:
    """Block-scaled float8 as DeepSeek ships it: linear weights only."""
    result: Tensors = {}
    for name, tensor in tensors.items():
        if tensor.dim() == 2 and re.search(r"_proj(_with_mqa)?\.weight$", name):
            codes, scales = _fp8_blocks(tensor.float())
            result[name], result[f"{name}_scale_inv"] = codes, scales
        else:
            result[name] = tensor
    return result


def from_fp8(tensors: Tensors) -> Tensors:
    """What such a checkpoint means, in float32."""
    result: Tensors = {}
    for name, tensor in tensors.items():
        if name.endswith("_scale_inv"):
            continue
        scales = tensors.get(f"{name}_scale_inv")
        if scales is None:
            result[name] = tensor
            continue
        rows, cols = tensor.shape
        wide = scales.repeat_interleave(128, 0)[:rows].repeat_interleave(128, 1)[:, :cols]
        result[name] = tensor.float() * wide
    return result


def _fp8_blocks(weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    rows, cols = weight.shape
    scales = torch.empty(-(-rows // 128), -(-cols // 128))
    codes = torch.empty(rows, cols, dtype=torch.float8_e4m3fn)
    for i in range(scales.shape[0]):
        for j in range(scales.shape[1]):
            block = (slice(128 * i, 128 * i + 128), slice(128 * j, 128 * j + 128))
            scales[i, j] = weight[block].abs().max() / 448
            codes[block] = (weight[block] / scales[i, j]).to(torch.float8_e4m3fn)
    return codes, scales
