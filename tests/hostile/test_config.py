"""A config.json that asks for other math, for nonsense, or for too much: refused by the name of the field."""

from __future__ import annotations

import json
import time
from copy import deepcopy
from typing import Any

import pytest

from hostile.broken import DATA, DEEPSEEK, FP8_BLOCK, HF_CONFIG, QWEN, QWEN35, QWEN_NEXT, refused, set_path
from moeflux import ConfigError, UnsupportedModelError
from moeflux.formats.quant_rules import read_quant_rules
from moeflux.models.registry import FAMILIES, read_spec
from moeflux.plan.sizes import predict

CONFIGS: dict[str, dict[str, Any]] = {
    name: json.loads((DATA / case / "config.json").read_text())
    for name, case in (("qwen3_moe", QWEN), ("qwen3_next", QWEN_NEXT), ("qwen3_5_moe", QWEN35), ("deepseek_v3", DEEPSEEK))
}
QWENS = ("qwen3_moe", "qwen3_next", "qwen3_5_moe")
HYBRIDS = ("qwen3_next", "qwen3_5_moe")
ALL = tuple(CONFIGS)
HUGE = 10**400


def changed(family: str, **fields: Any) -> dict[str, Any]:
    """The family's config with fields of its text model changed; `...` removes one, `__` stands for a dot."""
    config = deepcopy(CONFIGS[family])
    text = config.get("text_config", config)
    for path, value in fields.items():
        set_path(text, path.replace("__", "."), value)
    return config


def cases(families: tuple[str, ...], fields: dict[str, list[Any]]) -> list[Any]:
    return [
        pytest.param(family, field, value, id=f"{family}-{field}-{str(value)[:20]}")
        for family in families
        for field, values in fields.items()
        for value in values
    ]


@pytest.mark.parametrize("family", ALL)
def test_unbroken(family):
    config = CONFIGS[family]
    assert predict(read_spec(config), read_quant_rules(config)).total_params > 0


@pytest.mark.parametrize(
    "model_type", ["llama", "qwen3", "mixtral", "", "QWEN3_MOE", None, 3, ["qwen3_moe"], {}, "x" * 10**6]
)
def test_unknown_model_type(model_type):
    with refused(UnsupportedModelError, "config.json: model_type", *FAMILIES):
        read_spec({**CONFIGS["qwen3_moe"], "model_type": model_type})


def test_missing_model_type():
    with refused(UnsupportedModelError, "config.json: model_type", *FAMILIES):
        read_spec({})


OTHER_MATH = [
    *cases(ALL, {"hidden_act": ["gelu", "relu", "SiLU", 1, ["silu"], {}, True]}),
    *cases(ALL, {"rope_parameters__rope_type": ["llama3", "dynamic", "longrope", "", 1, ["default"]]}),
    *cases(ALL, {"rope_scaling__type": ["su", "ntk", 0, {}]}),
    *cases(("qwen3_moe",), {"use_sliding_window": [True, 1, "false"]}),
    *cases(HYBRIDS, {"attn_output_gate": [False, 0, "true"]}),
    *cases(HYBRIDS, {"mamba_ssm_dtype": ["bfloat16"]}),
    *cases(("qwen3_5_moe",), {"norm_topk_prob": [False, 0], "mlp_only_layers": [[0]]}),
    *cases(
        ("deepseek_v3",),
        {"scoring_func": ["softmax", "sqrtsoftplus", True], "topk_method": ["greedy", "group_limited_greedy"]},
    ),
    *cases(("deepseek_v3",), {"moe_layer_freq": [2, 0, "1", True, [1]]}),
    *cases(
        HYBRIDS,
        {
            "layer_types": [
                ["linear_attention"] * 3 + ["sliding_attention"],
                ["linear_attention"] * 3 + [1],
                ["linear_attention"] * 3 + [["full_attention"]],
                ["full_attention"] * 3,
                ["full_attention"] * 5,
                [],
                "full_attention",
                4,
                {"0": "full_attention"},
            ]
        },
    ),
]


@pytest.mark.parametrize(("family", "field", "value"), OTHER_MATH)
def test_other_math(family, field, value):
    with refused(ConfigError, "config.json: ", field.replace("__", ".")):
        read_spec(changed(family, **{field: value}))


