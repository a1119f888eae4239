"""Correct files with the wrong things in them: refused when opened, or at the latest when the bad value is used."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import moeflux
from hostile.broken import (
    DEEPSEEK,
    QWEN,
    QWEN35,
    SHARD,
    Stored,
    config_of,
    copy,
    open_model,
    read_raw,
    read_tensors,
    reference_ids,
    refused,
    set_path,
    set_value,
    split,
    stored,
    tensors_of,
    write_hf,
    write_tensors,
)
from moeflux import ClosedError, FormatError, MissingTensorError, MoefluxError, NumericError, Segment, StateError

BAD = {"nan": float("nan"), "infinity": float("inf"), "minus-infinity": float("-inf")}


@pytest.fixture
def folder(tmp_path) -> Path:
    return copy(QWEN, tmp_path)


MISSING = [
    (QWEN, "model.embed_tokens.weight"),
    (QWEN, "model.embed_tokens.biases"),
    (QWEN, "model.norm.weight"),
    (QWEN, "lm_head.weight"),
    (QWEN, "lm_head.biases"),
    (QWEN, "model.layers.1.input_layernorm.weight"),
    (QWEN, "model.layers.1.self_attn.q_norm.weight"),
    (QWEN, "model.layers.1.self_attn.q_proj.weight"),
    (QWEN, "model.layers.1.self_attn.q_proj.biases"),
    (QWEN, "model.layers.1.mlp.gate.weight"),
    (QWEN, "model.layers.1.mlp.switch_mlp.up_proj.weight"),
    (QWEN, "model.layers.1.mlp.switch_mlp.down_proj.biases"),
    (DEEPSEEK, "model.layers.1.mlp.gate.e_score_correction_bias"),
    (DEEPSEEK, "model.layers.1.mlp.shared_experts.up_proj.weight"),
    (DEEPSEEK, "model.layers.1.self_attn.unembed_out.weight"),
    (DEEPSEEK, "model.layers.0.mlp.gate_proj.weight"),
    (QWEN35, "language_model.model.layers.1.linear_attn.A_log"),
    (QWEN35, "language_model.model.layers.1.linear_attn.conv1d.weight"),
    (QWEN35, "language_model.model.layers.1.mlp.shared_expert_gate.weight"),
    (QWEN35, "language_model.lm_head.weight"),
]


@pytest.mark.parametrize(("case", "name"), MISSING, ids=[f"{case}-{name}" for case, name in MISSING])
def test_missing_tensor(tmp_path, case, name):
    with tensors_of(copy(case, tmp_path)) as tensors:
        del tensors[name]
    with refused(MissingTensorError, str(tmp_path), name.removeprefix("language_model.")):
        open_model(tmp_path)


@pytest.mark.parametrize("gone", ["gate_proj", "all"])
def test_missing_experts(folder, gone):
    """Without the first of its tensors a layer's experts are not even recognised, so the error names the layer."""
    with tensors_of(folder) as tensors:
        for name in list(tensors):
            if "layers.2.mlp.switch_mlp" in name and (gone in name or gone == "all"):
                del tensors[name]
    with refused(MissingTensorError, str(folder), "model.layers.2.mlp", "switch_mlp.gate_proj.weight"):
        open_model(folder)


@pytest.mark.parametrize(
    "name",
    ["lm_head", "model.layers.1.self_attn.q_proj", "model.layers.1.mlp.switch_mlp.up_proj", "model.layers.1.mlp.gate"],
)
def test_codes_without_scales(folder, name):
    with tensors_of(folder) as tensors:
        del tensors[f"{name}.scales"]
    with refused(FormatError, f"{folder / SHARD}: {name}.weight", "U32"):
        open_model(folder)


def change_dtype(tensor: Stored, dtype: str) -> None:
    tensor.data = np.ones(tensor.shape, "<f8" if dtype == "F64" else "<u4").tobytes() if dtype != "I64" else tensor.data * 2
    tensor.dtype = dtype


