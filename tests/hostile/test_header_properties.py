"""Whatever stands in a header or a config: it is read exactly or refused with a typed error, soon and cheaply."""

from __future__ import annotations

import json
import struct
import tracemalloc
from collections.abc import Callable
from contextlib import suppress
from copy import deepcopy
from math import prod
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hostile.broken import (
    DATA,
    DEEPSEEK,
    MAX_BYTES,
    QWEN,
    QWEN35,
    QWEN_NEXT,
    SHARD,
    Stored,
    layout,
    open_model,
    write_hf,
    write_raw,
)
from moeflux import ConfigError, FormatError, MoefluxError
from moeflux.backends.rope import frequencies, mla_scale, rotation_scale
from moeflux.core.names import TensorNames
from moeflux.formats.checkpoint import Checkpoint
from moeflux.formats.dtypes import STORAGE
from moeflux.formats.files import Extent, FileSet
from moeflux.formats.quant_rules import read_quant_rules
from moeflux.formats.safetensors import read_header
from moeflux.models.registry import read_spec
from moeflux.models.spec import Attention, Mla, ModelSpec
from moeflux.plan.sizes import predict

SLOW = settings(deadline=2000, max_examples=100)
NAMES = TensorNames(prefixes=(), skipped=(), experts="model.layers.{layer}.mlp")


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    """One folder for all examples of a test: each writes its file anew."""
    return tmp_path_factory.mktemp("headers")


def tolerant(run: Callable[[], Any]) -> MoefluxError | None:
    """Anything but success or a typed error, or a large allocation, fails the test."""
    tracemalloc.start()
    try:
        run()
    except MoefluxError as error:
        str(error).encode()
        return error
    finally:
        peak = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
        assert peak < MAX_BYTES
    return None


sizes = st.integers(0, 6) | st.sampled_from([-1, 2**31, 2**32, 2**40, 2**62, 2**63, 2**64, 10**4299, 10**4300 - 1])
json_values = st.recursive(
    st.none() | st.booleans() | sizes | st.floats() | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=4), inner, max_size=4),
    max_leaves=8,
)
dtypes = st.sampled_from([*STORAGE, "F4", "", None]) | json_values
entries = (
    st.fixed_dictionaries(
        {
            "dtype": dtypes,
            "shape": st.lists(sizes, max_size=10) | json_values,
            "data_offsets": st.lists(sizes, min_size=2, max_size=2) | json_values,
        }
    )
    | json_values
)
names = st.text(st.characters(codec=None), max_size=6) | st.sampled_from(["__metadata__", "model.norm.weight"])
headers = st.dictionaries(names, entries, max_size=5) | json_values


@SLOW
@given(header=headers, data=st.binary(max_size=64), length=st.none() | st.integers(0, 2**64 - 1))
def test_any_json_header(folder, header, data, length):
    write_raw(folder / SHARD, header if isinstance(header, dict) else json.dumps(header).encode(), data, length)
    error = tolerant(lambda: read_header(folder / SHARD))
    assert error is None or (isinstance(error, FormatError) and str(folder / SHARD) in str(error))


@SLOW
@given(text=st.binary(max_size=200), data=st.binary(max_size=16))
def test_any_bytes_as_header(folder, text, data):
    write_raw(folder / SHARD, text, data)
    error = tolerant(lambda: read_header(folder / SHARD))
    assert error is None or (isinstance(error, FormatError) and str(folder / SHARD) in str(error))


@SLOW
@given(blob=st.binary(max_size=64))
def test_any_bytes_as_file(folder, blob):
    (folder / SHARD).write_bytes(blob)
    error = tolerant(lambda: read_header(folder / SHARD))
    assert error is None or str(folder / SHARD) in str(error)


@st.composite
def tensors(draw: st.DrawFn) -> dict[str, Stored]:
    """What a correct writer could be asked to write, empty tensors and scalars included."""
    printable = st.text(st.characters(codec="utf-8", exclude_categories=["C", "Z"]), max_size=12)
    result: dict[str, Stored] = {}
    for name in draw(st.lists(printable.filter(lambda name: name != "__metadata__"), max_size=6, unique=True)):
        dtype = draw(st.sampled_from(list(STORAGE)))
        shape = draw(st.lists(st.integers(0, 4), max_size=4))
        n = prod(shape) * STORAGE[dtype].itemsize
        result[name] = Stored(dtype, shape, draw(st.binary(min_size=n, max_size=n)))
    return result


@SLOW
@given(tensors=tensors(), padding=st.integers(0, 9), metadata=st.none() | st.just({"format": "pt"}), order=st.randoms())
def test_correct_header_is_read_exactly(folder, tensors, padding, metadata, order):
    """The header may name the tensors in any order, and need not end at a multiple of anything."""
    header, data = layout(tensors)
    named = list(header.items())
    order.shuffle(named)
    header = {"__metadata__": metadata, **dict(named)} if metadata else dict(named)
    text = json.dumps(header).encode() + b" " * padding
    write_raw(folder / SHARD, text, data)
    read = read_header(folder / SHARD)
    assert set(read) == set(tensors)
    files = FileSet([folder / SHARD])
    try:
        for name, tensor in tensors.items():
            entry = read[name]
            assert (entry.dtype, list(entry.shape)) == (tensor.dtype, tensor.shape)
            assert (entry.offset, entry.length) == (8 + len(text) + header[name]["data_offsets"][0], len(tensor.data))
            extent, into = Extent(0, entry.offset, entry.length), np.zeros(entry.length, dtype=np.uint8)
            files.read(extent, into)
            assert into.tobytes() == tensor.data
    finally:
        files.close()


