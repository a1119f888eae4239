"""What a model is, as frozen data: blocks with their sizes, and every trunk weight with its name and shape.

A block spec says which math runs; backends implement that math once for all families. The weight lists are the
single source for loading, for checking files against the config, and for counting bytes.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from math import prod
from typing import Literal

from moeflux.core.names import TensorNames

Shape = tuple[int, ...]
Pairing = Literal["half", "interleaved"]  # channel i turns with i + dim/2, or 2i with 2i + 1


@dataclass(frozen=True)
class Yarn:
    """Context extension by interpolating the slow rotary frequencies."""

    factor: float
    original_context: int
    beta_fast: float
    beta_slow: float
    truncate: bool
    attention_factor: float | None  # multiplies cos and sin; None: derived from the two below and the factor
    mscale: float
    mscale_all_dim: float


@dataclass(frozen=True)
class Rope:
    """Rotary embedding of the first `dim` channels."""

    dim: int
    theta: float
    pairing: Pairing
    yarn: Yarn | None = None
    linear_factor: float = 1.0


@dataclass(frozen=True)
class Attention:
    """Grouped-query attention with per-head q/k norms; `gated` multiplies its output by sigmoid(gate)."""

    n_heads: int
    n_kv_heads: int
    head_dim: int
    rope: Rope
    gated: bool
    bias: bool


@dataclass(frozen=True)
class DeltaNet:
    """Gated delta net. `fused`: qkvz and ba are one projection each, interleaved by key head."""

    n_key_heads: int
    n_value_heads: int
    key_dim: int
    value_dim: int
    conv_width: int
    fused: bool

    @property
    def channels(self) -> int:
        """Channels that go through the convolution: q, k and v."""
        return 2 * self.n_key_heads * self.key_dim + self.n_value_heads * self.value_dim


@dataclass(frozen=True)
class Mla:
    """Multi-head latent attention: one latent of `kv_rank` and one rotary key per token, shared by all heads."""

    n_heads: int
    q_rank: int | None
    kv_rank: int
    nope_dim: int
    value_dim: int
    rope: Rope
    norm_eps: float
    bias: bool

    @property
    def latent_dim(self) -> int:
        return self.kv_rank + self.rope.dim


Mixer = Attention | DeltaNet | Mla


@dataclass(frozen=True)
class Router:
    """`softmax`: top-k of probabilities. `noaux_tc`: top-k of biased sigmoids within the best groups."""

    kind: Literal["softmax", "noaux_tc"]
    n_experts: int
    k: int
    normalize: bool
    scale: float = 1.0
    n_groups: int = 1
    top_groups: int = 1


@dataclass(frozen=True)
class Moe:
    """Routed experts of inner width `width`, plus a shared expert that every token passes (0: none)."""

    router: Router
    width: int
    shared_width: int
    shared_gated: bool


@dataclass(frozen=True)
class Dense:
    width: int


Ffn = Moe | Dense


@dataclass(frozen=True)
class Weight:
    """One trunk weight. `matrix`, `embedding`: may be quantised. `norm`: may be stored less 1. `vector`, `conv`: plain.

    `split` names the two tensors that some conversions store instead of this one.
    """

    name: str
    shape: Shape
    kind: Literal["matrix", "embedding", "norm", "vector", "conv"]
    quantizable: bool = True
    split: tuple[tuple[str, Shape], ...] = ()

    @property
    def count(self) -> int:
        return prod(self.shape)


Weights = Mapping[str, Weight]  # role -> weight


@dataclass(frozen=True)
class Layer:
    mixer: Mixer
    ffn: Ffn
    mixer_weights: Weights
    ffn_weights: Weights
    mixer_norm: Weight
    ffn_norm: Weight

    def weights(self) -> tuple[Weight, ...]:
        return (self.mixer_norm, *self.mixer_weights.values(), self.ffn_norm, *self.ffn_weights.values())


@dataclass(frozen=True)
class ModelSpec:
    model_type: str
    hidden: int
    vocab: int
    norm_eps: float
    norm_offset: int  # 1: HF checkpoints store norm weights less 1
    context: int
    layers: tuple[Layer, ...]
    embedding: Weight
    final_norm: Weight
    head: Weight | None  # None: tied to the embedding
    eos: tuple[int, ...]
    names: TensorNames

    def weights(self) -> tuple[Weight, ...]:
        """The whole trunk."""
        inner = tuple(weight for layer in self.layers for weight in layer.weights())
        return (self.embedding, *inner, self.final_norm, *((self.head,) if self.head else ()))

    def with_k(self, k: int) -> ModelSpec:
        """The same with so many experts per token: another model, and a worse one than the trained."""
        layers = (
            replace(layer, ffn=replace(layer.ffn, router=replace(layer.ffn.router, k=k)))
            if isinstance(layer.ffn, Moe)
            else layer
            for layer in self.layers
        )
        return replace(self, layers=tuple(layers))

    def moe_layers(self) -> tuple[tuple[int, Moe], ...]:
        return tuple((i, layer.ffn) for i, layer in enumerate(self.layers) if isinstance(layer.ffn, Moe))
