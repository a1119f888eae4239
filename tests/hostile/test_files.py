"""Folders and files that are not what they seem: every one is refused by name before any weight is read."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import moeflux
from hostile.broken import (
    INDEX,
    QWEN,
    SHARD,
    config_of,
    copy,
    header_of,
    open_model,
    read_raw,
    read_tensors,
    refused,
    split,
    write_hf,
    write_index,
    write_raw,
    write_tensors,
)
from moeflux import FormatError, MissingTensorError, MoefluxError, ReadError
from moeflux.core.json_file import MAX_JSON_BYTES
from moeflux.formats.safetensors import MAX_HEADER_BYTES
from moeflux.plan.inspect import inspect_model

Open = Callable[[Path], object]

NORM = "model.norm.weight"  # F32 [128]


@pytest.fixture(params=[open_model, inspect_model], ids=["load", "inspect"])
def open_it(request) -> Open:
    """Both ways into a folder."""
    return request.param


@pytest.fixture
def folder(tmp_path) -> Path:
    return copy(QWEN, tmp_path)


def test_unbroken(folder, open_it):
    """The copies that the other tests break are good."""
    open_it(folder)


@pytest.mark.parametrize("n", [2, 5])
def test_unbroken_shards(folder, open_it, n):
    split(folder, n)
    open_it(folder)


@pytest.mark.parametrize("options", [{}, {"fused": True}, {"dtype": "BF16"}, {"dtype": "F16"}, {"fp8": True}], ids=str)
def test_unbroken_hf(tmp_path, open_it, options):
    open_it(write_hf(tmp_path, **options))
    with moeflux.load(tmp_path, backend="numpy") as engine:
        assert engine.score([1, 2, 3]).std() > 0.1


def test_empty_folder(tmp_path, open_it):
    with refused(MissingTensorError, str(tmp_path), "config.json"):
        open_it(tmp_path)


def test_missing_folder(tmp_path, open_it):
    with refused(ReadError, str(tmp_path / "nowhere")):
        open_it(tmp_path / "nowhere")


@pytest.mark.parametrize("name", ["x" * 300, "x/" * 3000, "a\0b"], ids=["long-name", "long-path", "nul"])
def test_impossible_path(tmp_path, open_it, name):
    with pytest.raises(ReadError) as caught:
        open_it(tmp_path / name)
    assert str(tmp_path) in str(caught.value)


def test_no_weights(folder):
    (folder / SHARD).unlink()
    with refused(MissingTensorError, str(folder), ".safetensors"):
        open_model(folder)


def test_shard_instead_of_folder(folder, open_it):
    with refused(FormatError, str(folder / SHARD), "JSON"):
        open_it(folder / SHARD)


def test_config_instead_of_folder(folder):
    with refused(MissingTensorError, str(folder / "config.json"), "not a model folder"):
        open_model(folder / "config.json")


@pytest.mark.parametrize("name", ["config.json", SHARD, INDEX])
def test_directory_instead_of_file(folder, open_it, name):
    (folder / name).unlink(missing_ok=True)
    (folder / name).mkdir()
    with refused(FormatError, str(folder / name), "regular file"):
        open_it(folder)


@pytest.mark.parametrize("name", ["config.json", SHARD, INDEX])
def test_pipe_instead_of_file(folder, open_it, name):
    """Opening a pipe that nobody writes to would wait for ever."""
    (folder / name).unlink(missing_ok=True)
    os.mkfifo(folder / name)
    with refused(FormatError, str(folder / name), "regular file"):
        open_it(folder)


@pytest.mark.parametrize("name", ["config.json", SHARD, INDEX])
def test_endless_device_instead_of_file(folder, open_it, name):
    """Its size is 0 and it can be read for ever."""
    (folder / name).unlink(missing_ok=True)
    (folder / name).symlink_to("/dev/zero")
    with refused(FormatError, str(folder / name), "regular file"):
        open_it(folder)


@pytest.mark.parametrize("target", ["nowhere", SHARD], ids=["dangling", "loop"])
def test_broken_link_to_shard(folder, target):
    (folder / SHARD).unlink()
    (folder / SHARD).symlink_to(target)
    with refused(MissingTensorError, str(folder / SHARD)):
        open_model(folder)


def test_link_to_shard(folder, open_it, tmp_path_factory):
    """The hub's cache keeps links to blobs, so links to files are fine."""
    blob = tmp_path_factory.mktemp("blobs") / "blob"
    (folder / SHARD).rename(blob)
    (folder / SHARD).symlink_to(blob)
    open_it(folder)


