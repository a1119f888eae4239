"""The same weights in every layout that people download, and MLX's own files with MLX's own logits."""

from __future__ import annotations

import json

import numpy as np
import pytest
import torch
from safetensors.torch import save_file
from transformers import AutoModelForCausalLM, Qwen3_5MoeConfig, Qwen3_5MoeForConditionalGeneration
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

import moeflux
from models import rewrite
from models.configs import config
from models.hf import build, randomize, reference, run, save
from moeflux.models.registry import read_spec

MLX_F32 = [
    "deepseek_v3-4bit-f32",
    "deepseek_v3-oldkv-4bit-f32",
    "qwen3_5_moe_vl_fused-4bit-f32",
    "qwen3_moe-4bit-f32",
    "qwen3_moe-mixed-f32",
    "qwen3_next-4bit-f32",
]


def score(folder, ids):
    with moeflux.load(folder, backend="numpy", kv="f32") as engine:
        return engine.score(ids)


@pytest.mark.parametrize("name", MLX_F32)
def test_mlx_logits(mlx, name):
    with np.load(mlx(name) / "ref.npz") as ref:
        ids, expected = ref["ids"][0], ref["logits"][0]
    assert np.abs(score(mlx(name), ids) - expected).max() <= 1e-3


def test_mlx_bf16_scales(mlx):
    """MLX itself computes this one in bf16, where a few routers flip: most of its choices must be ours."""
    folder = mlx("qwen3_5_moe_vl_fused-4bit")
    with np.load(folder / "ref.npz") as ref:
        ids, expected = ref["ids"][0], ref["logits"][0]
    assert (score(folder, ids).argmax(-1) == expected.argmax(-1)).mean() >= 0.6


@pytest.mark.parametrize("family", ["qwen3_moe", "qwen3_next", "qwen3_5_moe_text", "deepseek_v3"])
def test_fused_and_separate_experts_are_identical(family, tmp_path):
    name = "groups-yarn" if family == "deepseek_v3" else "plain"
    ref = reference(family, name)
    separate = save(ref.model, tmp_path / "separate")
    fused = rewrite.rewrite(separate, tmp_path / "fused", rewrite.fuse_experts)
    with moeflux.load(fused, backend="numpy", kv="f32") as engine:
        layer = engine.spec.moe_layers()[0][0]
        assert len(engine._checkpoint.experts(layer).extents(0)) == 2
        logits = engine.score(ref.ids)
    np.testing.assert_array_equal(logits, score(separate, ref.ids))


def test_sharded_and_single_are_identical(tmp_path):
    ref = reference("qwen3_moe", "plain")
    single = save(ref.model, tmp_path / "single")
    sharded = rewrite.shard(single, tmp_path / "sharded", 3)
    np.testing.assert_array_equal(score(sharded, ref.ids), score(single, ref.ids))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_storage(dtype, tmp_path):
    """The oracle computes in float32 with weights rounded to the stored type."""
    model = build("qwen3_5_moe_text", "plain").to(dtype)
    folder = save(model, tmp_path / "half")
    ids = reference("qwen3_5_moe_text", "plain").ids
    assert np.abs(score(folder, ids) - run(model.float(), ids)).max() <= 5e-4


def test_fp8(tmp_path):
    """Matrices larger than a block, and not a multiple of it."""

    sizes = config("deepseek_v3", "groups-yarn") | {
        "hidden_size": 200,
        "moe_intermediate_size": 136,
        "intermediate_size": 300,
    }

    model = AutoModelForCausalLM.from_config(CONFIG_MAPPING["deepseek_v3"](**sizes), dtype=torch.float32)
    randomize(model)
    plain = save(model, tmp_path / "plain")
    fp8 = {"quant_method": "fp8", "fmt": "e4m3", "weight_block_size": [128, 128], "activation_scheme": "dynamic"}
    coded = rewrite.rewrite(plain, tmp_path / "fp8", rewrite.to_fp8, quantization_config=fp8)
    meant = rewrite.rewrite(coded, tmp_path / "meant", rewrite.from_fp8, quantization_config=None)
    ids = reference("deepseek_v3", "groups-yarn").ids
    oracle = AutoModelForCausalLM.from_pretrained(
        meant, dtype=torch.float32, attn_implementation="eager", experts_implementation="eager"
    )
    logits = score(coded, ids)
    assert np.abs(logits - run(oracle.eval(), ids)).max() <= 5e-4
    assert np.abs(logits - score(plain, ids)).max() > 1e-2  # float8 did change something


