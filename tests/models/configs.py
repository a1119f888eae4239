"""Tiny configs, at least three for each family, chosen to be awkward: odd head counts, several groups, K from 1 to 4,
with and without shared experts and dense layers."""

from __future__ import annotations

from typing import Any

VOCAB = 211  # not a multiple of anything

_COMMON: dict[str, Any] = {"vocab_size": VOCAB, "max_position_embeddings": 512, "tie_word_embeddings": False}
_YARN = {
    "rope_type": "yarn", "rope_theta": 10000.0, "factor": 4.0, "original_max_position_embeddings": 64,
    "beta_fast": 32, "beta_slow": 1, "mscale": 1.0, "mscale_all_dim": 1.0,
}  # fmt: skip

QWEN3_MOE = {
    "plain": {
        "hidden_size": 64, "num_hidden_layers": 3, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16,
        "num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 32, "intermediate_size": 96, "norm_topk_prob": True,
        "rope_parameters": {"rope_type": "default", "rope_theta": 1e6},
    },
    "odd-heads-k1-dense": {
        "hidden_size": 60, "num_hidden_layers": 4, "num_attention_heads": 9, "num_key_value_heads": 3, "head_dim": 10,
        "num_experts": 5, "num_experts_per_tok": 1, "moe_intermediate_size": 20, "intermediate_size": 44, "norm_topk_prob": False,
        "mlp_only_layers": [1], "rms_norm_eps": 1e-5, "tie_word_embeddings": True,
        "rope_parameters": {"rope_type": "default", "rope_theta": 1e4},
    },
    "k10-of-12": {
        "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "num_key_value_heads": 2, "head_dim": 16,
        "num_experts": 12, "num_experts_per_tok": 10, "moe_intermediate_size": 16, "intermediate_size": 32, "norm_topk_prob": True,
        "rope_parameters": {"rope_type": "linear", "rope_theta": 1e4, "factor": 2.0},
    },
    "bias-k4-yarn-sparse-step": {
        "hidden_size": 48, "num_hidden_layers": 4, "num_attention_heads": 3, "num_key_value_heads": 1, "head_dim": 32,
        "num_experts": 7, "num_experts_per_tok": 4, "moe_intermediate_size": 24, "intermediate_size": 40, "norm_topk_prob": True,
        "attention_bias": True, "decoder_sparse_step": 2,
        "rope_parameters": {"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0, "original_max_position_embeddings": 32},
    },
}  # fmt: skip

_HYBRID = {
    "linear_conv_kernel_dim": 4,
    "rope_parameters": {"rope_type": "default", "rope_theta": 1e7, "partial_rotary_factor": 0.25},
}

QWEN3_NEXT = {
    "plain": {
        **_HYBRID, "hidden_size": 64, "num_hidden_layers": 4, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16,
        "linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_key_head_dim": 16, "linear_value_head_dim": 16,
        "num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 32, "shared_expert_intermediate_size": 32,
        "intermediate_size": 96,
    },
    "odd-heads-k3-dense": {
        **_HYBRID, "hidden_size": 40, "num_hidden_layers": 5, "num_attention_heads": 5, "num_key_value_heads": 1, "head_dim": 24,
        "linear_num_key_heads": 3, "linear_num_value_heads": 9, "linear_key_head_dim": 8, "linear_value_head_dim": 12,
        "num_experts": 6, "num_experts_per_tok": 3, "moe_intermediate_size": 20, "shared_expert_intermediate_size": 28,
        "intermediate_size": 36, "mlp_only_layers": [0, 3], "norm_topk_prob": False,
    },
    "one-value-head-each-k1": {
        **_HYBRID, "hidden_size": 48, "num_hidden_layers": 3, "num_attention_heads": 6, "num_key_value_heads": 3, "head_dim": 8,
        "linear_num_key_heads": 3, "linear_num_value_heads": 3, "linear_key_head_dim": 16, "linear_value_head_dim": 8,
        "linear_conv_kernel_dim": 2, "num_experts": 9, "num_experts_per_tok": 1, "moe_intermediate_size": 16,
        "shared_expert_intermediate_size": 8, "intermediate_size": 36,
        "layer_types": ["full_attention", "linear_attention", "linear_attention"],
    },
}  # fmt: skip

QWEN3_5_MOE = {
    "plain": {
        **_HYBRID, "hidden_size": 64, "num_hidden_layers": 4, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 32,
        "linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_key_head_dim": 16, "linear_value_head_dim": 16,
        "num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 32, "shared_expert_intermediate_size": 32,
    },
    "odd-heads-k4-bias": {
        **_HYBRID, "hidden_size": 56, "num_hidden_layers": 4, "num_attention_heads": 7, "num_key_value_heads": 1, "head_dim": 16,
        "linear_num_key_heads": 3, "linear_num_value_heads": 6, "linear_key_head_dim": 12, "linear_value_head_dim": 20,
        "num_experts": 11, "num_experts_per_tok": 4, "moe_intermediate_size": 12, "shared_expert_intermediate_size": 44,
        "attention_bias": True,
        "layer_types": ["linear_attention", "full_attention", "linear_attention", "full_attention"],
    },
    "k1-tied-wide-conv": {
        **_HYBRID, "hidden_size": 48, "num_hidden_layers": 4, "num_attention_heads": 6, "num_key_value_heads": 2, "head_dim": 8,
        "linear_num_key_heads": 1, "linear_num_value_heads": 5, "linear_key_head_dim": 32, "linear_value_head_dim": 8,
        "linear_conv_kernel_dim": 6, "num_experts": 4, "num_experts_per_tok": 1, "moe_intermediate_size": 16,
        "shared_expert_intermediate_size": 16, "tie_word_embeddings": True,
    },
}  # fmt: skip

DEEPSEEK_V3 = {
    "groups-yarn": {
        "hidden_size": 64, "num_hidden_layers": 4, "num_attention_heads": 4, "num_key_value_heads": 4, "q_lora_rank": 24,
        "kv_lora_rank": 32, "qk_nope_head_dim": 16, "qk_rope_head_dim": 8, "v_head_dim": 12, "n_routed_experts": 12,
        "num_experts_per_tok": 3, "n_group": 4, "topk_group": 2, "moe_intermediate_size": 32, "intermediate_size": 96,
        "n_shared_experts": 1, "first_k_dense_replace": 1, "routed_scaling_factor": 2.5, "rope_parameters": _YARN,
    },
    "kimi-like-k4": {
        "hidden_size": 48, "num_hidden_layers": 3, "num_attention_heads": 3, "num_key_value_heads": 3, "q_lora_rank": 20,
        "kv_lora_rank": 16, "qk_nope_head_dim": 12, "qk_rope_head_dim": 4, "v_head_dim": 20, "n_routed_experts": 9,
        "num_experts_per_tok": 4, "n_group": 1, "topk_group": 1, "moe_intermediate_size": 16, "intermediate_size": 64,
        "n_shared_experts": 1, "first_k_dense_replace": 1, "routed_scaling_factor": 2.827, "rms_norm_eps": 1e-5,
        "rope_parameters": {**_YARN, "rope_theta": 50000.0, "beta_fast": 1.0, "beta_slow": 1.0},
    },
    "no-q-rank-k1-bias": {
        "hidden_size": 40, "num_hidden_layers": 3, "num_attention_heads": 5, "num_key_value_heads": 5, "q_lora_rank": None,
        "kv_lora_rank": 24, "qk_nope_head_dim": 8, "qk_rope_head_dim": 8, "v_head_dim": 8, "n_routed_experts": 6,
        "num_experts_per_tok": 1, "n_group": 3, "topk_group": 1, "moe_intermediate_size": 24, "intermediate_size": 48,
        "n_shared_experts": 2, "first_k_dense_replace": 0, "routed_scaling_factor": 1.0, "attention_bias": True,
        "norm_topk_prob": False, "rope_parameters": {"rope_type": "default", "rope_theta": 1e4}, "rope_interleave": False,
    },
    "mscale-k2": {
        "hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2, "num_key_value_heads": 2, "q_lora_rank": 32,
        "kv_lora_rank": 32, "qk_nope_head_dim": 16, "qk_rope_head_dim": 16, "v_head_dim": 16, "n_routed_experts": 8,
        "num_experts_per_tok": 2, "n_group": 2, "topk_group": 1, "moe_intermediate_size": 32, "intermediate_size": 64,
        "n_shared_experts": 1, "first_k_dense_replace": 1, "routed_scaling_factor": 2.0,
        "rope_parameters": {**_YARN, "mscale": 0.7, "mscale_all_dim": 1.3, "factor": 8.0},
    },
}  # fmt: skip

FAMILIES: dict[str, dict[str, dict[str, Any]]] = {
    "qwen3_moe": QWEN3_MOE,
    "qwen3_next": QWEN3_NEXT,
    "qwen3_5_moe_text": QWEN3_5_MOE,
    "deepseek_v3": DEEPSEEK_V3,
}

CASES = [(family, name) for family, configs in FAMILIES.items() for name in configs]


def config(family: str, name: str) -> dict[str, Any]:
    return _COMMON | FAMILIES[family][name]