CONFIGS = {
    "empty": b"",
    "blank": b"   \n",
    "not-json": b"model_type: qwen3_moe",
    "cut": b'{"model_type": "qwen3_moe"',
    "list": b'["qwen3_moe"]',
    "string": b'"qwen3_moe"',
    "number": b"4",
    "null": b"null",
    "binary": bytes(range(256)),
    "not-utf8": b'{"model_type": "\xff\xfe"}',
    "utf16": '{"model_type": "qwen3_moe"}'.encode("utf-16"),
    "encoded-surrogate": b'{"model_type": "\xed\xa0\x80"}',
    "twice": b'{"model_type": "qwen3_moe", "model_type": "qwen3_next"}',
    "twice-inside": b'{"model_type": "qwen3_moe", "rope_scaling": {"factor": 1, "factor": 2}}',
    "huge-number": b'{"model_type": "qwen3_moe", "hidden_size": ' + b"9" * 5000 + b"}",
    **{f"nested-lists-{n}": b'{"hidden_act": ' + b"[" * n + b"]" * n + b"}" for n in (100, 900, 985, 1000, 100_000)},
    **{f"nested-objects-{n}": b'{"a":' * n + b"1" + b"}" * n for n in (100, 900, 985, 1000, 100_000)},
}


@pytest.mark.parametrize("text", CONFIGS.values(), ids=CONFIGS)
def test_config_is_not_an_object(folder, open_it, text):
    (folder / "config.json").write_bytes(text)
    with refused(FormatError, str(folder / "config.json")):
        open_it(folder)


@pytest.mark.parametrize("name", ["config.json", INDEX])
def test_json_too_large(folder, open_it, name):
    (folder / name).touch()
    os.truncate(folder / name, MAX_JSON_BYTES + 1)
    with refused(FormatError, str(folder / name), str(MAX_JSON_BYTES)):
        open_it(folder)


CUTS = {
    "nothing": lambda header, size: 0,
    "4-bytes": lambda header, size: 4,
    "7-bytes": lambda header, size: 7,
    "length-only": lambda header, size: 8,
    "one-byte-of-header": lambda header, size: 9,
    "half-header": lambda header, size: 8 + header // 2,
    "header-less-one": lambda header, size: 7 + header,
}


@pytest.mark.parametrize("cut", CUTS.values(), ids=CUTS)
def test_cut_inside_header(folder, open_it, cut):
    size = (folder / SHARD).stat().st_size
    header = size - 8 - len(read_raw(folder / SHARD)[1])
    os.truncate(folder / SHARD, cut(header, size))
    with refused(FormatError, str(folder / SHARD)):
        open_it(folder)


@pytest.mark.parametrize("kept", [0.0, 0.001, 0.3, 0.7, 0.999, 1.0], ids=lambda share: f"{share:.1%}")
def test_cut_inside_data(folder, open_it, kept):
    """Names the first tensor that is not whole; the last case lacks one byte."""
    header, data = read_raw(folder / SHARD)
    header.pop("__metadata__")
    left = min(int(len(data) * kept), len(data) - 1)
    ends = sorted((entry["data_offsets"][1], name) for name, entry in header.items())
    first = next(name for end, name in ends if end > left)
    os.truncate(folder / SHARD, (folder / SHARD).stat().st_size - len(data) + left)
    with refused(FormatError, f"{folder / SHARD}: {first}", "cut short"):
        open_it(folder)