@st.composite
def damages(draw: st.DrawFn) -> Callable[[bytes], bytes]:
    """A way to damage a file, mostly within its header."""
    kind = draw(st.sampled_from(["flip", "cut", "insert", "delete", "length", "swap"]))
    at, n = draw(st.floats(0, 1)), draw(st.integers(1, 16))
    fresh = draw(st.binary(min_size=n, max_size=n) | st.sampled_from([b"9" * n, b"[" * n, b"-", b"null", b'"', b"1e999"]))

    def damage(blob: bytes) -> bytes:
        (length,) = struct.unpack("<Q", blob[:8])
        i = int(at * (length + 64)) % max(len(blob), 1)
        match kind:
            case "flip":
                return blob[:i] + fresh + blob[i + len(fresh) :]
            case "cut":
                return blob[: int(at * len(blob))]
            case "insert":
                return blob[:i] + fresh + blob[i:]
            case "delete":
                return blob[:i] + blob[i + n :]
            case "length":
                return struct.pack("<Q", (length + (n - 8 if at < 0.5 else 1 << 4 * n)) % 2**64) + blob[8:]
        return blob[:8] + blob[8 : 8 + length].replace(b"[", b"]", n) + blob[8 + length :]

    return damage


@pytest.fixture(scope="module")
def small(tmp_path_factory) -> Path:
    """A correct model and, beside it, a folder for damaged copies of it."""
    folder = tmp_path_factory.mktemp("damaged")
    write_hf(folder / "good", fp8=True)
    write_hf(folder / "bad", fp8=True)
    return folder


@SLOW
@given(damage=damages())
def test_damaged_file(small, damage):
    path = small / "bad" / SHARD
    path.write_bytes(damage((small / "good" / SHARD).read_bytes()))
    error = tolerant(lambda: open_model(small / "bad"))
    assert error is None or str(small / "bad") in str(error) or SHARD in str(error)


@SLOW
@given(damage=damages())
def test_damaged_file_without_model(small, damage):
    """The same below the model: every tensor of the checkpoint is looked at for itself."""
    path = small / "bad" / SHARD
    path.write_bytes(damage((small / "good" / SHARD).read_bytes()))

    def look() -> None:
        checkpoint = Checkpoint(small / "bad", NAMES)
        try:
            for name in checkpoint.names:
                with suppress(MoefluxError):
                    checkpoint.load(checkpoint.tensor(name))
            for layer in range(3):
                with suppress(MoefluxError):
                    checkpoint.experts(layer)
        finally:
            checkpoint.close()

    error = tolerant(look)
    assert error is None or str(path) in str(error)


CONFIGS = [json.loads((DATA / case / "config.json").read_text()) for case in (QWEN, QWEN_NEXT, QWEN35, DEEPSEEK)]
numbers = st.sampled_from([0, 1, 2, 3, 31, 128, 2**14, 2**24, 2**31, 2**63, 10**400, -1, 0.25, 1e-300, 1e15, 1e308, 5e-324])
words = st.sampled_from(["default", "yarn", "linear", "mrope", "fp8", "affine", "e4m3", "full_attention", "float16", "silu"])
field_values = numbers | words | json_values


def places(value: Any, path: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    """Every place in a config, from the outside in."""
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    return [path] + [place for key, inner in items for place in places(inner, (*path, key))]


@st.composite
def configs(draw: st.DrawFn) -> dict[str, Any]:
    """A config with a few of its values replaced, removed or moved."""
    config: Any = deepcopy(draw(st.sampled_from(CONFIGS)))
    for _ in range(draw(st.integers(1, 3))):
        *parents, last = draw(st.sampled_from(places(config)[1:]))
        holder = config
        for key in parents:
            holder = holder[key]
        if draw(st.booleans()):
            holder[last] = draw(field_values)
        elif isinstance(holder, dict):
            value = holder.pop(last)
            if draw(st.booleans()):
                holder[draw(st.sampled_from(["rope_scaling", "quantization_config", "layer_types", "head_dim", "type"]))] = (
                    value
                )
        if not config:
            break
    return dict(config)


def use(spec: ModelSpec, config: dict[str, Any]) -> None:
    """What passed must also hold in the arithmetic that the config alone feeds."""
    predict(spec, read_quant_rules(config))
    for mixer in {layer.mixer for layer in spec.layers}:
        if isinstance(mixer, Attention | Mla):
            assert np.isfinite(frequencies(mixer.rope)).all()
            assert np.isfinite(rotation_scale(mixer.rope))
        if isinstance(mixer, Mla):
            assert np.isfinite(mla_scale(mixer))


@settings(SLOW, max_examples=300)
@given(config=configs())
def test_any_config(config):
    error = tolerant(lambda: use(read_spec(config), config))
    assert error is None or (isinstance(error, ConfigError) and "config.json" in str(error))


@SLOW
@given(
    config=st.dictionaries(st.text(max_size=8), json_values, max_size=6),
    model_type=st.sampled_from(["qwen3_moe", "kimi_k2"]),
)
def test_any_object_as_config(config, model_type):
    error = tolerant(lambda: read_spec({**config, "model_type": model_type}))
    assert isinstance(error, ConfigError)
