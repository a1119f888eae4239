"""A model folder, opened in place: its config, its tensors by canonical name, its experts by layer.

Only headers are read on opening. Nothing in the folder is ever modified.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Mapping
from functools import lru_cache
from math import prod
from pathlib import Path
from reprlib import repr as shown
from typing import Any

import numpy as np

from moeflux.core.errors import FormatError, MissingTensorError, ReadError
from moeflux.core.json_file import read_json
from moeflux.core.names import TensorNames
from moeflux.formats.dtypes import FLOATS, STORAGE
from moeflux.formats.experts import ExpertTable, find_experts
from moeflux.formats.files import Bytes, Extent, FileSet
from moeflux.formats.quant import Affine, BlockFp8, Codec, Matrix, Plain, Shape
from moeflux.formats.quant_rules import QuantRules, read_quant_rules
from moeflux.formats.safetensors import TensorEntry, read_header
from moeflux.formats.tensors import TensorView

INDEX = "model.safetensors.index.json"
MAX_NAME_BYTES = 255

Place = Callable[[int], Bytes]  # memory for a number of bytes


def read_config(path: Path) -> dict[str, Any]:
    """config.json of a model folder, or the file itself."""
    file = path / "config.json" if os.path.isdir(path) else path
    if not os.path.exists(path):
        raise ReadError("no such file or folder", where=str(path))
    if not os.path.exists(file):
        raise MissingTensorError("there is no config.json", where=str(path), hint="point at a downloaded model folder")
    return read_json(file)


def has_weights(path: Path) -> bool:
    """Whether there is more to open than a config.json."""
    return os.path.isdir(path) and (os.path.lexists(path / INDEX) or any(path.glob("*.safetensors")))


def _anywhere(n_bytes: int) -> Bytes:
    return np.empty(n_bytes, dtype=np.uint8)


class Checkpoint:
    """Safetensors, in HF or MLX layout. Owns the open files; `close` lets them go."""

    def __init__(self, path: Path, names: TensorNames) -> None:
        self.path = path
        self.config: Mapping[str, Any] = read_config(path)
        self.rules: QuantRules = read_quant_rules(self.config)
        self._names = names
        stored, paths = _find_tensors(path)
        self.skipped, self._stored = self._name_tensors(stored, paths)
        self._entries = stored
        self.files = FileSet(paths)
        self.experts = lru_cache(maxsize=None)(self._experts)

    @property
    def layout(self) -> str:
        """ "mlx" once converted by MLX (norms already + 1, experts stacked), else "hf"."""
        return "mlx" if any(".switch_mlp." in name for name in self._stored) else "hf"

    @property
    def names(self) -> frozenset[str]:
        """Canonical names of all stored arrays but the skipped ones."""
        return frozenset(self._stored)

    def has(self, name: str) -> bool:
        return name in self._stored

    def tensor(self, name: str) -> TensorView:
        """The view of a weight by its canonical name; scales and biases belong to it and are not named."""
        _, entry = self._entry(name)
        module = name.removesuffix(".weight")
        if f"{module}.scales" in self._stored and module != name:
            return self._affine(name, module)
        if entry.dtype == "F8_E4M3":
            return self._fp8(name)
        if entry.dtype not in FLOATS:
            raise FormatError(
                f"dtype {entry.dtype} is not a weight's", where=self.where(name), hint=f"expected {', '.join(FLOATS)}"
            )
        return self._view(name, Plain(entry.dtype), entry.shape, [name])

    def where(self, name: str) -> str:
        """File and stored name of an array, for errors."""
        return f"{self.files.paths[self.extent(name).file]}: {self._stored[name]}"

    def extent(self, name: str) -> Extent:
        file, entry = self._entry(name)
        return Extent(file, entry.offset, entry.length)

    def load(self, view: TensorView, place: Place = _anywhere) -> Matrix:
        """The components of a view, read into memory that `place` gives for a number of bytes."""
        parts = {}
        for component, extent in zip(view.components, view.extents, strict=True):
            raw = place(extent.length)
            self.files.read(extent, raw)
            parts[component.name] = raw.view(STORAGE[component.dtype]).reshape(component.shape)
        return Matrix(view.codec, view.shape, parts, f"{view.path.name}: {view.name}")

    def close(self) -> None:
        self.files.close()

    def _experts(self, layer: int) -> ExpertTable:
        base = self._names.experts.format(layer=layer)
        return find_experts(base, layer, self.has, self.tensor, str(self.path))

    def _name_tensors(
        self, stored: Mapping[str, tuple[int, TensorEntry]], paths: list[Path]
    ) -> tuple[dict[str, int], dict[str, str]]:
        skipped: dict[str, int] = {}
        canonical: dict[str, str] = {}
        for name in stored:
            kind = next((kind for pattern, kind in self._names.skipped if re.search(pattern, name)), None)
            if kind is not None:
                skipped[kind] = skipped.get(kind, 0) + 1
                continue
            other = canonical.setdefault(self._names.canonical(name), name)
            if other != name:
                raise FormatError(f"names the same weight as {other}", where=f"{paths[stored[name][0]]}: {name}")
        return skipped, canonical

    def _entry(self, name: str) -> tuple[int, TensorEntry]:
        try:
            return self._entries[self._stored[name]]
        except KeyError:
            raise MissingTensorError(
                "the checkpoint has no such tensor",
                where=f"{self.path}: {name}",
                hint="is every shard there? Does config.json belong to these files?",
            ) from None

    def _view(self, name: str, codec: Codec, shape: Shape, parts: list[str]) -> TensorView:
        """Check that the stored arrays are what the codec says, and tell where they are."""
        extents = []
        for component, part in zip(codec.components(shape), parts, strict=True):
            _, entry = self._entry(part)
            if (entry.dtype, entry.shape) != (component.dtype, component.shape):
                raise FormatError(
                    f"is {entry.dtype} {list(entry.shape)}, but {codec} of shape {list(shape)} "
                    f"needs {component.dtype} {list(component.shape)}",
                    where=self.where(part),
                )
            extents.append(self.extent(part))
        if prod(shape) == 0:
            raise FormatError(f"shape {list(shape)} is empty", where=self.where(name))
        return TensorView(self._stored[name], codec, shape, tuple(extents), self.files.paths[extents[0].file])

    def _affine(self, name: str, module: str) -> TensorView:
        _, codes = self._entry(name)
        _, scales = self._entry(f"{module}.scales")
        stored = self._stored[name].removesuffix(".weight")
        rule = self.rules.affine_rule((stored, *self._names.stored(module)))
        if rule is None:
            raise FormatError(
                "has scales, but config.json does not say how it is quantised",
                where=self.where(name),
                hint="config.json needs a `quantization` block with bits and group_size",
            )
        if scales.dtype not in FLOATS or not scales.shape:
            raise FormatError(f"scales are {scales.dtype} {list(scales.shape)}", where=self.where(f"{module}.scales"))
        codec = Affine(rule.bits, rule.group, scales.dtype)
        shape = (*codes.shape[:-1], scales.shape[-1] * rule.group)
        return self._view(name, codec, shape, [name, f"{module}.scales", f"{module}.biases"])

    def _fp8(self, name: str) -> TensorView:
        _, codes = self._entry(name)
        if self.rules.fp8_block is None or len(codes.shape) < 2:
            raise FormatError(
                "is float8, but config.json has no fp8 quantization_config with weight_block_size", where=self.where(name)
            )
        scale_name = f"{name}_scale_inv"
        _, scales = self._entry(scale_name)
        codec = BlockFp8(self.rules.fp8_block, scales.dtype if scales.dtype in FLOATS else "F32")
        return self._view(name, codec, codes.shape, [name, scale_name])


def _find_tensors(path: Path) -> tuple[dict[str, tuple[int, TensorEntry]], list[Path]]:
    """Every stored tensor: index of its file, entry. Through the index if there is one."""
    if not os.path.isdir(path):
        raise MissingTensorError("is a file, not a model folder", where=str(path))
    weight_map = _read_index(path / INDEX) if os.path.lexists(path / INDEX) else None
    files = (
        sorted(set(weight_map.values())) if weight_map is not None else sorted(p.name for p in path.glob("*.safetensors"))
    )
    if not files:
        raise MissingTensorError("no weights: there is no .safetensors file", where=str(path))
    tensors: dict[str, tuple[int, TensorEntry]] = {}
    for index, file in enumerate(files):
        if not os.path.exists(path / file):
            raise MissingTensorError("this shard is missing", where=str(path / file), hint="download the model again")
        for name, entry in read_header(path / file).items():
            if weight_map is not None and weight_map.get(name) != file:
                continue
            if name in tensors:
                raise FormatError(f"also stands in {files[tensors[name][0]]}", where=f"{path / file}: {name}")
            tensors[name] = (index, entry)
    for name, file in (weight_map or {}).items():
        if name not in tensors:
            raise MissingTensorError(f"the index promises it, {file} does not have it", where=f"{path / file}: {name}")
    return tensors, [path / file for file in files]


def _read_index(path: Path) -> dict[str, str]:
    weight_map = read_json(path).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise FormatError("has no weight_map", where=str(path))
    for name, file in weight_map.items():
        if not name.isprintable():
            raise FormatError(f"a tensor is named {shown(name)}, which cannot be printed", where=str(path))
        if not _is_shard_name(file):
            raise FormatError(f"{shown(file)} is not the name of a shard", where=f"{path}: {name}")
    return weight_map


def _is_shard_name(file: Any) -> bool:
    """Of a file in the same folder: an index must not lead anywhere else."""
    return (
        isinstance(file, str)
        and file.isprintable()
        and len(file.encode()) <= MAX_NAME_BYTES
        and Path(file).name == file
        and file.endswith(".safetensors")
    )
