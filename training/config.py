"""The shape of the demo model, and its config.json as an MLX conversion of `qwen3_5_moe` writes it."""

from dataclasses import asdict, dataclass
from typing import Any

SPECIAL_TOKENS = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")  # ids 0, 1, 2
END_OF_TEXT, IM_START, IM_END = range(3)

GROUP = 64  # weights that share a scale
BITS, ROUTER_BITS = 4, 8


@dataclass(frozen=True)
class ModelShape:
    vocab: int = 8192
    hidden: int = 384
    layers: int = 8
    full_every: int = 4  # of four layers the last is attention, the others are delta nets
    heads: int = 6
    kv_heads: int = 2
    head_dim: int = 64
    rope_share: float = 0.25
    rope_theta: float = 1e7
    key_heads: int = 4
    value_heads: int = 8
    key_dim: int = 64
    value_dim: int = 64
    conv_width: int = 4
    experts: int = 32
    chosen: int = 4
    expert_width: int = 128
    shared_width: int = 128
    eps: float = 1e-6
    context: int = 2048

    def is_full(self, layer: int) -> bool:
        return (layer + 1) % self.full_every == 0


def text_config(shape: ModelShape) -> dict[str, Any]:
    """The fields that transformers' text model reads."""
    kinds = ["full_attention" if shape.is_full(i) else "linear_attention" for i in range(shape.layers)]
    return {
        "attention_bias": False,
        "attention_dropout": 0.0,
        "dtype": "bfloat16",
        "eos_token_id": IM_END,
        "full_attention_interval": shape.full_every,
        "head_dim": shape.head_dim,
        "hidden_act": "silu",
        "hidden_size": shape.hidden,
        "initializer_range": 0.02,
        "layer_types": kinds,
        "linear_conv_kernel_dim": shape.conv_width,
        "linear_key_head_dim": shape.key_dim,
        "linear_num_key_heads": shape.key_heads,
        "linear_num_value_heads": shape.value_heads,
        "linear_value_head_dim": shape.value_dim,
        "mamba_ssm_dtype": "float32",
        "max_position_embeddings": shape.context,
        "model_type": "qwen3_5_moe_text",
        "moe_intermediate_size": shape.expert_width,
        "num_attention_heads": shape.heads,
        "num_experts": shape.experts,
        "num_experts_per_tok": shape.chosen,
        "num_hidden_layers": shape.layers,
        "num_key_value_heads": shape.kv_heads,
        "pad_token_id": END_OF_TEXT,
        "rms_norm_eps": shape.eps,
        "rope_parameters": {
            "partial_rotary_factor": shape.rope_share,
            "rope_theta": shape.rope_theta,
            "rope_type": "default",
        },
        "shared_expert_intermediate_size": shape.shared_width,
        "tie_word_embeddings": True,
        "use_cache": True,
        "vocab_size": shape.vocab,
    }


def quantization_config(shape: ModelShape) -> dict[str, Any]:
    exact = {"group_size": GROUP, "bits": ROUTER_BITS}
    rules: dict[str, Any] = {"group_size": GROUP, "bits": BITS, "mode": "affine"}
    for layer in range(shape.layers):
        for module in ("gate", "shared_expert_gate"):
            rules[f"language_model.model.layers.{layer}.mlp.{module}"] = dict(exact)
    return rules


def mlx_config(shape: ModelShape) -> dict[str, Any]:
    """config.json of the shipped model. The text model is nested, as in every conversion of this family."""
    rules = quantization_config(shape)
    return {
        "architectures": ["Qwen3_5MoeForConditionalGeneration"],
        "dtype": "bfloat16",
        "eos_token_id": [IM_END, END_OF_TEXT],
        "model_type": "qwen3_5_moe",
        "pad_token_id": END_OF_TEXT,
        "quantization": rules,
        "quantization_config": rules,
        "text_config": text_config(shape),
        "tie_word_embeddings": True,
    }


def shape_fields(shape: ModelShape) -> dict[str, Any]:
    return asdict(shape)