SIZES = {
    "qwen3_moe": ["num_experts", "moe_intermediate_size", "num_attention_heads"],
    "qwen3_next": ["num_experts", "shared_expert_intermediate_size", "linear_num_key_heads", "linear_value_head_dim"],
    "qwen3_5_moe": ["num_experts", "shared_expert_intermediate_size", "linear_num_value_heads", "linear_key_head_dim"],
    "deepseek_v3": ["n_routed_experts", "kv_lora_rank", "qk_rope_head_dim", "qk_nope_head_dim", "v_head_dim"],
}
REQUIRED = [
    (family, field)
    for family in ALL
    for field in (
        "hidden_size",
        "num_hidden_layers",
        "vocab_size",
        "num_experts_per_tok",
        "moe_intermediate_size",
        *SIZES[family],
    )
]


@pytest.mark.parametrize(("family", "field"), REQUIRED)
def test_missing_field(family, field):
    config = changed(family, **{field: ..., "num_local_experts": ...})
    with refused(ConfigError, "config.json: ", field, "missing"):
        read_spec(config)


@pytest.mark.parametrize(
    "value", ["8", 8.0, True, False, -8, 0, 10**12, HUGE, float("nan"), float("inf"), [8], {}], ids=lambda v: str(v)[:12]
)
@pytest.mark.parametrize(("family", "field"), REQUIRED)
def test_wrong_size(family, field, value):
    """Absurd sizes are refused before anything is built from them."""
    config = changed(family, **{field: value, "num_local_experts": ...})
    with refused(ConfigError, "config.json: ", field):
        read_spec(config)


@pytest.mark.parametrize(("family", "field"), REQUIRED)
def test_null_is_absent(family, field):
    with refused(ConfigError, field, "missing"):
        read_spec(changed(family, **{field: None, "num_local_experts": ...}))


OPTIONAL = {
    "rms_norm_eps": ["1e-6", True, -1e-6, HUGE, 1e300, float("nan"), float("inf"), []],
    "max_position_embeddings": ["512", 512.0, 0, -1, 10**12, HUGE],
    "rope_theta": ["1e6", True, -1.0, 0, 1, 1e300, HUGE, float("nan"), float("inf")],
    "rope_parameters": ["default", [], 1, True],
    "rope_scaling": ["yarn", [1], 2],
    "tie_word_embeddings": [0, 1, "false", []],
    "eos_token_id": [-1, 512, "2", 2.0, True, [2, -1], [2, "3"], [[2]], {}, HUGE],
    "partial_rotary_factor": [0, 0.01, 1.5, 2, 1e300, HUGE, "0.25", -0.25, float("nan")],
}


@pytest.mark.parametrize(("family", "field", "value"), cases(ALL, OPTIONAL))
def test_wrong_optional(family, field, value):
    config = changed(family, **{field: value})
    config.pop("eos_token_id", None) if field != "eos_token_id" else config.update(eos_token_id=value)
    config.pop("tie_word_embeddings", None) if field != "tie_word_embeddings" else config.update(tie_word_embeddings=value)
    if field in ("rope_theta", "partial_rotary_factor"):
        config = changed(family, rope_parameters={}, rope_scaling=..., **{field: value})
    with refused(ConfigError, "config.json: ", field):
        read_spec(config)


@pytest.mark.parametrize(
    ("family", "field", "value"),
    [
        *cases(("qwen3_moe", "qwen3_next"), {"norm_topk_prob": [1, "true"], "decoder_sparse_step": [0, "1", HUGE]}),
        *cases(("qwen3_moe", "qwen3_next"), {"mlp_only_layers": [[4], [-1], ["0"], [True], "0", {}, [[0]]]}),
        *cases(
            QWENS, {"attention_bias": [0, "false"], "head_dim": [31, 0, 2**17, "32"], "num_key_value_heads": [3, 8, 0, 4097]}
        ),
        *cases(HYBRIDS, {"linear_num_value_heads": [3], "linear_conv_kernel_dim": [1, 65, "4"]}),
        *cases(("deepseek_v3",), {"first_k_dense_replace": [-1, 5, "1"], "n_group": [3, 0, 9], "topk_group": [5, 0]}),
        *cases(("deepseek_v3",), {"routed_scaling_factor": ["1", -1, HUGE, 1e300], "n_shared_experts": [-1, 65, 1.0]}),
        *cases(("deepseek_v3",), {"rope_interleave": [1], "qk_rope_head_dim": [15, 2**15], "q_lora_rank": [0, "64"]}),
        *cases(("deepseek_v3",), {"num_nextn_predict_layers": [-1, 65, "1"], "intermediate_size": [..., 0]}),
    ],
)
def test_wrong_family_field(family, field, value):
    named = {"qk_rope_head_dim": "rot"}.get(field, field) if value == 15 else field
    named = "partial_rotary_factor" if field == "head_dim" and value == 31 else named
    with refused(ConfigError, "config.json: ", named):
        read_spec(changed(family, **{field: value}))


YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 128}


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("factor", ...),
        ("factor", 0.5),
        ("factor", 1e300),
        ("original_max_position_embeddings", ...),
        ("original_max_position_embeddings", 0),
        ("beta_fast", -1),
        ("beta_fast", 1e308),
        ("beta_slow", 5e-324),
        ("beta_slow", "1"),
        ("mscale", HUGE),
        ("mscale_all_dim", 1e200),
        ("attention_factor", float("nan")),
        ("truncate", 1),
    ],
    ids=lambda value: str(value)[:20],
)
@pytest.mark.parametrize("family", ALL)
@pytest.mark.parametrize("place", ["rope_parameters", "rope_scaling"])
def test_yarn(family, place, field, value):
    rope = {key: v for key, v in {**YARN, field: value}.items() if v is not ...}
    other = {"rope_parameters", "rope_scaling"} - {place}
    with refused(ConfigError, f"{place}.{field}"):
        read_spec(changed(family, rope_theta=..., **{place: rope, other.pop(): ...}))


@pytest.mark.parametrize("family", ALL)
@pytest.mark.parametrize("first", ["rope_parameters", "rope_scaling"])
def test_rope_theta_contradicts(family, first):
    with refused(ConfigError, f"{first}.rope_theta", "12345", "54321", "contradicts"):
        read_spec(
            changed(family, rope_parameters={}, rope_scaling={}, **{f"{first}__rope_theta": 12345.0, "rope_theta": 54321.0})
        )


def test_the_odd_one_out_is_named():
    """Two of three places agree; the error speaks of the third."""
    config = changed("qwen3_moe", rope_parameters__rope_theta=5.0, rope_scaling={"rope_theta": 5.0}, rope_theta=7.0)
    with refused(ConfigError, "config.json: rope_theta: 7.0 contradicts", "rope_parameters.rope_theta = 5.0"):
        read_spec(config)


@pytest.mark.parametrize("family", ["qwen3_moe", "qwen3_next", "qwen3_5_moe"])
def test_expert_counts_contradict(family):
    with refused(ConfigError, "num_local_experts", "num_experts = 8", "16"):
        read_spec(changed(family, num_local_experts=16))


def test_expert_counts_contradict_in_deepseek():
    with refused(ConfigError, "num_local_experts", "n_routed_experts = 8", "16"):
        read_spec(changed("deepseek_v3", num_local_experts=16))


@pytest.mark.parametrize("family", ALL)
def test_more_chosen_than_there_are(family):
    with refused(ConfigError, "num_experts_per_tok", "9 of 8"):
        read_spec(changed(family, num_experts_per_tok=9))


@pytest.mark.parametrize("change", [{"topk_group": 1, "num_experts_per_tok": 3}, {"n_group": 8, "topk_group": 8}], ids=str)
def test_groups_too_small(change):
    with refused(ConfigError, "n_group", "8 experts"):
        read_spec(changed("deepseek_v3", **change))


@pytest.mark.parametrize(
    ("family", "change"), [("deepseek_v3", {"first_k_dense_replace": 4}), ("qwen3_moe", {"mlp_only_layers": [0, 1, 2, 3]})]
)
def test_no_experts_at_all(family, change):
    with refused(ConfigError, "config.json", "mixture-of-experts"):
        read_spec(changed(family, **change))


def test_most_layers_in_little_time():
    """The largest numbers that pass, each of them with the others."""
    start = time.monotonic()
    spec = read_spec(changed("qwen3_moe", num_hidden_layers=4096, mlp_only_layers=list(range(4095)) * 250))
    assert len(spec.moe_layers()) == 1
    assert time.monotonic() - start < 5


