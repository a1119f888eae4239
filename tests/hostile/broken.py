"""Checkpoints to break: copies of the small MLX ones, tiny HF ones written here, and the tools to damage them."""

from __future__ import annotations

import json
import shutil
import struct
import time
import tracemalloc
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

import moeflux
from moeflux import MoefluxError
from moeflux.formats.dtypes import STORAGE, encode_float

DATA = Path(__file__).parents[1] / "data" / "mlx"
QWEN = "qwen3_moe-4bit-f32"
DEEPSEEK = "deepseek_v3-4bit-f32"
QWEN35 = "qwen3_5_moe_vl_fused-4bit-f32"
QWEN_NEXT = "qwen3_next-4bit-f32"
SHARD = "model.safetensors"
INDEX = "model.safetensors.index.json"

MAX_SECONDS = 5.0
MAX_BYTES = 32 * 2**20  # the fixtures are below 1 MB; what a refusal may allocate on the way
MAX_MESSAGE = 2000

Header = dict[str, Any]


@dataclass
class Stored:
    """One tensor as it lies in a file."""

    dtype: str
    shape: list[int]
    data: bytes

    @property
    def array(self) -> npt.NDArray[Any]:
        return np.frombuffer(self.data, STORAGE[self.dtype]).reshape(self.shape).copy()

    @array.setter
    def array(self, values: npt.NDArray[Any]) -> None:
        self.shape, self.data = list(values.shape), values.astype(STORAGE[self.dtype]).tobytes()


def stored(values: npt.NDArray[Any], dtype: str = "F32") -> Stored:
    coded = encode_float(values, dtype) if dtype in ("F32", "BF16", "F16") else values.astype(STORAGE[dtype])
    return Stored(dtype, list(values.shape), coded.tobytes())


@contextmanager
def refused(kind: type[MoefluxError], *named: str) -> Iterator[None]:
    """The block is refused with exactly this kind of error, whose text names all of these, soon and cheaply."""
    tracemalloc.start()
    start = time.monotonic()
    try:
        with pytest.raises(MoefluxError) as caught:
            yield
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    text = str(caught.value)
    assert ascii(text) == ascii(text.encode(errors="replace").decode())  # one that cannot be printed tells nobody anything
    assert type(caught.value) is kind, text
    for name in named:
        assert name in text
    assert time.monotonic() - start < MAX_SECONDS
    assert peak < MAX_BYTES
    assert len(text) < MAX_MESSAGE


def open_model(folder: Path) -> None:
    moeflux.load(folder, backend="numpy").close()


def reference_ids(case: str) -> list[int]:
    with np.load(DATA / case / "ref.npz") as ref:
        return [int(i) for i in ref["ids"][0]]


def copy(case: str, to: Path) -> Path:
    """Config and weights of a fixture, without its index."""
    to.mkdir(parents=True, exist_ok=True)
    for name in ("config.json", SHARD):
        shutil.copyfile(DATA / case / name, to / name)
    return to


def read_raw(path: Path) -> tuple[Header, bytes]:
    blob = path.read_bytes()
    (length,) = struct.unpack("<Q", blob[:8])
    return json.loads(blob[8 : 8 + length]), blob[8 + length :]


def write_raw(path: Path, header: Header | bytes, data: bytes, length: int | None = None) -> None:
    """A file with this header and data. `length` is what the length field claims, if not the truth."""
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(text) if length is None else length) + text + data)


@contextmanager
def header_of(folder: Path, shard: str = SHARD) -> Iterator[Header]:
    """Edit a header and leave the bytes behind it alone."""
    header, data = read_raw(folder / shard)
    yield header
    write_raw(folder / shard, header, data)


def read_tensors(path: Path) -> dict[str, Stored]:
    header, data = read_raw(path)
    header.pop("__metadata__", None)
    return {
        name: Stored(entry["dtype"], entry["shape"], data[slice(*entry["data_offsets"])]) for name, entry in header.items()
    }


def layout(tensors: Mapping[str, Stored]) -> tuple[Header, bytes]:
    """A correct header and the data behind it, in the order of the mapping."""
    header: Header = {}
    at = 0
    for name, tensor in tensors.items():
        header[name] = {"dtype": tensor.dtype, "shape": tensor.shape, "data_offsets": [at, at + len(tensor.data)]}
        at += len(tensor.data)
    return header, b"".join(tensor.data for tensor in tensors.values())


def write_tensors(path: Path, tensors: Mapping[str, Stored]) -> None:
    write_raw(path, *layout(tensors))


@contextmanager
def tensors_of(folder: Path, shard: str = SHARD) -> Iterator[dict[str, Stored]]:
    """Edit the tensors of a file, which is then written as a correct one."""
    tensors = read_tensors(folder / shard)
    yield tensors
    write_tensors(folder / shard, tensors)


