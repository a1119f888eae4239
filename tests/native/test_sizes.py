"""Sizes as files and configs say them: what kernels cannot take is refused by name before a kernel sees it."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

import moeflux
import moeflux._native as _native
from moeflux.backends.native.ops import NativeOps, available_isas
from moeflux.bench.synthetic import write_checkpoint
from moeflux.core.errors import FormatError, InputError
from moeflux.formats.quant import Matrix, Plain
from store.synthetic import CODECS, make_experts
from unit.test_synthetic import QWEN

MOST = 32768  # kMaxCols of native/types.h


@pytest.mark.parametrize("codec", CODECS)
def test_experts_with_more_columns_than_a_thread_unpacks(tmp_path, codec):
    """gate and up are as wide as the model, down as wide as an expert."""
    cols = MOST + 64
    for hidden, width, name in ((cols, 32, "gate"), (32, cols, "down")):
        folder = tmp_path / name
        folder.mkdir()
        experts = make_experts(
            folder, codec=CODECS[codec], hidden=hidden, width=width, n_experts=1, n_layers=1, first_layer=3
        )
        with pytest.raises(FormatError, match=rf"layer 3, {name}: has {cols} columns; kernels take 1 to {MOST}"):
            experts.open(n_slots=1)


def test_a_checkpoint_with_such_experts_is_refused_when_it_is_loaded(tmp_path):
    write_checkpoint(
        QWEN | {"moe_intermediate_size": MOST + 64, "num_experts": 2, "num_hidden_layers": 1}, tmp_path / "model"
    )
    with pytest.raises(FormatError, match=rf"layer 0, down: has {MOST + 64} columns"):
        moeflux.load(tmp_path / "model")


def test_wide_experts_at_the_limit_run(tmp_path):
    few = {"moe_intermediate_size": MOST, "num_experts": 2, "num_hidden_layers": 1}
    write_checkpoint(QWEN | few | {"quantization": {"group_size": 32, "bits": 3}}, tmp_path / "model")
    with moeflux.load(tmp_path / "model") as engine, moeflux.load(tmp_path / "model", backend="numpy") as reference:
        np.testing.assert_allclose(engine.score([1, 2, 3]), reference.score([1, 2, 3]), atol=0.2)


def native_layer(**changes) -> _native.ExpertLayer:
    """One layer of two experts in three plain components, with something wrong."""
    n_experts = changes.get("n_experts", 2)
    layer = _native.ExpertLayer(n_experts)
    ids = np.zeros(n_experts, np.int64)
    for name in ("gate", "up", "down"):
        layer.component(
            name,
            "weight",
            "F32",
            changes.get("bytes", 8 * 8 * 4),
            ids + changes.get("file", 0),
            ids + changes.get("offset", 0),
        )
    shape = {"rows": 8, "cols": 8, "codec": "plain", "dtype": "F32", "bits": 0, "group": 0, "block": 0}
    for i, name in enumerate(("gate", "up", "down")):
        values = shape | {key: value for key, value in changes.items() if key in shape and name == "up"}
        places = [(i, changes.get("at", 0)), changes.get("scales", (-1, 0)), (-1, 0)]
        layer.matrix(name, *values.values(), *places)
    return layer


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({"rows": 0}, "layer 0, up: has 0 rows"),
        ({"rows": 2**40}, f"layer 0, up: has {2**40} rows"),
        ({"cols": -8}, "has -8 columns"),
        ({"rows": 9}, r"layer 0, up: weight needs 288 bytes from 0 on, its component has 256"),
        ({"rows": 4}, r"gate \[8, 8\], up \[4, 8\] and down \[8, 8\] do not fit together"),
        ({"codec": "affine", "bits": 7, "group": 32}, "has 7 bits"),
        ({"codec": "affine", "bits": 4, "group": 48}, "has groups of 48"),
        ({"codec": "affine", "bits": 4, "group": 32}, "has 8 columns, not whole groups of 32"),
        ({"codec": "fp8", "block": 0}, "has blocks of 0"),
        ({"codec": "fp8", "block": 4}, "has no scales"),
        ({"codec": "fp8", "block": 4, "scales": (9, 0)}, "has no scales"),
        ({"at": -4}, "weight needs 256 bytes from -4 on"),
        ({"file": 1}, "gate.weight: an extent of 256 bytes at 0 of file 1; there are 1 files"),
        ({"file": 2**40}, "of file -1"),
        ({"offset": 2**63 - 300}, "an extent of 256 bytes at"),
        ({"bytes": 0}, "gate.weight: has 0 bytes"),
        ({"n_experts": 40_000}, "40000 experts; at most 32767"),
    ],
    ids=str,
)
def test_a_layer_of_experts_that_cannot_be(tmp_path, changes, text):
    (tmp_path / "file").write_bytes(bytes(4096))
    with pytest.raises(FormatError, match=text):
        _native.open_store([str(tmp_path / "file")], [native_layer(**changes)], 2, 0, "lru", False, 1, 1)


def test_a_layer_of_experts_that_can_be(tmp_path):
    (tmp_path / "file").write_bytes(bytes(4096))
    _native.open_store([str(tmp_path / "file")], [native_layer()], 2, 0, "lru", False, 1, 1).close()


@pytest.mark.parametrize(("rows", "cols"), [(0, 8), (8, 0), (1, MOST + 1), (2**40, 1), (-1, 8)])
def test_a_matrix_that_cannot_be(rows, cols):
    with pytest.raises(FormatError, match=r"rows|columns"):
        _native.plain_matrix(rows, cols, "F32", np.zeros(0, np.uint8))
    with pytest.raises(FormatError, match=r"rows|columns"):
        _native.fp8_matrix(rows, cols, 128, "F32", np.zeros(0, np.uint8), np.zeros(0, np.uint8))
    with pytest.raises(FormatError, match=r"rows|columns"):
        _native.affine_matrix(rows, cols, 4, 32, "F32", *[np.zeros(0, np.uint8)] * 3)


def test_a_matrix_says_where_it_came_from():
    wide = Matrix(
        Plain("F32"), (1, MOST + 1), {"weight": np.zeros((1, MOST + 1), np.float32)}, "model.safetensors: a.weight"
    )
    with pytest.raises(FormatError, match=rf"model.safetensors: a.weight: has {MOST + 1} columns"):
        NativeOps(1).load_matrix(wide)


# What a layer may have wrong: what is set instead, and what is said.
WRONG = [
    ({"heads": 3}, "3 heads cannot share 2 key-value heads"),
    ({"heads": 8}, r"q_proj is \[32, 32\], needs \[64, 32\]"),
    ({"dim": 0}, "head size is 0"),
    ({"frequencies": 5}, "rotates 10 of the 8 elements of a head"),
    ({"q_norm": 7}, "q_norm has 7 numbers, needs 8"),
    ({"mixer_norm": 31}, "mixer_norm has 31 numbers, needs 32"),
    ({"experts": 5}, r"router is \[4, 32\], needs \[5, 32\]"),
    ({"k": 5}, "experts per token is 5, not 1 to 4"),
    ({"k": 0}, "experts per token is 0"),
    ({"groups": 3, "sigmoid": True}, "4 experts are not 3 equal groups"),
    ({"sigmoid": True}, "router_bias has 0 numbers, needs 4"),
]


def attention_layer(**changes) -> _native.Layer:
    layer = _native.Layer()
    layer.common(32, 1e-6)
    for role, rows, cols in (
        ("q_proj", 32, 32),
        ("k_proj", 16, 32),
        ("v_proj", 16, 32),
        ("o_proj", 32, 32),
        ("router", 4, 32),
    ):
        layer.matrix(role, _native.plain_matrix(rows, cols, "F32", np.zeros(rows * cols * 4, np.uint8)))
    for role, n in (("mixer_norm", 32), ("ffn_norm", 32), ("q_norm", 8), ("k_norm", 8)):
        layer.vector(role, np.ones(changes.get(role, n), np.float32))
    rotation = _native.Rotation([1.0] * changes.get("frequencies", 4), 1.0, False)
    layer.attention(changes.get("heads", 4), 2, changes.get("dim", 8), False, rotation)
    layer.routing(
        changes.get("sigmoid", False), changes.get("experts", 4), changes.get("k", 2), changes.get("groups", 1), 1, True, 1.0
    )
    return layer


@pytest.mark.parametrize(("changes", "text"), WRONG, ids=str)
def test_a_layer_whose_sizes_do_not_fit(changes, text):
    with pytest.raises(FormatError, match=f"layer 7: .*{text}"):
        attention_layer(**changes).check("layer 7")


def test_a_layer_whose_sizes_fit():
    attention_layer().check("layer 7")
    with pytest.raises(FormatError, match="no place for q_prj"):
        attention_layer().vector("q_prj", np.ones(4, np.float32))


def test_a_convolution_that_is_too_wide():
    layer = attention_layer()
    layer.delta(2, 4, 8, 8, 65)
    with pytest.raises(FormatError, match="width of the convolution is 65, not 1 to 64"):
        layer.check("layer 7")


def test_experts_that_are_not_the_routers(mlx):
    """A stream over the experts of another model."""
    with moeflux.load(mlx("qwen3_moe-4bit-f32")) as one, moeflux.load(mlx("deepseek_v3-4bit-f32")) as two:
        ops, layers = one.model.ops, [layer.fused for layer in one.model.trunk.layers]
        x, stream = np.zeros((1, one.spec.hidden), np.float32), ops.open_stream(two.model.experts.store.native, "both", 2)
        states = [[(0, 1, 0, *[np.zeros(1, np.uint64)] * 2, 2, True)]] * len(layers)
        with pytest.raises(FormatError, match=r"layer 0: its router chooses from \d+ experts"):
            ops._machine.run_layers(layers, x, states, stream)
        with pytest.raises(InputError, match="another machine"):
            two.model.ops._machine.run_layers(layers, x, states, stream)


# As many kinds of activations as there are, in one layer: floats, nibbles, and groups of 32, 64 and 128.
KINDS = {
    "switch_mlp.gate_proj": {"group_size": 64, "bits": 4},
    "switch_mlp.up_proj": {"group_size": 32, "bits": 4},
    "shared_expert.gate_proj": {"group_size": 128, "bits": 4},
    "shared_expert.up_proj": {"group_size": 64, "bits": 8},
    "shared_expert_gate": False,
}


def test_five_kinds_of_activations_in_one_layer(tmp_path):
    rules = {f"model.layers.{i}.mlp.{name}": rule for i in range(4) for name, rule in KINDS.items()}
    write_checkpoint(QWEN | {"quantization": {"group_size": 64, "bits": 4, **rules}}, tmp_path / "model")
    tokens = list(range(0, 300, 11))
    with moeflux.load(tmp_path / "model", backend="numpy") as engine:
        expected = engine.score(tokens)
    for isa in available_isas():
        with moeflux.load(tmp_path / "model", isa=isa, slots=6) as engine:
            logits = engine.score(tokens)
            np.testing.assert_allclose(logits, expected, atol=0.1 * np.abs(expected).max())
            assert (logits.argmax(-1) == expected.argmax(-1)).mean() > 0.9


STALE = """
import resource
import numpy as np
from backends.test_linear import random_matrix
from moeflux.backends.native.ops import NativeOps
from moeflux.formats.quant import Affine, Plain
from pathlib import Path

