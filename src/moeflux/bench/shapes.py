"""Published model shapes as the config.json of their 4-bit MLX conversions: real sizes without a download."""

from __future__ import annotations

from typing import Any

from moeflux.core.errors import OptionError

Config = dict[str, Any]


def _hybrid(model_type: str, **fields: Any) -> Config:
    return {
        "model_type": model_type,
        "hidden_act": "silu",
        "num_key_value_heads": 2,
        "head_dim": 256,
        "full_attention_interval": 4,
        "linear_num_key_heads": 16,
        "linear_key_head_dim": 128,
        "linear_value_head_dim": 128,
        "linear_conv_kernel_dim": 4,
        "partial_rotary_factor": 0.25,
        "rope_theta": 10_000_000,
        "rms_norm_eps": 1e-6,
        "max_position_embeddings": 262144,
        "tie_word_embeddings": False,
        **fields,
    }


def _qwen35(**fields: Any) -> Config:
    text = _hybrid("qwen3_5_moe_text", vocab_size=248320, **fields)
    return {"model_type": "qwen3_5_moe", "tie_word_embeddings": False, "eos_token_id": [248046, 248044], "text_config": text}


def _qwen3(**fields: Any) -> Config:
    return {
        "model_type": "qwen3_moe",
        "hidden_act": "silu",
        "num_key_value_heads": 4,
        "head_dim": 128,
        "num_experts": 128,
        "num_experts_per_tok": 8,
        "norm_topk_prob": True,
        "vocab_size": 151936,
        "rope_theta": 1_000_000,
        "rms_norm_eps": 1e-6,
        "max_position_embeddings": 40960,
        "tie_word_embeddings": False,
        **fields,
    }


def _deepseek(**fields: Any) -> Config:
    return {
        "model_type": "deepseek_v3",
        "hidden_act": "silu",
        "hidden_size": 7168,
        "num_hidden_layers": 61,
        "num_attention_heads": 128,
        "num_key_value_heads": 128,
        "q_lora_rank": 1536,
        "kv_lora_rank": 512,
        "qk_nope_head_dim": 128,
        "qk_rope_head_dim": 64,
        "v_head_dim": 128,
        "intermediate_size": 18432,
        "moe_intermediate_size": 2048,
        "n_routed_experts": 256,
        "n_shared_experts": 1,
        "num_experts_per_tok": 8,
        "n_group": 8,
        "topk_group": 4,
        "first_k_dense_replace": 3,
        "norm_topk_prob": True,
        "scoring_func": "sigmoid",
        "topk_method": "noaux_tc",
        "routed_scaling_factor": 2.5,
        "rms_norm_eps": 1e-6,
        "rope_theta": 10000,
        "rope_scaling": {
            "type": "yarn", "factor": 40, "original_max_position_embeddings": 4096,
            "beta_fast": 32, "beta_slow": 1, "mscale": 1.0, "mscale_all_dim": 1.0,
        },
        "max_position_embeddings": 163840,
        "vocab_size": 129280,
        "tie_word_embeddings": False,
        **fields,
    }  # fmt: skip


_SHAPES: dict[str, Config] = {
    "qwen3.5-35b-a3b": _qwen35(
        hidden_size=2048, num_hidden_layers=40, num_attention_heads=16, linear_num_value_heads=32, num_experts=256,
        num_experts_per_tok=8, moe_intermediate_size=512, shared_expert_intermediate_size=512,
    ),
    "qwen3.5-122b-a10b": _qwen35(
        hidden_size=3072, num_hidden_layers=48, num_attention_heads=32, linear_num_value_heads=64, num_experts=256,
        num_experts_per_tok=8, moe_intermediate_size=1024, shared_expert_intermediate_size=1024,
    ),
    "qwen3.5-397b-a17b": _qwen35(
        hidden_size=4096, num_hidden_layers=60, num_attention_heads=32, linear_num_value_heads=64, num_experts=512,
        num_experts_per_tok=10, moe_intermediate_size=1024, shared_expert_intermediate_size=1024,
    ),
    "qwen3-next-80b-a3b": _hybrid(
        "qwen3_next", vocab_size=151936, hidden_size=2048, num_hidden_layers=48, num_attention_heads=16,
        linear_num_value_heads=32, num_experts=512, num_experts_per_tok=10, moe_intermediate_size=512,
        shared_expert_intermediate_size=512, intermediate_size=5120, norm_topk_prob=True,
    ),
    "qwen3-30b-a3b": _qwen3(
        hidden_size=2048, num_hidden_layers=48, num_attention_heads=32, moe_intermediate_size=768, intermediate_size=6144,
    ),
    "qwen3-235b-a22b": _qwen3(
        hidden_size=4096, num_hidden_layers=94, num_attention_heads=64, moe_intermediate_size=1536, intermediate_size=12288,
    ),
    "deepseek-v3": _deepseek(),
    "cogito-v2-671b": _deepseek(vocab_size=128815),
    "kimi-k2": _deepseek(
        model_type="kimi_k2", num_attention_heads=64, num_key_value_heads=64, n_routed_experts=384, n_group=1, topk_group=1,
        first_k_dense_replace=1, routed_scaling_factor=2.827, rope_theta=50000, vocab_size=163840,
        max_position_embeddings=131072,
        rope_scaling={
            "type": "yarn", "factor": 32, "original_max_position_embeddings": 4096,
            "beta_fast": 1.0, "beta_slow": 1.0, "mscale": 1.0, "mscale_all_dim": 1.0,
        },
    ),
}  # fmt: skip

SHAPES = tuple(_SHAPES)


def published_config(shape: str, layers: int | None = None) -> Config:
    """config.json of the affine 4-bit, group 64 conversion; Qwen's small gates are 8-bit there. `layers`: only the first."""
    if shape not in _SHAPES:
        raise OptionError(f"unknown shape {shape!r}", where="shape", hint=f"one of: {', '.join(SHAPES)}")
    config = dict(_SHAPES[shape])
    text = config.get("text_config", config)
    if layers is not None:
        first_moe = text.get("first_k_dense_replace", 0) + 1
        if not first_moe <= layers <= text["num_hidden_layers"]:
            whole = text["num_hidden_layers"]
            raise OptionError(f"{layers} layers of {shape}", where="layers", hint=f"from {first_moe} to {whole}")
        text = text | {"num_hidden_layers": layers}
        config = config | ({"text_config": text} if "text_config" in config else text)
    quantization: Config = {"group_size": 64, "bits": 4, "mode": "affine"}
    if "num_experts" in text:
        prefix = "language_model.model" if "text_config" in config else "model"
        gates = ("gate", "shared_expert_gate") if "shared_expert_intermediate_size" in text else ("gate",)
        for layer in range(text["num_hidden_layers"]):
            for gate in gates:
                quantization[f"{prefix}.layers.{layer}.mlp.{gate}"] = {"group_size": 64, "bits": 8}
    return config | {"quantization": quantization, "quantization_config": quantization, "torch_dtype": "bfloat16"}
