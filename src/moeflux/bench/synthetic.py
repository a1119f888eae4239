"""Random checkpoints of any shape in the MLX layout, written as fast as the drive takes them.

Codes are drawn from a pool of random bytes that is read over and over at shifting places, so that tens of gigabytes
cost no more than copying. Scales are set so that activations keep their size from layer to layer and routing follows
the token. The same config and seed give the same bytes.

Tokens belong to topics, `TOPIC_TOKENS` neighbours each, whose embeddings are alike. So a text that stays with a topic asks
for some of the same experts again from token to token, as real text does of trained models (bench/routing.py makes such
texts), and one of random tokens asks for any expert alike.
"""

from __future__ import annotations

import json
import os
import struct
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from moeflux.bench.direct import DirectFile
from moeflux.core.atomic_file import write_atomically
from moeflux.core.errors import OptionError
from moeflux.formats.dtypes import STORAGE, encode_float
from moeflux.formats.quant import Affine, BlockFp8, Codec, Component, Shape
from moeflux.formats.quant_rules import QuantRules, read_quant_rules
from moeflux.models.registry import read_spec
from moeflux.models.spec import ModelSpec, Weight
from moeflux.plan.codecs import planned_codec, planned_experts

SHARD_BYTES = 4 * 2**30
POOL_BYTES = 16 * 2**20
MODEL_MODE = 0o644  # of a model's files
RESIDUAL_GAIN = 0.3  # of the projections that write into the residual stream
TOPIC_TOKENS = 64
TOPIC_SHARE = 0.85  # of the columns of an embedding are its topic's: the correlation of two tokens of one topic

Progress = Callable[[int, int], None]  # bytes written, bytes in all
Values = npt.NDArray[Any]


@dataclass(frozen=True)
class Stored:
    """One array to be written. `spread` is the standard deviation of the weight it belongs to."""

    name: str
    component: Component
    codec: Codec
    kind: str
    spread: float


def write_checkpoint(config: Mapping[str, Any], folder: Path, seed: int = 0, progress: Progress | None = None) -> int:
    """A folder that `load` opens, which must not exist or be empty; returns its bytes.

    config.json comes last, so that half a folder never opens.
    """
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise OptionError("exists and is not an empty folder", where=str(folder))
    spec, rules = read_spec(config), read_quant_rules(config)
    shards = _shards(list(_arrays(spec, rules)))
    total = sum(item.component.nbytes for shard in shards for item in shard)
    folder.mkdir(parents=True, exist_ok=True)
    pool = _Pool(seed)
    weight_map: dict[str, str] = {}
    done = 0
    for number, shard in enumerate(shards, start=1):
        file = f"model-{number:05}-of-{len(shards):05}.safetensors"
        temporary = folder / f"{file}.part"
        with DirectFile(temporary) as out:
            _write_header(out, shard)
            for item in shard:
                for block in pool.blocks(item):
                    out.write(block)
                    done += block.nbytes
                    if progress:
                        progress(done, total)
        os.replace(temporary, folder / file)
        weight_map |= dict.fromkeys((item.name for item in shard), file)
    index = {"metadata": {"total_size": total}, "weight_map": weight_map}
    _write_json(folder / "model.safetensors.index.json", index)
    _write_json(folder / "config.json", config, indent=2)
    return total


def _write_json(path: Path, value: Mapping[str, Any], indent: int | None = None) -> None:
    write_atomically(path, lambda out: out.write(json.dumps(value, indent=indent).encode()), mode=MODEL_MODE)


def _arrays(spec: ModelSpec, rules: QuantRules) -> Iterator[Stored]:
    for weight in spec.weights():
        yield from _trunk_arrays(weight, spec, rules)
    for layer, moe in spec.moe_layers():
        base = spec.names.stored(spec.names.experts.format(layer=layer))[0]
        for part, (codec, shape) in planned_experts(layer, moe, spec, rules).items():
            gain = RESIDUAL_GAIN if part == "down" else 1.0
            stack = (moe.router.n_experts, *shape)
            yield from _components(f"{base}.switch_mlp.{part}_proj.weight", codec, stack, "matrix", gain)