ops = NativeOps(2)
codecs = {"a": Plain("F32"), "b": Affine(4, 32, "BF16")}
weights = {name: ops.load_matrix(random_matrix(codec, 64, 2048)) for name, codec in codecs.items()}
many, one = np.ones((40_000, 2048), np.float32), np.random.default_rng(0).standard_normal((3, 2048), dtype=np.float32)
outputs = tuple(np.zeros((len(many), 64), np.float32) for _ in weights)
pages = int(Path("/proc/self/statm").read_text().split()[0])
limits = resource.getrlimit(resource.RLIMIT_AS)
resource.setrlimit(resource.RLIMIT_AS, (pages * resource.getpagesize() + (40 << 20), limits[1]))
try:
    ops._machine.linears(many, tuple(weights.values()), outputs)  # no room for the second one's activations
except MemoryError:
    pass
else:
    raise SystemExit("it did not fail")
resource.setrlimit(resource.RLIMIT_AS, limits)
found = ops._linears(one, weights, ["b", "a"])
fresh = NativeOps(2)._linears(one, weights, ["b", "a"])
assert all((x == y).all() for x, y in zip(found, fresh)), "differs"
assert not any(y.any() for y in outputs), "the call before was gone on with"
"""


def test_a_call_that_failed_midway_leaves_nothing_behind():
    """What it had laid out for the threads is not run by the next call."""
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[1])}
    done = subprocess.run([sys.executable, "-c", STALE], env=environment, capture_output=True, text=True, timeout=120)
    assert (done.returncode, done.stderr) == (0, "")