@pytest.mark.parametrize("text", [[], "x", 1, True], ids=repr)
def test_text_config_is_not_an_object(text):
    with refused(ConfigError, "config.json: text_config"):
        read_spec({"model_type": "qwen3_5_moe", "text_config": text})


@pytest.mark.parametrize("family", ALL)
@pytest.mark.parametrize(
    ("path", "value"),
    [
        ("bits", 1),
        ("bits", 7),
        ("bits", 16),
        ("bits", "4"),
        ("bits", True),
        ("bits", None),
        ("bits", [4]),
        ("group_size", 16),
        ("group_size", 0),
        ("group_size", 256),
        ("group_size", "64"),
        ("mode", "mxfp4"),
        ("mode", "nvfp4"),
        ("mode", 1),
        ("quant_method", "gptq"),
        ("quant_method", "awq"),
        ("quant_method", "bitsandbytes"),
        ("quant_method", ["fp8"]),
        ("lm_head", {"bits": 4}),
        ("lm_head", {"bits": 4, "group_size": 64, "mode": "mxfp8"}),
        ("lm_head", {}),
    ],
    ids=str,
)
def test_quantization(family, path, value):
    config = deepcopy(CONFIGS[family])
    config["quantization"][path] = value
    with refused(ConfigError, f"config.json: quantization.{path}"):
        read_quant_rules(config)


@pytest.mark.parametrize("block", ["4bit", [4], 4, True], ids=repr)
@pytest.mark.parametrize("key", ["quantization", "quantization_config"])
def test_quantization_is_not_an_object(key, block):
    with refused(ConfigError, f"config.json: {key}"):
        read_quant_rules({**HF_CONFIG, key: block})


def test_quantization_without_bits():
    with refused(ConfigError, "config.json: quantization_config.quant_method", "None"):
        read_quant_rules({**HF_CONFIG, "quantization_config": {"group_size": 64}})


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("fmt", "e5m2"),
        ("fmt", 4),
        ("activation_scheme", "static"),
        ("weight_block_size", [64, 64]),
        ("weight_block_size", [128]),
        ("weight_block_size", [128, 128, 128]),
        ("weight_block_size", 128),
        ("weight_block_size", None),
        ("weight_block_size", [0, 0]),
        ("weight_block_size", [HUGE, HUGE]),
        ("modules_to_not_convert", 5),
        ("modules_to_not_convert", "lm_head"),
        ("modules_to_not_convert", {"lm_head": True}),
        ("modules_to_not_convert", ["lm_head", 1]),
    ],
    ids=lambda value: str(value)[:30],
)
def test_float8(field, value):
    with refused(ConfigError, f"config.json: quantization_config.{field}"):
        read_quant_rules({**HF_CONFIG, "quantization_config": {**FP8_BLOCK, field: value}})


@pytest.mark.parametrize(
    "value",
    ["x" * 10**6, ["1"] * 10**6, {str(i): i for i in range(10**5)}, 10**4000],
    ids=["text", "list", "object", "number"],
)
@pytest.mark.parametrize(
    "field", ["hidden_act", "hidden_size", "rms_norm_eps", "norm_topk_prob", "eos_token_id", "quantization"]
)
def test_errors_stay_short(field, value):
    config = {**CONFIGS["qwen3_moe"], field: value}
    with refused(ConfigError, f"config.json: {field}"):
        read_spec(config)
        read_quant_rules(config)


def test_rope_kinds_contradict():
    with refused(ConfigError, "rope_scaling.type", "'linear' contradicts rope_type = 'yarn'"):
        read_spec(changed("qwen3_moe", rope_scaling={**YARN, "type": "linear"}))


@pytest.mark.parametrize("old", [{**YARN, "factor": 8.0}, {"type": "linear", "factor": 4.0}], ids=["factor", "kind"])
def test_rope_scaling_contradicts_rope_parameters(old):
    with refused(ConfigError, "config.json: rope_scaling", "contradicts rope_parameters"):
        read_spec(changed("qwen3_moe", rope_theta=..., rope_parameters=YARN, rope_scaling=old))
