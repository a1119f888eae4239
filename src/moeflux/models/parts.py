"""Weights that several families share under the same names, and the config fields they share."""

from __future__ import annotations

from moeflux.core.errors import ConfigError
from moeflux.models.fields import Fields
from moeflux.models.spec import Attention, DeltaNet, Dense, Ffn, Layer, Mixer, Moe, Router, Weight

MAX_LAYERS = 4096
SKIP_ROTARY = (r"\.rotary_emb\.inv_freq$", "rotary table")


def matrix(name: str, *shape: int, quantizable: bool = True) -> Weight:
    return Weight(f"{name}.weight", shape, "matrix", quantizable)


def norm(name: str, size: int) -> Weight:
    return Weight(f"{name}.weight", (size,), "norm", quantizable=False)


def vector(name: str, size: int) -> Weight:
    return Weight(name, (size,), "vector", quantizable=False)


def read_attention(fields: Fields, hidden: int) -> tuple[int, int, int]:
    """Heads, key-value heads and head size."""
    n_heads = fields.whole("num_attention_heads", high=4096)
    n_kv_heads = fields.whole("num_key_value_heads", default=n_heads, high=4096)
    if n_heads % n_kv_heads:
        raise ConfigError(f"{n_heads} heads cannot share {n_kv_heads}", where=fields.where("num_key_value_heads"))
    return n_heads, n_kv_heads, fields.whole("head_dim", default=hidden // n_heads, high=2**16)


def read_softmax_router(fields: Fields, *, normalize: bool) -> Router:
    n_experts = fields.whole("num_experts", "num_local_experts", high=2**16)
    return Router("softmax", n_experts, read_k(fields, n_experts), normalize)


def read_k(fields: Fields, n_experts: int) -> int:
    k = fields.whole("num_experts_per_tok", high=2**16)
    if k > n_experts:
        raise ConfigError(f"{k} of {n_experts} experts", where=fields.where("num_experts_per_tok"))
    return k


def read_delta_net(fields: Fields, *, fused: bool) -> DeltaNet:
    delta = DeltaNet(
        n_key_heads=fields.whole("linear_num_key_heads", high=4096),
        n_value_heads=fields.whole("linear_num_value_heads", high=4096),
        key_dim=fields.whole("linear_key_head_dim", high=2**14),
        value_dim=fields.whole("linear_value_head_dim", high=2**14),
        conv_width=fields.whole("linear_conv_kernel_dim", default=4, low=2, high=64),
        fused=fused,
    )
    if delta.n_value_heads % delta.n_key_heads:
        raise ConfigError(
            f"{delta.n_value_heads} value heads over {delta.n_key_heads} key heads",
            where=fields.where("linear_num_value_heads"),
        )
    return delta


def read_hybrid_pattern(fields: Fields, n_layers: int) -> tuple[bool, ...]:
    """For each layer, whether it is full attention."""
    types = fields.words("layer_types", length=n_layers, allowed=("linear_attention", "full_attention"))
    if types is not None:
        return tuple(kind == "full_attention" for kind in types)
    interval = fields.whole("full_attention_interval", default=4, high=MAX_LAYERS)
    return tuple((i + 1) % interval == 0 for i in range(n_layers))


def read_dense_layers(fields: Fields, n_layers: int) -> tuple[bool, ...]:
    """For each layer, whether it has a plain MLP instead of experts (Qwen's way to say it)."""
    plain = frozenset(fields.ints("mlp_only_layers", high=n_layers))
    step = fields.whole("decoder_sparse_step", default=1, high=MAX_LAYERS)
    return tuple(i in plain or (i + 1) % step != 0 for i in range(n_layers))


def layer(base: str, hidden: int, mixer: Mixer, ffn: Ffn, mixer_weights: dict[str, Weight]) -> Layer:
    """A layer under the names that all four families use for norms and MLPs."""
    return Layer(
        mixer,
        ffn,
        mixer_weights,
        ffn_weights(f"{base}.mlp", hidden, ffn),
        mixer_norm=norm(f"{base}.input_layernorm", hidden),
        ffn_norm=norm(f"{base}.post_attention_layernorm", hidden),
    )


def attention_weights(base: str, hidden: int, spec: Attention) -> dict[str, Weight]:
    q_width, kv_width = spec.n_heads * spec.head_dim, spec.n_kv_heads * spec.head_dim
    rows = {"q_proj": q_width * (2 if spec.gated else 1), "k_proj": kv_width, "v_proj": kv_width}
    weights = {role: matrix(f"{base}.{role}", n, hidden) for role, n in rows.items()}
    weights["o_proj"] = matrix(f"{base}.o_proj", hidden, q_width)
    weights["q_norm"] = norm(f"{base}.q_norm", spec.head_dim)
    weights["k_norm"] = norm(f"{base}.k_norm", spec.head_dim)
    if spec.bias:
        for role in ("q_proj", "k_proj", "v_proj", "o_proj"):
            weights[f"{role}.bias"] = vector(f"{base}.{role}.bias", weights[role].shape[0])
    return weights


def delta_weights(base: str, hidden: int, spec: DeltaNet) -> dict[str, Weight]:
    value_width = spec.n_value_heads * spec.value_dim
    if spec.fused:
        rows = {"in_proj_qkvz": spec.channels + value_width, "in_proj_ba": 2 * spec.n_value_heads}
    else:
        rows = {
            "in_proj_qkv": spec.channels,
            "in_proj_z": value_width,
            "in_proj_b": spec.n_value_heads,
            "in_proj_a": spec.n_value_heads,
        }
    weights = {role: matrix(f"{base}.{role}", n, hidden) for role, n in rows.items()}
    weights["conv1d"] = Weight(f"{base}.conv1d.weight", (spec.channels, spec.conv_width), "conv", quantizable=False)
    weights["A_log"] = vector(f"{base}.A_log", spec.n_value_heads)
    weights["dt_bias"] = vector(f"{base}.dt_bias", spec.n_value_heads)
    weights["norm"] = vector(f"{base}.norm.weight", spec.value_dim)  # never stored less 1, unlike the layer's norms
    weights["out_proj"] = matrix(f"{base}.out_proj", hidden, value_width)
    return weights


def ffn_weights(base: str, hidden: int, ffn: Ffn) -> dict[str, Weight]:
    if isinstance(ffn, Dense):
        return mlp_weights(base, hidden, ffn.width)
    softmax = ffn.router.kind == "softmax"
    weights = {"router": matrix(f"{base}.gate", ffn.router.n_experts, hidden, quantizable=softmax)}
    if not softmax:
        weights["router_bias"] = vector(f"{base}.gate.e_score_correction_bias", ffn.router.n_experts)
    if ffn.shared_width:
        shared = f"{base}.shared_expert" if ffn.shared_gated else f"{base}.shared_experts"
        weights |= {f"shared_{role}": w for role, w in mlp_weights(shared, hidden, ffn.shared_width).items()}
    if ffn.shared_width and ffn.shared_gated:
        weights["shared_gate"] = matrix(f"{base}.shared_expert_gate", 1, hidden)
    return weights


def mlp_weights(base: str, hidden: int, width: int) -> dict[str, Weight]:
    return {
        "gate_proj": matrix(f"{base}.gate_proj", width, hidden),
        "up_proj": matrix(f"{base}.up_proj", width, hidden),
        "down_proj": matrix(f"{base}.down_proj", hidden, width),
    }


def qwen_moe(fields: Fields, *, normalize: bool) -> Moe:
    return Moe(
        read_softmax_router(fields, normalize=normalize),
        width=fields.whole("moe_intermediate_size"),
        shared_width=fields.whole("shared_expert_intermediate_size"),
        shared_gated=True,
    )