DTYPES = [
    ("model.layers.1.self_attn.q_proj.weight", "F32"),
    ("model.layers.1.self_attn.q_proj.weight", "I32"),
    ("model.layers.1.self_attn.q_proj.scales", "U32"),
    ("model.layers.1.self_attn.q_proj.biases", "U32"),
    ("model.layers.1.mlp.switch_mlp.up_proj.weight", "F32"),
    ("model.layers.1.mlp.switch_mlp.up_proj.scales", "U32"),
    ("model.layers.1.mlp.switch_mlp.up_proj.biases", "I32"),
    ("model.layers.1.input_layernorm.weight", "I64"),
    ("model.layers.1.input_layernorm.weight", "U32"),
    ("model.layers.1.input_layernorm.weight", "F64"),
    ("model.embed_tokens.weight", "F32"),
    ("model.norm.weight", "I32"),
]


@pytest.mark.parametrize(("name", "dtype"), DTYPES, ids=[f"{name}-{dtype}" for name, dtype in DTYPES])
def test_wrong_dtype(folder, name, dtype):
    with tensors_of(folder) as tensors:
        change_dtype(tensors[name], dtype)
    with refused(FormatError, f"{folder / SHARD}: {name}", dtype):
        open_model(folder)


def test_scales_and_biases_differ_in_dtype(folder):
    name = "model.layers.1.self_attn.q_proj.biases"
    with tensors_of(folder) as tensors:
        tensors[name] = stored(tensors[name].array, "BF16")
    with refused(FormatError, f"{folder / SHARD}: {name}", "BF16", "F32"):
        open_model(folder)


@pytest.mark.parametrize("name", ["model.layers.0.self_attn.q_proj.weight", "model.layers.0.mlp.experts.1.up_proj.weight"])
@pytest.mark.parametrize("dtype", ["U32", "I64", "F64", "BOOL", "F8_E5M2", "F8_E4M3"])
def test_wrong_dtype_of_plain_weight(tmp_path, name, dtype):
    """Float8 needs its block size from the config, and there is none."""
    with tensors_of(write_hf(tmp_path)) as tensors:
        tensors[name] = stored(np.ones(tensors[name].shape), dtype)
    with refused(FormatError, f"{tmp_path / SHARD}: {name}"):
        open_model(tmp_path)


SHAPES = [
    (QWEN, "model.norm.weight", [64]),
    (QWEN, "model.norm.weight", [1, 128]),
    (QWEN, "model.norm.weight", []),
    (QWEN, "model.norm.weight", [0]),
    (QWEN, "model.layers.1.self_attn.q_norm.weight", [64]),
    (QWEN, "model.layers.1.self_attn.q_proj.weight", [127, 16]),
    (QWEN, "model.layers.1.self_attn.q_proj.weight", [128, 17]),
    (QWEN, "model.layers.1.self_attn.q_proj.weight", [2048]),
    (QWEN, "model.layers.1.self_attn.q_proj.weight", [1, 128, 16]),
    (QWEN, "model.layers.1.self_attn.q_proj.weight", []),
    (QWEN, "model.layers.1.mlp.switch_mlp.up_proj.weight", [8, 63, 16]),
    (QWEN, "model.layers.1.mlp.switch_mlp.up_proj.weight", [8, 64, 8]),
    (DEEPSEEK, "model.layers.1.mlp.gate.e_score_correction_bias", [4]),
    (DEEPSEEK, "model.layers.1.mlp.gate.weight", [128, 8]),
    (DEEPSEEK, "model.layers.1.self_attn.embed_q.weight", [4, 32, 64]),
    (QWEN35, "language_model.model.layers.1.linear_attn.conv1d.weight", [128, 1, 4]),
    (QWEN35, "language_model.model.layers.1.linear_attn.conv1d.weight", [128, 4]),
    (QWEN35, "language_model.model.layers.1.linear_attn.A_log", [2]),
    (QWEN35, "language_model.model.layers.1.linear_attn.norm.weight", [32]),
]


@pytest.mark.parametrize(("case", "name", "shape"), SHAPES, ids=[f"{name}-{shape}" for _, name, shape in SHAPES])
def test_wrong_shape(tmp_path, case, name, shape):
    """One array of a weight has another shape than the rest of the checkpoint says; the error names its module."""
    with tensors_of(copy(case, tmp_path)) as tensors:
        tensors[name] = stored(np.ones(shape), tensors[name].dtype)
    with refused(FormatError, f"{tmp_path / SHARD}: {name.rsplit('.', 1)[0]}"):
        open_model(tmp_path)