@pytest.mark.parametrize("n", [1, 4096])
def test_trailing_bytes(folder, open_it, n):
    with (folder / SHARD).open("ab") as file:
        file.write(bytes(n))
    with refused(FormatError, str(folder / SHARD), f"{n} bytes follow"):
        open_it(folder)


LENGTHS = {
    "zero": lambda size: 0,
    "one": lambda size: 1,
    "size-less-7": lambda size: size - 7,
    "size-plus-1": lambda size: size + 1,
    "2^31": lambda size: 2**31,
    "2^63": lambda size: 2**63,
    "2^64-1": lambda size: 2**64 - 1,
}


@pytest.mark.parametrize("length", LENGTHS.values(), ids=LENGTHS)
def test_header_lies_about_its_length(folder, open_it, length):
    header, data = read_raw(folder / SHARD)
    size = (folder / SHARD).stat().st_size
    write_raw(folder / SHARD, header, data, length(size))
    with refused(FormatError, str(folder / SHARD)):
        open_it(folder)


@pytest.mark.parametrize("by", [-1, 1], ids=["less", "more"])
def test_header_length_off_by_one(folder, open_it, by):
    header, data = read_raw(folder / SHARD)
    write_raw(folder / SHARD, header, data, len(json.dumps(header)) + by)
    with refused(FormatError, str(folder / SHARD)):
        open_it(folder)


def test_header_beyond_the_limit(folder, open_it):
    """A sparse file can be large enough to hold any header for free."""
    write_raw(folder / SHARD, b"{}", b"", MAX_HEADER_BYTES + 1)
    os.truncate(folder / SHARD, MAX_HEADER_BYTES + 4096)
    with refused(FormatError, str(folder / SHARD), str(MAX_HEADER_BYTES + 1)):
        open_it(folder)


ENTRY = {"dtype": "F32", "shape": [1], "data_offsets": [0, 4]}
HEADERS = {
    "empty": b"",
    "blank": b"     ",
    "not-json": b"dtype=F32",
    "cut": b'{"a": {"dtype"',
    "list": b"[]",
    "null": b"null",
    "nul-bytes": bytes(64),
    "not-utf8": b'{"\xff": 1}',
    "utf16": json.dumps({"a": ENTRY}).encode("utf-16"),
    "bom": b"\xef\xbb\xbf" + json.dumps({"a": ENTRY}).encode(),
    "tensor-twice": f'{{"a": {json.dumps(ENTRY)}, "a": {json.dumps(ENTRY)}}}'.encode(),
    "key-twice": b'{"a": {"dtype": "F32", "dtype": "F32", "shape": [1], "data_offsets": [0, 4]}}',
    "nested-lists": b'{"a": ' + b"[" * 50_000 + b"]" * 50_000 + b"}",
    "nested-shape": b'{"a": {"dtype": "F32", "data_offsets": [0, 4], "shape": ' + b"[" * 980 + b"]" * 980 + b"}}",
    "huge-number": b'{"a": {"dtype": "F32", "shape": [' + b"1" * 5000 + b'], "data_offsets": [0, 4]}}',
}


@pytest.mark.parametrize("text", HEADERS.values(), ids=HEADERS)
def test_header_is_not_an_object(folder, open_it, text):
    write_raw(folder / SHARD, text, bytes(4))
    with refused(FormatError, str(folder / SHARD)):
        open_it(folder)


@pytest.mark.parametrize("name", ["a\nb", "\x1b[2J", "\ud800", "\u202e"], ids=["newline", "escape", "surrogate", "reversal"])
def test_unprintable_name(folder, open_it, name):
    """Names are printed in errors, so one must not be able to break or rewrite a terminal."""
    write_raw(folder / SHARD, {name: ENTRY}, bytes(4))
    with refused(FormatError, str(folder / SHARD), repr(name)):
        open_it(folder)


@pytest.mark.parametrize("entry", [None, 1, "F32", [], True], ids=repr)
def test_entry_is_not_an_object(folder, open_it, entry):
    with header_of(folder) as header:
        header[NORM] = entry
    with refused(FormatError, f"{folder / SHARD}: {NORM}"):
        open_it(folder)


