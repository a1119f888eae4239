"""DeepSeek-V3 and what shares its architecture: R1, V3.1, Cogito-V2, Kimi-K2. Latent attention, noaux_tc router."""

from __future__ import annotations

from moeflux.core.errors import ConfigError
from moeflux.core.names import TensorNames
from moeflux.models.fields import Fields
from moeflux.models.model import build_model, read_hidden
from moeflux.models.parts import MAX_LAYERS, SKIP_ROTARY, layer, matrix, read_k, vector
from moeflux.models.rope import read_rope
from moeflux.models.spec import Dense, Ffn, Layer, Mla, ModelSpec, Moe, Pairing, Router, Weight

MODEL_TYPES = ("deepseek_v3", "kimi_k2")

LATENT_NORM_EPS = 1e-6  # fixed in the reference code, whatever rms_norm_eps says


def read_spec(fields: Fields, root: Fields, model_type: str) -> ModelSpec:
    fields.only("moe_layer_freq", 1)
    hidden = read_hidden(fields)
    n_layers = fields.whole("num_hidden_layers", high=MAX_LAYERS)
    n_dense = fields.whole("first_k_dense_replace", default=0, low=0, high=n_layers)
    mixer, moe = _read_mla(fields), _read_moe(fields)

    def build(i: int) -> Layer:
        base = f"model.layers.{i}"
        ffn: Ffn = Dense(fields.whole("intermediate_size")) if i < n_dense else moe
        return layer(base, hidden, mixer, ffn, _mla_weights(f"{base}.self_attn", hidden, mixer))

    layers = tuple(build(i) for i in range(n_layers))
    return build_model(fields, root, model_type, layers, norm_offset=0, names=_names(fields, n_layers))


def _names(fields: Fields, n_layers: int) -> TensorNames:
    """MTP layers stand behind the last layer, under the same names."""
    n_mtp = fields.whole("num_nextn_predict_layers", "num_mtp_layers", default=1, low=0, high=64)
    mtp = tuple((rf"^model\.layers\.{n_layers + i}\.", "MTP") for i in range(n_mtp))
    return TensorNames(prefixes=(), skipped=(*mtp, SKIP_ROTARY), experts="model.layers.{layer}.mlp")


def _read_mla(fields: Fields) -> Mla:
    rope_dim = fields.whole("qk_rope_head_dim", high=2**14)
    pairing: Pairing = "interleaved" if fields.flag("rope_interleave", default=True) else "half"
    return Mla(
        n_heads=fields.whole("num_attention_heads", high=4096),
        q_rank=fields.whole("q_lora_rank") if fields.has("q_lora_rank") else None,
        kv_rank=fields.whole("kv_lora_rank"),
        nope_dim=fields.whole("qk_nope_head_dim", high=2**14),
        value_dim=fields.whole("v_head_dim", high=2**14),
        rope=read_rope(fields, rope_dim, pairing, theta=10_000.0),
        norm_eps=LATENT_NORM_EPS,
        bias=fields.flag("attention_bias", default=False),
    )


def _read_moe(fields: Fields) -> Moe:
    fields.only("scoring_func", "sigmoid")
    fields.only("topk_method", "noaux_tc")
    n_experts = fields.whole("n_routed_experts", "num_local_experts", high=2**16)
    k = read_k(fields, n_experts)
    n_groups = fields.whole("n_group", default=1, high=n_experts)
    top_groups = fields.whole("topk_group", default=1, high=n_groups)
    group = n_experts // n_groups
    if n_experts % n_groups or group < 2 or top_groups * group < k:
        raise ConfigError(
            f"{n_experts} experts in {n_groups} groups, {k} chosen from {top_groups} of them", where=fields.where("n_group")
        )
    router = Router(
        "noaux_tc",
        n_experts,
        k,
        normalize=fields.flag("norm_topk_prob", default=True),
        scale=fields.number("routed_scaling_factor", default=1.0),
        n_groups=n_groups,
        top_groups=top_groups,
    )
    width = fields.whole("moe_intermediate_size")
    return Moe(router, width, width * fields.whole("n_shared_experts", default=0, low=0, high=64), shared_gated=False)


def _mla_weights(base: str, hidden: int, spec: Mla) -> dict[str, Weight]:
    q_width = spec.n_heads * (spec.nope_dim + spec.rope.dim)
    weights: dict[str, Weight] = {}
    if spec.q_rank is None:
        weights["q_proj"] = matrix(f"{base}.q_proj", q_width, hidden)
    else:
        weights["q_a_proj"] = matrix(f"{base}.q_a_proj", spec.q_rank, hidden)
        weights["q_a_norm"] = vector(f"{base}.q_a_layernorm.weight", spec.q_rank)
        weights["q_b_proj"] = matrix(f"{base}.q_b_proj", q_width, spec.q_rank)
    weights["kv_a_proj"] = matrix(f"{base}.kv_a_proj_with_mqa", spec.latent_dim, hidden)
    weights["kv_a_norm"] = vector(f"{base}.kv_a_layernorm.weight", spec.kv_rank)
    weights["kv_b_proj"] = Weight(
        f"{base}.kv_b_proj.weight",
        (spec.n_heads * (spec.nope_dim + spec.value_dim), spec.kv_rank),
        "matrix",
        split=(
            (f"{base}.embed_q.weight", (spec.n_heads, spec.kv_rank, spec.nope_dim)),
            (f"{base}.unembed_out.weight", (spec.n_heads, spec.value_dim, spec.kv_rank)),
        ),
    )
    weights["o_proj"] = matrix(f"{base}.o_proj", hidden, spec.n_heads * spec.value_dim)
    if spec.bias:
        biased = ("kv_a_proj", "o_proj") if spec.q_rank is None else ("q_a_proj", "kv_a_proj", "o_proj")
        for role in biased:
            stored = weights[role].name.removesuffix(".weight")
            weights[f"{role}.bias"] = vector(f"{stored}.bias", weights[role].shape[0])
    return weights
