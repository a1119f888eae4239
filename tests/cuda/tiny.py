"""A checkpoint on disk that has a decode step, as small as its kernels allow."""

from __future__ import annotations

from moeflux.bench.shapes import published_config
from moeflux.bench.synthetic import write_checkpoint


def write_tiny(folder, **changes):
    config = published_config("qwen3.5-35b-a3b")
    config["eos_token_id"] = [2]
    config["text_config"] = config["text_config"] | {
        "hidden_size": 256, "num_hidden_layers": 2, "vocab_size": 64,
        "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 64, "linear_num_key_heads": 2,
        "linear_num_value_heads": 4, "linear_key_head_dim": 64, "linear_value_head_dim": 64, "num_experts": 4,
        "num_experts_per_tok": 2, "moe_intermediate_size": 256, "shared_expert_intermediate_size": 256,
        "full_attention_interval": 2, **changes,
    }  # fmt: skip
    write_checkpoint(config, folder)
    return folder