FIELDS: dict[str, tuple[str, Any]] = {
    "dtype-unknown": ("dtype", "F4"),
    "dtype-lower": ("dtype", "f32"),
    "dtype-null": ("dtype", None),
    "dtype-missing": ("dtype", ...),
    "dtype-number": ("dtype", 32),
    "dtype-list": ("dtype", ["F32"]),
    "dtype-long": ("dtype", "F" * 100_000),
    "dtype-wider": ("dtype", "F64"),
    "dtype-narrower": ("dtype", "BF16"),
    "shape-missing": ("shape", ...),
    "shape-null": ("shape", None),
    "shape-number": ("shape", 128),
    "shape-string": ("shape", "128"),
    "shape-object": ("shape", {"0": 128}),
    "shape-negative": ("shape", [-128]),
    "shape-two-negatives": ("shape", [-1, -128]),
    "shape-float": ("shape", [128.0]),
    "shape-bool": ("shape", [True, 128]),
    "shape-of-strings": ("shape", ["128"]),
    "shape-nested": ("shape", [[128]]),
    "shape-nan": ("shape", [float("nan")]),
    "shape-infinite": ("shape", [float("inf")]),
    "shape-2^63": ("shape", [2**63]),
    "shape-2^64": ("shape", [2**64 + 128]),
    "shape-4000-digits": ("shape", [10**4000]),
    "shape-product-2^64": ("shape", [2**62, 4]),
    "shape-product-wraps": ("shape", [2**32, 2**32, 128]),  # 128 mod 2^64
    "shape-product-2^80": ("shape", [2**40, 2**40]),
    "shape-zero-times-huge": ("shape", [0, 2**40]),
    "shape-rank-too-high": ("shape", [1] * 9 + [128]),
    "shape-rank-1e5": ("shape", [1] * 100_000),
    "shape-too-small": ("shape", [127]),
    "shape-too-large": ("shape", [129]),
    "shape-scalar": ("shape", []),
    "offsets-missing": ("data_offsets", ...),
    "offsets-null": ("data_offsets", None),
    "offsets-empty": ("data_offsets", []),
    "offsets-one": ("data_offsets", [0]),
    "offsets-three": ("data_offsets", [0, 256, 512]),
    "offsets-reversed": ("data_offsets", [512, 0]),
    "offsets-negative": ("data_offsets", [-512, 0]),
    "offsets-float": ("data_offsets", [0.0, 512.0]),
    "offsets-bool": ("data_offsets", [False, True]),
    "offsets-strings": ("data_offsets", ["0", "512"]),
    "offsets-too-short": ("data_offsets", [0, 511]),
    "offsets-beyond-end": ("data_offsets", [2**30, 2**30 + 512]),
    "offsets-2^63": ("data_offsets", [2**63, 2**63 + 512]),
    "offsets-wrap": ("data_offsets", [2**64 - 256, 2**64 + 256]),
    "offsets-4300-digits": ("data_offsets", [10**4300 - 600, 10**4300 - 88]),  # one more digit cannot be printed
}


@pytest.mark.parametrize(("field", "value"), FIELDS.values(), ids=FIELDS)
def test_entry_lies(folder, open_it, field, value):
    with header_of(folder) as header:
        header[NORM] = {key: v for key, v in {**header[NORM], field: value}.items() if v is not ...}
    with refused(FormatError, f"{folder / SHARD}: {NORM}"):
        open_it(folder)


def test_empty_tensor_far_away(folder, open_it):
    """Nothing to read, so only its offset can be wrong; one digit more than Python prints."""
    with header_of(folder) as header:
        header["empty"] = {"dtype": "F32", "shape": [0], "data_offsets": [10**4300 - 1] * 2}
    with refused(FormatError, f"{folder / SHARD}: empty"):
        open_it(folder)


def test_overlap(folder, open_it):
    with header_of(folder) as header:
        header["model.twin.weight"] = header[NORM]
    with refused(FormatError, f"{folder / SHARD}: model.twin.weight: overlaps {NORM}"):
        open_it(folder)


