"""From trained weights to the shipped folder: `python -m training.export WEIGHTS DATA FOLDER`.

The MLX layout of `qwen3_5_moe` in affine 4 bits (router and shared expert's gate in 8), by moeflux's own quantiser.
"""

import argparse
import json
import shutil
import struct
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch

from moeflux.formats.dtypes import encode_float
from moeflux.formats.quant import quantize
from training.config import GROUP, ModelShape, mlx_config
from training.optimizer import bits_of

PREFIX = "language_model."
DTYPES = {np.dtype(np.uint32): "U32", np.dtype(np.uint16): "BF16", np.dtype(np.float32): "F32"}
TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json", "generation_config.json")


def export(weights: Path, data: Path, folder: Path) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    content: dict[str, Any] = torch.load(weights, map_location="cpu")
    shape = ModelShape(**content["shape"])
    arrays = dict(stored_arrays({name: tensor.numpy() for name, tensor in content["weights"].items()}))
    write_safetensors(folder / "model.safetensors", arrays)
    (folder / "config.json").write_text(json.dumps(mlx_config(shape), indent=2) + "\n")
    for name in TOKENIZER_FILES:
        shutil.copyfile(data / name, folder / name)


def stored_arrays(weights: Mapping[str, np.ndarray]) -> Iterator[tuple[str, np.ndarray]]:
    for name, weight in sorted(weights.items()):
        bits = bits_of(name)
        for stored, part in _renamed(name, weight):
            if bits is None:
                yield stored, part if name.endswith("A_log") else encode_float(part, "BF16")
                continue
            module = stored.removesuffix(".weight")
            for component, values in quantize(part, bits, GROUP).items():
                yield f"{module}.{component}", values


def _renamed(name: str, weight: np.ndarray) -> Iterator[tuple[str, np.ndarray]]:
    """Name and value as MLX stores them: norms plus one, kernels with their taps in the middle, experts taken apart."""
    base = f"{PREFIX}{name}"
    if name.endswith("gate_up_proj"):
        half = weight.shape[1] // 2
        stack = base.replace("experts.gate_up_proj", "switch_mlp.{}_proj.weight")
        yield stack.format("gate"), weight[:, :half]
        yield stack.format("up"), weight[:, half:]
    elif name.endswith("experts.down_proj"):
        yield base.replace("experts.down_proj", "switch_mlp.down_proj.weight"), weight
    elif name.endswith("conv1d.weight"):
        yield base, weight.transpose(0, 2, 1)
    elif name.endswith("norm.weight") and not name.endswith("linear_attn.norm.weight"):
        yield base, weight + np.float32(1)
    else:
        yield base, weight


def write_safetensors(path: Path, arrays: Mapping[str, np.ndarray]) -> None:
    header: dict[str, Any] = {"__metadata__": {"format": "mlx"}}
    at = 0
    for name, array in arrays.items():
        header[name] = {
            "dtype": DTYPES[array.dtype],
            "shape": list(array.shape),
            "data_offsets": [at, at + array.nbytes],
        }
        at += array.nbytes
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    with path.open("wb") as file:
        file.write(struct.pack("<Q", len(text)) + text)
        for array in arrays.values():
            file.write(np.ascontiguousarray(array).tobytes())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("weights", type=Path)
    parser.add_argument("data", type=Path)
    parser.add_argument("folder", type=Path)
    arguments = parser.parse_args()
    export(arguments.weights, arguments.data, arguments.folder)


if __name__ == "__main__":
    main()