def set_value(folder: Path, name: str, index: Any, value: float) -> None:
    """Overwrite elements of a stored tensor."""
    with tensors_of(folder) as tensors:
        array = tensors[name].array
        array[index] = value
        tensors[name].array = array


@contextmanager
def config_of(folder: Path) -> Iterator[dict[str, Any]]:
    config = json.loads((folder / "config.json").read_text())
    yield config
    (folder / "config.json").write_text(json.dumps(config))


def split(folder: Path, n: int = 2) -> dict[str, str]:
    """Cut the one shard into n with an index; the weight map."""
    tensors = read_tensors(folder / SHARD)
    (folder / SHARD).unlink()
    weight_map: dict[str, str] = {}
    for i in range(n):
        shard = f"model-{i + 1:05}-of-{n:05}.safetensors"
        part = {name: tensors[name] for name in list(tensors)[i::n]}
        write_tensors(folder / shard, part)
        weight_map |= dict.fromkeys(part, shard)
    write_index(folder, {"metadata": {}, "weight_map": weight_map})
    return weight_map


def write_index(folder: Path, index: Any) -> None:
    (folder / INDEX).write_text(json.dumps(index))


HF_CONFIG: dict[str, Any] = {
    "model_type": "qwen3_moe",
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 16,
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 16,
    "norm_topk_prob": True,
    "vocab_size": 64,
    "max_position_embeddings": 128,
    "torch_dtype": "bfloat16",
}
FP8_BLOCK = {"quant_method": "fp8", "fmt": "e4m3", "weight_block_size": [128, 128], "activation_scheme": "dynamic"}

Write = Callable[[str, npt.NDArray[np.float32]], dict[str, Stored]]


def write_hf(folder: Path, *, fused: bool = False, dtype: str = "F32", fp8: bool = False) -> Path:
    """A tiny Qwen3-MoE with random weights, as HF stores it: experts apart or fused, plain floats or block float8."""
    folder.mkdir(parents=True, exist_ok=True)
    config = {**HF_CONFIG, "quantization_config": FP8_BLOCK} if fp8 else HF_CONFIG
    (folder / "config.json").write_text(json.dumps(config))
    rng = np.random.default_rng(0)

    def values(*shape: int) -> npt.NDArray[np.float32]:
        return (rng.standard_normal(shape) * 0.2).astype(np.float32)

    def plain(name: str, weight: npt.NDArray[np.float32]) -> dict[str, Stored]:
        return {name: stored(weight, dtype)}

    def float8(name: str, weight: npt.NDArray[np.float32]) -> dict[str, Stored]:
        codes = rng.integers(0x20, 0x38, weight.shape) | rng.integers(0, 2, weight.shape) << 7
        blocks = (*weight.shape[:-2], *(-(-n // 128) for n in weight.shape[-2:]))
        return {name: stored(codes, "F8_E4M3"), f"{name}_scale_inv": stored(np.full(blocks, 0.5, np.float32))}

    linear: Write = float8 if fp8 else plain
    tensors = plain("model.embed_tokens.weight", values(64, 32)) | plain("lm_head.weight", values(64, 32))
    tensors |= plain("model.norm.weight", 1 + values(32))
    for i in range(2):
        base = f"model.layers.{i}"
        for name, rows, columns in (("q", 32, 32), ("k", 16, 32), ("v", 16, 32), ("o", 32, 32)):
            tensors |= linear(f"{base}.self_attn.{name}_proj.weight", values(rows, columns))
        for name, size in (("self_attn.q_norm", 16), ("self_attn.k_norm", 16)):
            tensors |= plain(f"{base}.{name}.weight", 1 + values(size))
        for name in ("input_layernorm", "post_attention_layernorm"):
            tensors |= plain(f"{base}.{name}.weight", 1 + values(32))
        tensors |= plain(f"{base}.mlp.gate.weight", values(4, 32))
        if fused:
            tensors |= linear(f"{base}.mlp.experts.gate_up_proj", values(4, 32, 32))
            tensors |= linear(f"{base}.mlp.experts.down_proj", values(4, 32, 16))
            continue
        for e in range(4):
            for name, rows, columns in (("gate", 16, 32), ("up", 16, 32), ("down", 32, 16)):
                tensors |= linear(f"{base}.mlp.experts.{e}.{name}_proj.weight", values(rows, columns))
    write_tensors(folder / SHARD, tensors)
    return folder


def set_path(config: dict[str, Any], path: str, value: Any) -> None:
    """Set a field by its dotted path; `...` removes it."""
    *parents, last = path.split(".")
    for key in parents:
        if config.get(key) is None:
            config[key] = {}
        config = config[key]
    if value is ...:
        config.pop(last, None)
    else:
        config[last] = value