def test_partial_overlap(folder, open_it):
    with header_of(folder) as header:
        header[NORM]["data_offsets"] = [n - 4 for n in header[NORM]["data_offsets"]]
    with refused(FormatError, f"{folder / SHARD}: {NORM}", "overlaps"):
        open_it(folder)


def test_tensor_over_header(folder, open_it):
    """Offsets count from the end of the header, so only a negative one could reach into it."""
    with header_of(folder) as header:
        header[NORM]["data_offsets"] = [-8, 504]
    with refused(FormatError, f"{folder / SHARD}: {NORM}", "data_offsets"):
        open_it(folder)


def test_hole(folder, open_it):
    with header_of(folder) as header:
        end = header.pop(NORM)["data_offsets"][1]
        after = next(name for name, entry in header.items() if entry.get("data_offsets", [None])[0] == end)
    with refused(FormatError, f"{folder / SHARD}: {after}", "leaves 512 unused bytes"):
        open_it(folder)


def test_hole_at_the_end(folder, open_it):
    header, data = read_raw(folder / SHARD)
    last = max(header, key=lambda name: header[name].get("data_offsets", [0])[-1])
    del header[last]
    write_raw(folder / SHARD, header, data)
    with refused(FormatError, str(folder / SHARD), "bytes follow the last tensor"):
        open_it(folder)


def test_empty_header(folder, open_it):
    """A correct file that holds nothing."""
    write_raw(folder / SHARD, {}, b"")
    with refused(MissingTensorError, str(folder), "model.embed_tokens.weight"):
        open_it(folder)


def test_unaligned_data(folder, open_it):
    """Legal, if unusual: a header of odd length puts every tensor at an odd address."""
    header, data = read_raw(folder / SHARD)
    text = json.dumps(header).encode()
    write_raw(folder / SHARD, text + b" " * (1 + len(text) % 2), data)
    open_it(folder)
    good = copy(QWEN, folder / "good")
    for backend in ("numpy", "native"):
        with moeflux.load(folder, backend=backend) as engine, moeflux.load(good, backend=backend) as other:
            assert (engine.score([5, 6, 7]) == other.score([5, 6, 7])).all()


def test_tensor_in_two_shards(folder, open_it):
    write_tensors(folder / "other.safetensors", {NORM: read_tensors(folder / SHARD)[NORM]})
    with refused(FormatError, str(folder), SHARD, "other.safetensors", NORM):
        open_it(folder)


def test_index_chooses_between_shards(folder, open_it):
    """Where an index says which of the two is meant, the other one is not read."""
    tensors = read_tensors(folder / SHARD)
    write_index(folder, {"weight_map": dict.fromkeys(tensors, SHARD)})
    write_tensors(folder / "other.safetensors", {NORM: tensors[NORM]})
    open_it(folder)


def test_two_names_of_one_weight(tmp_path, open_it):
    copy("qwen3_5_moe_vl_fused-4bit-f32", tmp_path)
    stored, also = "language_model.model.norm.weight", "model.language_model.norm.weight"
    tensors = read_tensors(tmp_path / SHARD)
    tensors[also] = tensors[stored]
    write_tensors(tmp_path / SHARD, tensors)
    with refused(FormatError, str(tmp_path / SHARD), stored, also):
        open_it(tmp_path)


@pytest.mark.parametrize("which", [0, 1], ids=["first", "last"])
def test_missing_shard(folder, open_it, which):
    shard = sorted(set(split(folder).values()))[which]
    (folder / shard).unlink()
    with refused(MissingTensorError, str(folder / shard)):
        open_it(folder)


def test_broken_second_shard(folder, open_it):
    shard = max(split(folder).values())
    os.truncate(folder / shard, (folder / shard).stat().st_size - 1)
    with refused(FormatError, str(folder / shard)):
        open_it(folder)


def test_index_promises_too_much(folder, open_it):
    weight_map = split(folder)
    shard = weight_map[NORM]
    write_index(folder, {"weight_map": {**weight_map, "model.extra.weight": shard}})
    with refused(MissingTensorError, f"{folder / shard}: model.extra.weight"):
        open_it(folder)