@pytest.mark.parametrize("part", ["scales", "biases"])
@pytest.mark.parametrize("shape", [[128, 1], [128, 4], [64, 2], [256], [], [0, 2], [128, 0]], ids=str)
def test_wrong_shape_of_scales(folder, part, shape):
    name = "model.layers.1.self_attn.q_proj"
    with tensors_of(folder) as tensors:
        tensors[f"{name}.{part}"] = stored(np.ones(shape))
    with refused(FormatError, f"{folder / SHARD}: {name}"):
        open_model(folder)


def resize(tensors: dict[str, Stored], module: str, change: Any) -> None:
    for part in ("weight", "scales", "biases"):
        tensor = tensors[f"{module}.{part}"]
        tensor.array = change(tensor.array)


@pytest.mark.parametrize("projection", ["gate", "up", "down"])
def test_expert_counts_differ(folder, projection):
    module = f"model.layers.1.mlp.switch_mlp.{projection}_proj"
    with tensors_of(folder) as tensors:
        resize(tensors, module, lambda array: array[:7])
    with refused(FormatError, str(folder / SHARD), "model.layers.1.mlp.switch_mlp", "experts"):
        open_model(folder)


@pytest.mark.parametrize("projection", ["gate", "up", "down"])
def test_expert_sizes_differ(folder, projection):
    module = f"model.layers.1.mlp.switch_mlp.{projection}_proj"
    with tensors_of(folder) as tensors:
        resize(tensors, module, lambda array: array[:, :32])
    with refused(FormatError, str(folder / SHARD), "model.layers.1.mlp.switch_mlp", f"{projection} [32, "):
        open_model(folder)


def test_all_experts_too_few(folder):
    with tensors_of(folder) as tensors:
        for projection in ("gate", "up", "down"):
            resize(tensors, f"model.layers.1.mlp.switch_mlp.{projection}_proj", lambda array: array[:7])
    with refused(FormatError, str(folder / SHARD), "model.layers.1.mlp", "7 experts", "8"):
        open_model(folder)


@pytest.mark.parametrize("projection", ["gate", "up", "down"])
def test_one_expert_of_another_shape(tmp_path, projection):
    name = f"model.layers.1.mlp.experts.2.{projection}_proj.weight"
    with tensors_of(write_hf(tmp_path)) as tensors:
        tensors[name].array = tensors[name].array[:8]
    with refused(FormatError, f"{tmp_path / SHARD}: {name}", "expert 0"):
        open_model(tmp_path)


def test_one_expert_of_another_dtype(tmp_path):
    name = "model.layers.1.mlp.experts.2.up_proj.weight"
    with tensors_of(write_hf(tmp_path)) as tensors:
        tensors[name] = stored(tensors[name].array, "BF16")
    with refused(FormatError, f"{tmp_path / SHARD}: {name}", "BF16", "F32"):
        open_model(tmp_path)


@pytest.mark.parametrize("expert", [1, 3], ids=["hole", "last"])
def test_one_expert_missing(tmp_path, expert):
    with tensors_of(write_hf(tmp_path)) as tensors:
        for projection in ("gate", "up", "down"):
            del tensors[f"model.layers.1.mlp.experts.{expert}.{projection}_proj.weight"]
    with refused(FormatError, str(tmp_path / SHARD), "model.layers.1.mlp", f"{expert} experts"):
        open_model(tmp_path)


@pytest.mark.parametrize("projection", ["up", "down"])
def test_one_projection_missing(tmp_path, projection):
    name = f"model.layers.1.mlp.experts.2.{projection}_proj.weight"
    with tensors_of(write_hf(tmp_path)) as tensors:
        del tensors[name]
    with refused(MissingTensorError, str(tmp_path), name):
        open_model(tmp_path)


def test_fused_experts_with_odd_rows(tmp_path):
    name = "model.layers.1.mlp.experts.gate_up_proj"
    with tensors_of(write_hf(tmp_path, fused=True)) as tensors:
        tensors[name] = stored(np.ones((4, 33, 32)))
    with refused(FormatError, f"{tmp_path / SHARD}: {name}", "33"):
        open_model(tmp_path)


