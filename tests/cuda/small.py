"""Random models in memory, without files: layers of the Qwen3.5 kind whose sizes are powers of two."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache

import numpy as np

from backends.test_linear import random_matrix
from moeflux.backends.account import StateAccount
from moeflux.backends.cuda.device import open_device
from moeflux.backends.cuda.ops import CudaOps
from moeflux.backends.cuda.pool import ExpertPool, ExpertShape
from moeflux.backends.cuda.step_weights import Ends
from moeflux.backends.ops import LayerWeights
from moeflux.formats.quant import Affine
from moeflux.models.spec import Attention, DeltaNet, Layer, Moe, Rope, Router

FOUR, EIGHT = Affine(4, 64, "BF16"), Affine(8, 64, "BF16")


@dataclass(frozen=True)
class Sizes:
    hidden: int = 256
    vocab: int = 512
    experts: int = 16
    k: int = 4
    width: int = 512
    key_heads: int = 2
    value_heads: int = 4
    head: int = 64
    heads: int = 4
    kv_heads: int = 2
    head_dim: int = 64
    rotary: int = 32
    layers: str = "da"  # delta or attention


@cache
def model_of(sizes: Sizes) -> SmallModel:
    """On poisoned memory, kept: making a large one takes long. Whoever changes its weights makes one of his own."""
    return SmallModel(CudaOps(open_device(), poison=True), sizes)


class SmallModel:
    """Weights as the ops keep them, and the experts both as host matrices and in a pool."""

    def __init__(self, ops: CudaOps, sizes: Sizes, seed: int = 0) -> None:
        self.ops, self.sizes = ops, sizes
        self._seed, self._rng = seed, np.random.default_rng(seed)
        s = sizes
        self.eps = 1e-6
        self.experts: list[list[dict]] = []
        self.layers = [self._layer(kind) for kind in s.layers]
        self.ends = Ends(
            self._load(FOUR, s.vocab, s.hidden), self._vector(s.hidden, 1.0), self._load(FOUR, s.vocab, s.hidden)
        )
        n = len(s.layers) * s.experts
        self.pool = ExpertPool(ops.device, ExpertShape(s.hidden, s.width), n, len(s.layers), s.experts)
        slots = self._rng.permutation(n)
        for i, experts in enumerate(self.experts):
            for e, matrices in enumerate(experts):
                self.pool.put(i, e, int(slots[i * s.experts + e]), matrices)

    def _matrix(self, codec, rows, cols):
        self._seed += 1
        return random_matrix(codec, rows, cols, self._seed)

    def _load(self, codec, rows, cols):
        return self.ops.load_matrix(self._matrix(codec, rows, cols))

    def _vector(self, n, mean=0.0):
        return self.ops.load_vector((mean + 0.2 * self._rng.normal(size=n)).astype(np.float32))

    def _layer(self, kind) -> LayerWeights:
        s = self.sizes
        moe = Moe(Router("softmax", s.experts, s.k, True), s.width, s.width, True)
        mixer, weights = self._delta() if kind == "d" else self._attention()
        ffn = {
            "router": self._load(EIGHT, s.experts, s.hidden),
            "shared_gate": self._load(EIGHT, 1, s.hidden),
            "shared_gate_proj": self._load(FOUR, s.width, s.hidden),
            "shared_up_proj": self._load(FOUR, s.width, s.hidden),
            "shared_down_proj": self._load(FOUR, s.hidden, s.width),
        }
        shapes = {"gate": (s.width, s.hidden), "up": (s.width, s.hidden), "down": (s.hidden, s.width)}
        self.experts.append([{n: self._matrix(FOUR, *shape) for n, shape in shapes.items()} for _ in range(s.experts)])
        layer = Layer(mixer, moe, {}, {}, None, None)
        return LayerWeights(layer, weights, ffn, self._vector(s.hidden, 1.0), self._vector(s.hidden, 1.0))

    def _delta(self):
        s = self.sizes
        spec = DeltaNet(s.key_heads, s.value_heads, s.head, s.head, 4, False)
        inner = s.value_heads * s.head
        return spec, {
            "in_proj_qkv": self._load(FOUR, spec.channels, s.hidden),
            "in_proj_z": self._load(FOUR, inner, s.hidden),
            "in_proj_b": self._load(FOUR, s.value_heads, s.hidden),
            "in_proj_a": self._load(FOUR, s.value_heads, s.hidden),
            "conv1d": self.ops.load_vector(self._rng.normal(size=(spec.channels, 4)).astype(np.float32) * 0.5),
            "A_log": self._vector(s.value_heads),
            "dt_bias": self._vector(s.value_heads),
            "norm": self._vector(s.head, 1.0),
            "out_proj": self._load(FOUR, s.hidden, inner),
        }

    def _attention(self):
        s = self.sizes
        spec = Attention(s.heads, s.kv_heads, s.head_dim, Rope(s.rotary, 1e4, "half"), True, False)
        return spec, {
            "q_proj": self._load(FOUR, 2 * s.heads * s.head_dim, s.hidden),
            "k_proj": self._load(FOUR, s.kv_heads * s.head_dim, s.hidden),
            "v_proj": self._load(FOUR, s.kv_heads * s.head_dim, s.hidden),
            "q_norm": self._vector(s.head_dim, 1.0),
            "k_norm": self._vector(s.head_dim, 1.0),
            "o_proj": self._load(FOUR, s.hidden, s.heads * s.head_dim),
        }

    def states(self):
        return [self.ops.new_state(layer.spec.mixer, "bf16", StateAccount()) for layer in self.layers]

    def composed(self, tokens, states, position):
        """Logits [T, vocab] through the composed blocks."""
        from moeflux.backends.ops import Span

        x = self.ops.embed(self.ends.embedding, tokens)
        for layer, state, experts in zip(self.layers, states, self.experts, strict=True):
            x, h, ids, weights = self.ops.run_mixer(layer, x, [Span(0, len(tokens), position, state)], self.eps, None)
            chosen = sorted(set(self.ops.to_numpy(ids).reshape(-1).tolist()))
            x = self.ops.run_ffn(layer, x, h, ids, weights, [(dict(enumerate(experts)), chosen)], None)
        return self.ops.head(x, self.ends.final_norm, self.ends.head, self.eps)


def copied(state):
    """A state's content by name, in host memory."""
    return {part.name: np.concatenate([np.array(piece) for piece in part.parts]) for part in state.copy_out() if part.parts}