def _trunk_arrays(weight: Weight, spec: ModelSpec, rules: QuantRules) -> Iterator[Stored]:
    codec = planned_codec(weight, spec, rules)
    if weight.split:
        for name, shape in weight.split:
            fits = isinstance(codec, Affine) and shape[-1] % codec.group == 0
            one = codec if fits else planned_codec(spec.final_norm, spec, rules)
            yield from _components(spec.names.stored(name)[0], one, shape, "matrix", 1.0)
        return
    shape = (*weight.shape, 1) if weight.kind == "conv" else weight.shape
    residual = weight.name.endswith(("o_proj.weight", "out_proj.weight", "down_proj.weight"))
    gain = RESIDUAL_GAIN if residual else 1.0
    yield from _components(spec.names.stored(weight.name)[0], codec, shape, weight.kind, gain)


def _components(name: str, codec: Codec, shape: Shape, kind: str, gain: float) -> Iterator[Stored]:
    if isinstance(codec, BlockFp8):
        raise OptionError("float8 checkpoints cannot be made here", where=name)
    spread = 1.0 if kind == "embedding" else gain * shape[-1] ** -0.5
    module = name.removesuffix(".weight")
    for component in codec.components(shape):
        stored = name if component.name == "weight" else f"{module}.{component.name}"
        yield Stored(stored, component, codec, kind, spread)


def _shards(items: list[Stored]) -> list[list[Stored]]:
    shards: list[list[Stored]] = [[]]
    size = 0
    for item in items:
        if size and size + item.component.nbytes > SHARD_BYTES:
            shards.append([])
            size = 0
        shards[-1].append(item)
        size += item.component.nbytes
    return shards


def _write_header(out: DirectFile, items: list[Stored]) -> None:
    header: dict[str, Any] = {"__metadata__": {"format": "mlx"}}
    at = 0
    for item in items:
        end = at + item.component.nbytes
        header[item.name] = {
            "dtype": item.component.dtype,
            "shape": list(item.component.shape),
            "data_offsets": [at, end],
        }
        at = end
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    out.write(struct.pack("<Q", len(text)) + text)


class _Pool:
    """Random bytes and random numbers between -1 and 1, read over and over."""

    def __init__(self, seed: int) -> None:
        random = np.random.default_rng(seed)
        self._bytes = np.frombuffer(random.bytes(POOL_BYTES), dtype=np.uint8)
        self._numbers = random.uniform(-1, 1, POOL_BYTES // 16).astype(np.float32)
        self._at = 0

    def blocks(self, item: Stored) -> Iterator[Values]:
        """The array in pieces of at most the pool's size."""
        if item.kind == "embedding" and item.component.name == "weight":
            yield from self._embeddings(item)
            return
        left = prod(item.component.shape)
        while left:
            block = self._some(item, left)
            yield block
            left -= len(block)

    def _embeddings(self, item: Stored) -> Iterator[Values]:
        """Rows whose first columns are those of their topic's first row."""
        n_rows, row = item.component.shape
        step = max(1, len(self._numbers) // row // TOPIC_TOKENS) * TOPIC_TOKENS
        for start in range(0, n_rows, step):
            n = min(step, n_rows - start)
            rows = self._some(item, n * row).reshape(n, row).copy()
            shared = rows[::TOPIC_TOKENS, : int(TOPIC_SHARE * row)]
            rows[:, : shared.shape[1]] = np.repeat(shared, TOPIC_TOKENS, axis=0)[:n]
            yield rows

    def _some(self, item: Stored, n: int) -> Values:
        """`n` numbers as they are stored, or fewer."""
        if item.component.dtype != "U32":
            return self._values(item, min(n, len(self._numbers))).astype(STORAGE[item.component.dtype], copy=False)
        self._at = (self._at + 4099 * 4) % (POOL_BYTES // 2)
        return self._bytes[self._at : self._at + min(4 * n, POOL_BYTES // 2)].view("<u4")

    def _values(self, item: Stored, n: int) -> Values:
        self._at = (self._at + 4099 * 4) % (POOL_BYTES // 2)
        noise = np.roll(self._numbers, self._at)[:n]  # uniform: standard deviation 1 / sqrt(3)
        dtype = item.component.dtype
        if item.component.name in ("scales", "biases"):
            assert isinstance(item.codec, Affine)
            top = 2**item.codec.bits - 1
            scale = np.float32(item.spread * 12**0.5 / top)  # codes are uniform on 0..top
            value = scale if item.component.name == "scales" else -scale * np.float32(top / 2)
            return encode_float(np.full(n, value, dtype=np.float32), dtype)
        match item.kind:
            case "norm":
                return encode_float(1 + noise * np.float32(0.1), dtype)
            case "vector":
                return encode_float(noise * np.float32(0.5), dtype)
            case _:
                return encode_float(noise * np.float32(item.spread * 3**0.5), dtype)