def test_fused_float8_across_blocks(tmp_path):
    """Gate and up share a block of 128 rows, so they cannot be told apart with their scales."""
    write_hf(tmp_path, fused=True, fp8=True)
    with refused(FormatError, f"{tmp_path / SHARD}: model.layers.0.mlp.experts.gate_up_proj"):
        open_model(tmp_path)


def test_fused_experts_without_down(tmp_path):
    name = "model.layers.1.mlp.experts.down_proj"
    with tensors_of(write_hf(tmp_path, fused=True)) as tensors:
        del tensors[name]
    with refused(MissingTensorError, str(tmp_path), name):
        open_model(tmp_path)


@pytest.mark.parametrize("change", ["missing", "dtype", "shape"])
@pytest.mark.parametrize("module", ["self_attn.q_proj", "mlp.experts.1.up_proj"])
def test_float8_scales(tmp_path, module, change):
    name = f"model.layers.1.{module}.weight_scale_inv"
    with tensors_of(write_hf(tmp_path, fp8=True)) as tensors:
        if change == "missing":
            del tensors[name]
        elif change == "dtype":
            tensors[name] = stored(np.ones((1, 1)), "U32")
        else:
            tensors[name] = stored(np.ones((2, 1)))
    kind = MissingTensorError if change == "missing" else FormatError
    with refused(kind, str(tmp_path), name):
        open_model(tmp_path)


def test_float8_without_rule(tmp_path):
    with config_of(write_hf(tmp_path, fp8=True)) as config:
        del config["quantization_config"]
    with refused(FormatError, f"{tmp_path / SHARD}: model.layers.0.self_attn.q_proj.weight", "weight_block_size"):
        open_model(tmp_path)


