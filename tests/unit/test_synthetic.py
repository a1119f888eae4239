"""Random checkpoints open like downloaded ones, hold the bytes that config.json predicts, and keep activations sane."""

from __future__ import annotations

import numpy as np
import pytest

import moeflux
from moeflux.bench.synthetic import write_checkpoint
from moeflux.plan.inspect import inspect_model

QUANT = {"quantization": {"group_size": 64, "bits": 4}}
QWEN = {
    "model_type": "qwen3_5_moe_text", "hidden_size": 128, "num_hidden_layers": 4, "num_attention_heads": 2,
    "num_key_value_heads": 1, "head_dim": 64, "linear_num_key_heads": 2, "linear_num_value_heads": 4,
    "linear_key_head_dim": 32, "linear_value_head_dim": 32, "num_experts": 16, "num_experts_per_tok": 2,
    "moe_intermediate_size": 64, "shared_expert_intermediate_size": 64, "vocab_size": 300,
}  # fmt: skip
DEEPSEEK = {
    "model_type": "deepseek_v3", "hidden_size": 128, "num_hidden_layers": 3, "num_attention_heads": 2, "q_lora_rank": 64,
    "kv_lora_rank": 64, "qk_nope_head_dim": 32, "qk_rope_head_dim": 16, "v_head_dim": 64, "n_routed_experts": 8,
    "num_experts_per_tok": 2, "n_group": 2, "topk_group": 1, "moe_intermediate_size": 64, "intermediate_size": 128,
    "n_shared_experts": 1, "first_k_dense_replace": 1, "vocab_size": 300,
}  # fmt: skip
NEXT = QWEN | {"model_type": "qwen3_next", "intermediate_size": 64}
DENSE = {"model_type": "qwen3_moe", "num_hidden_layers": 2, "intermediate_size": 64, "norm_topk_prob": True}
QWEN3 = {k: v for k, v in QWEN.items() if "linear" not in k and "shared" not in k} | DENSE


@pytest.mark.parametrize("config", [QWEN, NEXT, QWEN3, DEEPSEEK], ids=lambda c: c["model_type"])
def test_opens_and_runs(config, tmp_path):
    write_checkpoint(config | QUANT, tmp_path / "model")
    with moeflux.load(tmp_path / "model") as engine:
        logits = engine.score(list(range(0, 300, 7)))
    assert np.isfinite(logits).all()
    assert 0.1 < logits.std() < 10
    assert len(set(logits.argmax(-1).tolist())) > 10  # the answer follows the token
    report = inspect_model(tmp_path / "model")
    (tmp_path / "config.json").write_text((tmp_path / "model" / "config.json").read_text())
    if config["model_type"] != "deepseek_v3":  # whose split kv_b_proj keeps a part unquantised that config.json cannot tell
        assert report.sizes == inspect_model(tmp_path / "config.json").sizes


def test_seeds_decide(tmp_path):
    for name, seed in (("a", 1), ("b", 1), ("c", 2)):
        write_checkpoint(QWEN3 | QUANT, tmp_path / name, seed)
    a, b, c = ((tmp_path / name / "model-00001-of-00001.safetensors").read_bytes() for name in "abc")
    assert a == b
    assert a != c


def test_shards(tmp_path, monkeypatch):
    write_checkpoint(QWEN3 | QUANT, tmp_path / "one")
    monkeypatch.setattr("moeflux.bench.synthetic.SHARD_BYTES", 100_000)
    seen = []
    write_checkpoint(QWEN3 | QUANT, tmp_path / "many", progress=lambda done, total: seen.append((done, total)))
    assert len(list((tmp_path / "many").glob("*.safetensors"))) > 2
    assert seen[-1][0] == seen[-1][1]
    with moeflux.load(tmp_path / "one") as one, moeflux.load(tmp_path / "many") as many:
        np.testing.assert_array_equal(one.score([1, 2, 3]), many.score([1, 2, 3]))


def test_never_writes_over_anything(tmp_path):
    (tmp_path / "file").write_text("mine")
    with pytest.raises(moeflux.OptionError, match="not an empty folder"):
        write_checkpoint(QWEN3 | QUANT, tmp_path)
    assert (tmp_path / "file").read_text() == "mine"