def test_index_names_the_wrong_shard(folder, open_it):
    weight_map = split(folder)
    other = next(shard for shard in weight_map.values() if shard != weight_map[NORM])
    write_index(folder, {"weight_map": {**weight_map, NORM: other}})
    with refused(MissingTensorError, f"{folder / other}: {NORM}"):
        open_it(folder)


def test_index_forgets_a_tensor(folder, open_it):
    """The index is what the checkpoint is, so a tensor that only a shard knows of is not there."""
    weight_map = split(folder)
    del weight_map[NORM]
    write_index(folder, {"weight_map": weight_map})
    with refused(MissingTensorError, str(folder), NORM):
        open_it(folder)


SHARD_NAMES = {
    "parent": "../x.safetensors",
    "absolute": "/etc/passwd",
    "absolute-shard": "/tmp/x.safetensors",
    "folder": "sub/x.safetensors",
    "dot": "./x.safetensors",
    "trailing-slash": "x.safetensors/",
    "dots": "..",
    "empty": "",
    "other-suffix": "x.bin",
    "pickle": "pytorch_model.pt",
    "null": None,
    "number": 1,
    "list": ["x.safetensors"],
    "object": {},
}


@pytest.mark.parametrize("shard", SHARD_NAMES.values(), ids=SHARD_NAMES)
def test_index_leads_astray(folder, open_it, shard):
    """Even where the file it leads to exists."""
    copy(QWEN, folder / "sub")
    (folder / "sub" / SHARD).rename(folder / "sub" / "x.safetensors")
    weight_map: dict[str, Any] = split(folder)
    write_index(folder, {"weight_map": {**weight_map, NORM: shard}})
    with refused(FormatError, f"{folder / INDEX}: {NORM}", repr(shard)):
        open_it(folder)


@pytest.mark.parametrize(
    "shard", ["x" * 300 + ".safetensors", "a\0.safetensors", "\ud800.safetensors"], ids=["long", "nul", "surrogate"]
)
def test_impossible_shard_name(folder, open_it, shard):
    weight_map = split(folder)
    write_index(folder, {"weight_map": {**weight_map, NORM: shard}})
    with refused(FormatError, f"{folder / INDEX}: {NORM}"):
        open_it(folder)


@pytest.mark.parametrize("name", ["a\nb", "\ud800"], ids=["newline", "surrogate"])
def test_unprintable_name_in_index(folder, open_it, name):
    weight_map = split(folder)
    write_index(folder, {"weight_map": {**weight_map, name: weight_map[NORM]}})
    with refused(FormatError, str(folder / INDEX), repr(name)):
        open_it(folder)


INDEXES: dict[str, Any] = {
    "no-weight-map": {"metadata": {}},
    "empty": {},
    "map-null": {"weight_map": None},
    "map-list": {"weight_map": [[NORM, SHARD]]},
    "map-string": {"weight_map": SHARD},
    "map-empty": {"weight_map": {}},
    "list": [NORM],
    "string": "weight_map",
}


@pytest.mark.parametrize("index", INDEXES.values(), ids=INDEXES)
def test_index_is_not_a_map(folder, open_it, index):
    write_index(folder, index)
    with refused(FormatError, str(folder / INDEX)):
        open_it(folder)


@pytest.mark.parametrize("text", [b"", b"{", b'{"weight_map": {"a": "b", "a": "c"}}'], ids=["empty", "cut", "twice"])
def test_index_is_not_json(folder, open_it, text):
    (folder / INDEX).write_bytes(text)
    with refused(FormatError, str(folder / INDEX)):
        open_it(folder)


def test_failed_opening_leaves_no_file_open(folder):
    with config_of(folder) as config:
        config["vocab_size"] = 1000
    before = len(os.listdir("/proc/self/fd"))
    for _ in range(3):
        with pytest.raises(MoefluxError):
            open_model(folder)
    assert len(os.listdir("/proc/self/fd")) == before