def test_vision_wrapper(tmp_path):
    """The VL model as transformers saves it: nested config, prefixed names, vision tensors skipped with one line."""
    text = config("qwen3_5_moe_text", "plain")
    text["rope_parameters"] = {**text["rope_parameters"], "mrope_section": [2, 1, 1], "mrope_interleaved": True}
    vision = {"depth": 1, "hidden_size": 16, "num_heads": 2, "intermediate_size": 16, "out_hidden_size": 64, "patch_size": 4}
    model = Qwen3_5MoeForConditionalGeneration._from_config(
        Qwen3_5MoeConfig(text_config=text, vision_config=vision),
        dtype=torch.float32,
        attn_implementation="eager",
        experts_implementation="eager",
    )
    randomize(model)
    folder = save(model.eval(), tmp_path / "vl")
    ids = reference("qwen3_5_moe_text", "plain").ids
    with moeflux.load(folder, kv="f32") as engine:
        assert engine.spec.model_type == "qwen3_5_moe"
        (note,) = engine.notes
        assert "vision tensors" in note
        assert np.abs(engine.score(ids) - run(model, ids)).max() <= 5e-4


def test_mtp_tensors_are_skipped(tmp_path):
    ref = reference("qwen3_next", "plain")
    folder = save(ref.model, tmp_path / "model")
    save_file(
        {"mtp.norm.weight": torch.ones(64), "mtp.layers.0.mlp.gate.weight": torch.ones(8, 64)}, folder / "mtp.safetensors"
    )
    with moeflux.load(folder, kv="f32") as engine:
        assert engine.notes == ("skipped 2 MTP tensors: not part of the text model",)
        assert np.abs(engine.score(ref.ids) - ref.logits).max() <= 5e-4


def test_deepseek_mtp_layer_is_skipped(tmp_path):
    ref = reference("deepseek_v3", "kimi-like-k4")
    folder = save(ref.model, tmp_path / "model")
    extra = {
        "model.layers.3.eh_proj.weight": torch.ones(48, 96),
        "model.layers.3.mlp.experts.0.gate_proj.weight": torch.ones(16, 48),
    }
    save_file(extra, folder / "mtp.safetensors")
    with moeflux.load(folder, kv="f32") as engine:
        assert engine.notes == ("skipped 2 MTP tensors: not part of the text model",)


def test_hub_keys_mean_the_same(tmp_path):
    """The hub's older config keys and transformers 5 keys give one spec."""
    folder = save(reference("deepseek_v3", "groups-yarn").model, tmp_path / "model")
    new = json.loads((folder / "config.json").read_text())
    old = dict(new)
    rope = dict(old.pop("rope_parameters"))
    old["rope_theta"] = rope.pop("rope_theta")
    old["rope_scaling"] = {"type": rope.pop("rope_type"), **rope}
    assert read_spec(old) == read_spec(new)

    qwen = json.loads((save(reference("qwen3_moe", "plain").model, tmp_path / "qwen") / "config.json").read_text())
    hub = dict(qwen)
    hub["num_experts"] = hub.pop("num_local_experts")
    hub["rope_theta"] = hub.pop("rope_parameters")["rope_theta"]
    hub["rope_scaling"] = None
    assert read_spec(hub) == read_spec(qwen)


def test_greedy_text_equals_hf(tmp_path):
    ref = reference("qwen3_5_moe_text", "odd-heads-k4-bias")
    folder = save(ref.model, tmp_path / "model")
    prompt = [int(t) for t in ref.ids[:9]]
    with torch.no_grad():
        out = ref.model.generate(
            torch.tensor([prompt]), max_new_tokens=24, do_sample=False, eos_token_id=None, pad_token_id=0
        )
    with moeflux.load(folder, kv="f32") as engine:
        ours = [token.id for token in engine.generate(prompt, max_tokens=24)]
    assert ours == out[0, len(prompt) :].tolist()