@pytest.mark.parametrize("value", BAD.values(), ids=BAD)
@pytest.mark.parametrize(
    ("case", "name"),
    [
        (QWEN, "model.layers.1.self_attn.q_proj.scales"),
        (QWEN, "model.layers.1.self_attn.q_proj.biases"),
        (QWEN, "model.layers.1.mlp.gate.scales"),
        (QWEN, "model.layers.1.input_layernorm.weight"),
        (QWEN, "model.norm.weight"),
        (QWEN, "lm_head.scales"),
        (DEEPSEEK, "model.layers.1.mlp.gate.weight"),
        (DEEPSEEK, "model.layers.1.mlp.gate.e_score_correction_bias"),
        (DEEPSEEK, "model.layers.1.self_attn.embed_q.weight"),
        (DEEPSEEK, "model.layers.1.self_attn.unembed_out.scales"),
        (QWEN35, "language_model.model.layers.1.linear_attn.A_log"),
        (QWEN35, "language_model.model.layers.1.linear_attn.conv1d.weight"),
        (QWEN35, "language_model.model.layers.1.mlp.shared_expert_gate.scales"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_not_finite_in_trunk(tmp_path, case, name, value):
    set_value(copy(case, tmp_path), name, -1, value)
    with refused(FormatError, f"{SHARD}: {name.rsplit('.', 1)[0]}", "NaN or infinity"):
        open_model(tmp_path)


@pytest.mark.parametrize("dtype", ["F16", "BF16"])
@pytest.mark.parametrize("value", BAD.values(), ids=BAD)
def test_not_finite_in_half_precision(tmp_path, dtype, value):
    name = "model.layers.1.self_attn.q_proj.weight"
    with tensors_of(write_hf(tmp_path, dtype=dtype)) as tensors:
        tensors[name] = stored(np.full((32, 32), value, np.float32), dtype)
    with refused(FormatError, f"{SHARD}: {name}", "NaN or infinity"):
        open_model(tmp_path)


@pytest.mark.parametrize("value", [*BAD.values(), 3e38], ids=[*BAD, "overflow"])
def test_not_finite_in_float8_scale(tmp_path, value):
    write_hf(tmp_path, fp8=True)
    with tensors_of(tmp_path) as tensors:
        name = "model.layers.1.self_attn.q_proj.weight"
        codes = tensors[name].array
        codes[0, 0] = 0x7E  # 448, the largest
        tensors[name].array = codes
    set_value(tmp_path, f"{name}_scale_inv", 0, value)
    with refused(FormatError, f"{SHARD}: {name}", "NaN or infinity"):
        open_model(tmp_path)


def test_not_finite_in_float8_code(tmp_path):
    name = "model.layers.1.self_attn.q_proj.weight"
    set_value(write_hf(tmp_path, fp8=True), name, 3, 0x7F)
    with refused(FormatError, f"{SHARD}: {name}", "weight holds NaN"):
        open_model(tmp_path)


def test_scale_that_overflows(folder):
    """Finite as stored, infinite as used."""
    name = "model.layers.1.self_attn.q_proj"
    set_value(folder, f"{name}.scales", slice(None), 3e38)
    with refused(FormatError, f"{SHARD}: {name}.weight", "NaN or infinity"):
        open_model(folder)


@pytest.mark.parametrize("name", ["model.norm.weight", "model.layers.3.post_attention_layernorm.weight"])
def test_finite_weights_that_overflow_in_use(folder, name):
    set_value(folder, name, slice(None), 3e38)
    with moeflux.load(folder, backend="numpy") as engine, refused(NumericError, "not finite"):
        engine.score([1, 2, 3])


@pytest.mark.parametrize("value", BAD.values(), ids=BAD)
@pytest.mark.parametrize("part", ["scales", "biases"])
@pytest.mark.parametrize("projection", ["gate", "up", "down"])
def test_not_finite_in_expert(folder, projection, part, value):
    """Experts are not read on opening; the error comes with the first token that needs this one."""
    set_value(folder, f"model.layers.2.mlp.switch_mlp.{projection}_proj.{part}", 3, value)
    where = (SHARD, "layer 2, expert 3", projection, part)
    with moeflux.load(folder, backend="numpy") as engine, refused(FormatError, *where, "NaN or infinity"):
        engine.score(reference_ids(QWEN))


@pytest.mark.parametrize("options", [{}, {"fused": True}, {"fp8": True}], ids=["separate", "fused", "float8"])
def test_not_finite_in_hf_expert(tmp_path, options):
    with tensors_of(write_hf(tmp_path, **options)) as tensors:
        for name, tensor in tensors.items():
            if ".layers.1.mlp.experts." in name and not name.endswith("_scale_inv"):
                tensor.array = np.full(tensor.shape, 0x7F if tensor.dtype == "F8_E4M3" else np.nan)
    where = (SHARD, "layer 1, expert ", "weight holds NaN")
    with moeflux.load(tmp_path, backend="numpy") as engine, refused(FormatError, *where):
        engine.score([1, 2, 3])


@pytest.mark.parametrize("value", BAD.values(), ids=BAD)
def test_not_finite_in_embedding_row(folder, value):
    """Rows are decoded when their token comes: the others stay usable."""
    set_value(folder, "model.embed_tokens.scales", 77, value)
    with moeflux.load(folder, backend="numpy") as engine:
        assert np.isfinite(engine.score([76, 78])).all()
        with refused(FormatError, f"{SHARD}: model.embed_tokens.weight", "scales", "NaN or infinity"):
            engine.score([76, 77, 78])


def test_not_finite_in_tied_embedding(tmp_path):
    """The table is also the head, so a bad row matters to every token."""
    with config_of(write_hf(tmp_path)) as config:
        config["tie_word_embeddings"] = True
    set_value(tmp_path, "model.embed_tokens.weight", 5, float("nan"))
    with refused(FormatError, f"{SHARD}: model.embed_tokens.weight", "NaN or infinity"):
        open_model(tmp_path)


CONTRADICTIONS: list[tuple[str, str, Any, type[MoefluxError], str]] = [
    (QWEN, "hidden_size", 64, FormatError, "model.embed_tokens.weight"),
    (QWEN, "hidden_size", 256, FormatError, "model.embed_tokens.weight"),
    (QWEN, "vocab_size", 256, FormatError, "model.embed_tokens.weight"),
    (QWEN, "vocab_size", 513, FormatError, "model.embed_tokens.weight"),
    (QWEN, "head_dim", 16, FormatError, "model.layers.0.self_attn.q_proj.weight"),
    (QWEN, "num_attention_heads", 8, FormatError, "model.layers.0.self_attn.q_proj.weight"),
    (QWEN, "num_key_value_heads", 4, FormatError, "model.layers.0.self_attn.k_proj.weight"),
    (QWEN, "num_hidden_layers", 3, FormatError, "model.layers.3."),
    (QWEN, "num_hidden_layers", 1, FormatError, "model.layers.1."),
    (QWEN, "num_hidden_layers", 5, MissingTensorError, "model.layers.4."),
    (QWEN, "num_hidden_layers", 4096, MissingTensorError, "model.layers.4."),
    (QWEN, "moe_intermediate_size", 32, FormatError, "model.layers.0.mlp"),
    (QWEN, "moe_intermediate_size", 128, FormatError, "model.layers.0.mlp"),
    (QWEN, "mlp_only_layers", [1], MissingTensorError, "model.layers.1.mlp.gate_proj.weight"),
    (QWEN, "attention_bias", True, MissingTensorError, "model.layers.0.self_attn.q_proj.bias"),
    (QWEN, "quantization.bits", 8, FormatError, "model.embed_tokens.weight"),
    (QWEN, "quantization.bits", 3, FormatError, "model.embed_tokens.weight"),
    (QWEN, "quantization.group_size", 32, FormatError, "model.embed_tokens.weight"),
    (QWEN, "quantization.group_size", 128, FormatError, "model.embed_tokens.weight"),
    (QWEN, "quantization.lm_head", False, FormatError, "lm_head.weight"),
    (QWEN, "quantization.lm_head", {"bits": 2, "group_size": 64}, FormatError, "lm_head.weight"),
    (DEEPSEEK, "num_hidden_layers", 3, FormatError, "model.layers.3."),
    (DEEPSEEK, "num_hidden_layers", 2, FormatError, "model.layers."),
    (DEEPSEEK, "num_hidden_layers", 5, MissingTensorError, "model.layers.4."),
    (DEEPSEEK, "first_k_dense_replace", 2, MissingTensorError, "model.layers.1.mlp.gate_proj.weight"),
    (DEEPSEEK, "first_k_dense_replace", 0, MissingTensorError, "model.layers.0.mlp.gate.weight"),
    (DEEPSEEK, "n_routed_experts", 16, FormatError, "model.layers.1.mlp.gate.weight"),
    (DEEPSEEK, "n_shared_experts", 2, FormatError, "model.layers.1.mlp.shared_experts.gate_proj.weight"),
    (DEEPSEEK, "n_shared_experts", 0, FormatError, "model.layers.1.mlp.shared_experts."),
    (DEEPSEEK, "q_lora_rank", None, MissingTensorError, "model.layers.0.self_attn.q_proj.weight"),
    (DEEPSEEK, "q_lora_rank", 32, FormatError, "model.layers.0.self_attn.q_a_proj.weight"),
    (DEEPSEEK, "kv_lora_rank", 32, FormatError, "model.layers.0.self_attn.kv_a_proj_with_mqa.weight"),
    (DEEPSEEK, "qk_rope_head_dim", 32, FormatError, "model.layers.0.self_attn.q_b_proj.weight"),
    (DEEPSEEK, "qk_nope_head_dim", 16, FormatError, "model.layers.0.self_attn.q_b_proj.weight"),
    (DEEPSEEK, "v_head_dim", 64, FormatError, "model.layers.0.self_attn.unembed_out.weight"),
    (QWEN35, "text_config.num_experts", 4, FormatError, "language_model.model.layers.0.mlp.gate.weight"),
    (QWEN35, "text_config.linear_num_value_heads", 8, FormatError, "layers.0.linear_attn.in_proj_qkv.weight"),
    (QWEN35, "text_config.linear_conv_kernel_dim", 3, FormatError, "layers.0.linear_attn.conv1d.weight"),
    (QWEN35, "text_config.shared_expert_intermediate_size", 128, FormatError, "layers.0.mlp.shared_expert.gate_proj.weight"),
    (QWEN35, "text_config.layer_types", ["full_attention"] * 4, MissingTensorError, "layers.0.self_attn.q_proj.weight"),
    (
        QWEN35,
        "text_config.layer_types",
        ["linear_attention"] * 4,
        MissingTensorError,
        "layers.3.linear_attn.in_proj_qkv.weight",
    ),
]


@pytest.mark.parametrize(
    ("case", "path", "value", "kind", "named"),
    CONTRADICTIONS,
    ids=[f"{case.split('-')[0]}-{path}-{value}" for case, path, value, _, _ in CONTRADICTIONS],
)
def test_config_contradicts_tensors(tmp_path, case, path, value, kind, named):
    with config_of(copy(case, tmp_path)) as config:
        set_path(config, path, value)
    with refused(kind, str(tmp_path), named):
        open_model(tmp_path)


@pytest.mark.parametrize("n", [4, 16])
def test_config_contradicts_expert_count(folder, n):
    with config_of(folder) as config:
        config["num_experts"] = config["num_local_experts"] = n
    with refused(FormatError, f"{folder / SHARD}: model.layers.0.mlp.gate.weight", str(n)):
        open_model(folder)


def test_bits_and_group_that_cancel_out(folder):
    """Half the group and twice the bits need arrays of the very same size; the input dimension gives it away."""
    with config_of(folder) as config:
        config["quantization"] |= {"bits": 8, "group_size": 32}
    with refused(FormatError, f"{folder / SHARD}: model.embed_tokens.weight", "[512, 64]", "[512, 128]"):
        open_model(folder)


def test_missing_quantization_block(folder):
    with config_of(folder) as config:
        del config["quantization"], config["quantization_config"]
    with refused(FormatError, f"{folder / SHARD}: model.embed_tokens.weight", "quantization"):
        open_model(folder)


def test_untied_head_missing(tmp_path):
    with config_of(write_hf(tmp_path)) as config:
        config["tie_word_embeddings"] = False
    with tensors_of(tmp_path) as tensors:
        del tensors["lm_head.weight"]
    with refused(MissingTensorError, str(tmp_path), "lm_head.weight"):
        open_model(tmp_path)


UNKNOWN = [
    (QWEN, "model.layers.1.self_attn.q_proj.bias"),
    (QWEN, "model.layers.1.self_attn.sinks"),
    (QWEN, "model.layers.1.mlp.shared_expert.gate_proj.weight"),
    (QWEN, "model.layers.1.mlp.gate.e_score_correction_bias"),
    (QWEN, "model.layers.1.mlp.switch_mlp.gate_proj.bias"),
    (QWEN, "model.layers.1.mlp.switch_mlp.extra.weight"),
    (QWEN, "model.layers.1.mlp.experts.0.gate_proj.weight"),
    (QWEN, "model.layers.1.input_layernorm.biases"),
    (QWEN, "model.layers.1.input_layernorm.weight_scale_inv"),
    (QWEN, "model.layers.4.input_layernorm.weight"),
    (QWEN, "model.layers.99999999999999999999.x"),
    (DEEPSEEK, "model.layers.1.self_attn.kv_a_proj_with_mqa.bias"),
    (DEEPSEEK, "model.layers.4.input_layernorm.weight"),
    (QWEN35, "language_model.model.layers.1.linear_attn.D"),
]


@pytest.mark.parametrize(("case", "name"), UNKNOWN, ids=[f"{case.split('-')[0]}-{name}" for case, name in UNKNOWN])
def test_unknown_tensor_in_a_layer(tmp_path, case, name):
    """What no role asks for would silently change the math."""
    with tensors_of(copy(case, tmp_path)) as tensors:
        tensors[name] = stored(np.ones(4))
    with refused(FormatError, f"{tmp_path / SHARD}: {name}", "no place"):
        open_model(tmp_path)


@pytest.mark.parametrize("name", ["experts.4.up_proj.weight", "experts.0.gate_proj.bias", "experts.gate_up_proj_bias"])
def test_unknown_tensor_among_hf_experts(tmp_path, name):
    with tensors_of(write_hf(tmp_path)) as tensors:
        tensors[f"model.layers.1.mlp.{name}"] = stored(np.ones((16, 32)))
    with refused(FormatError, f"{tmp_path / SHARD}: model.layers.1.mlp.{name}", "no place"):
        open_model(tmp_path)


def test_file_of_a_tensor_in_another_shard(folder):
    """The error names the shard that holds the tensor, not just any."""
    name = "model.layers.3.input_layernorm.weight"
    with tensors_of(folder) as tensors:
        tensors[name] = stored(np.ones(64))
    shard = split(folder, 3)[name]
    with refused(FormatError, f"{folder / shard}: {name}"):
        open_model(folder)


def trunk_first(folder: Path) -> tuple[int, int]:
    """Put the experts behind everything else; where they start and where the file ends."""
    tensors = read_tensors(folder / SHARD)
    is_expert = lambda name: ".switch_mlp." in name  # noqa: E731
    write_tensors(folder / SHARD, dict(sorted(tensors.items(), key=lambda item: is_expert(item[0]))))
    size = (folder / SHARD).stat().st_size
    header, data = read_raw(folder / SHARD)
    start = min(entry["data_offsets"][0] for name, entry in header.items() if is_expert(name))
    return size - len(data) + start, size


SHORTENED = """
import os, sys
import moeflux
folder, keep, *ids = sys.argv[1:]
ids = [int(i) for i in ids]
engine = moeflux.load(folder, backend="numpy", slots=2)
engine.score(ids)
os.truncate(f"{folder}/model.safetensors", int(keep))
sequence = engine.sequence()
try:
    engine.forward(moeflux.Segment(sequence, ids))
except moeflux.MoefluxError as error:
    print(type(error).__name__, error)
try:
    engine.forward(moeflux.Segment(sequence, ids))
except moeflux.MoefluxError as error:
    print(type(error).__name__, error)
engine.close()
"""


@pytest.mark.parametrize("kept", [-1, 0.0, 0.5, 1.0], ids=["emptied", "all-experts-gone", "half-gone", "last-byte-gone"])
def test_shortened_while_open(folder, kept):
    """In a process of its own: reading through a mapping would end it with SIGBUS."""
    start, size = trunk_first(folder)
    keep = 0 if kept < 0 else min(start + int((size - start) * kept), size - 1)
    ids = [str(i) for i in reference_ids(QWEN)]
    done = subprocess.run(
        [sys.executable, "-c", SHORTENED, folder, str(keep), *ids], capture_output=True, text=True, timeout=15
    )
    assert done.returncode == 0, f"{done.returncode}: {done.stderr}"
    assert re.search(rf"ReadError {folder / SHARD}: layer \d+, expert \d+.*: only \d+ of", done.stdout)
    assert "StateError an earlier run over this sequence failed midway: ReadError" in done.stdout


@pytest.mark.parametrize("use", ["score", "forward", "sequence", "spec", "generate"])
def test_use_after_close(folder, use):
    engine = moeflux.load(folder, backend="numpy")
    sequence = engine.sequence()
    engine.close()
    engine.close()
    uses = {
        "score": lambda: engine.score([1, 2]),
        "forward": lambda: engine.forward(Segment(sequence, [1, 2])),
        "sequence": lambda: engine.sequence(),
        "spec": lambda: engine.spec,
        "generate": lambda: list(engine.generate([1, 2], max_tokens=1)),
    }
    with refused(ClosedError, "closed"):
        uses[use]()


def test_failed_sequence_stays_failed(tmp_path):
    """It may have grown in some layers and not in others, so it is not used again; nothing else is harmed."""
    bad, good = copy(QWEN, tmp_path / "bad"), copy(QWEN, tmp_path / "good")
    set_value(bad, "model.layers.2.mlp.switch_mlp.up_proj.scales", slice(None), float("nan"))
    with moeflux.load(bad, backend="numpy") as engine:
        sequence = engine.sequence()
        with refused(FormatError, SHARD, "layer 2"):
            engine.forward(Segment(sequence, [1, 2, 3]))
        for tokens in ([1, 2, 3], [4]):
            with refused(StateError, "FormatError", "layer 2"):
                engine.forward(Segment(sequence, tokens))
    with moeflux.load(good, backend="numpy") as engine:
        assert np.isfinite(engine.score([1, 2, 3])).all()


def test_failed_batch_fails_all_of_its_sequences(folder):
    set_value(folder, "model.embed_tokens.scales", 77, float("nan"))
    with moeflux.load(folder, backend="numpy") as engine:
        innocent, guilty, outsider = engine.sequence(), engine.sequence(), engine.sequence()
        with refused(FormatError, "model.embed_tokens.weight"):
            engine.forward(Segment(innocent, [1]), Segment(guilty, [77]))
        for sequence in (innocent, guilty):
            with refused(StateError, "embed_tokens"):
                engine.forward(Segment(sequence, [1]))
        (logits,) = engine.forward(Segment(outsider, [1]))
        assert logits is not None
        assert np.isfinite(logits).all()
