"""A random model of Qwen3.5-35B-A3B shapes, made in device memory: 4-bit codes in groups of 64, 8 bits for routers."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from moeflux.backends.account import StateAccount
from moeflux.backends.cuda.memory import AffineMatrix
from moeflux.backends.cuda.ops import CudaOps
from moeflux.backends.cuda.pool import PARTS, ExpertPool, ExpertShape
from moeflux.backends.cuda.step_weights import Ends
from moeflux.backends.ops import LayerWeights
from moeflux.models.spec import Attention, DeltaNet, Layer, Moe, Rope, Router

GAIN = 0.3  # of projections that write into the residual stream
EPS = 1e-6


@dataclass(frozen=True)
class Shape:
    hidden: int = 2048
    vocab: int = 248320
    layers: int = 40
    experts: int = 256
    k: int = 8
    width: int = 512
    key_heads: int = 16
    value_heads: int = 32
    head: int = 128
    heads: int = 16
    kv_heads: int = 2
    head_dim: int = 256
    rotary: int = 64


def random_affine(rows: int, cols: int, bits: int = 4, gain: float = 1.0) -> AffineMatrix:
    codes = torch.randint(-(2**31), 2**31 - 1, (rows, cols * bits // 32), dtype=torch.int32, device="cuda")
    scales, biases = _scales((rows, cols // 64), cols, bits, gain)
    return AffineMatrix(codes, scales, biases, bits, 64)


def _scales(shape: tuple[int, ...], cols: int, bits: int, gain: float) -> tuple[torch.Tensor, torch.Tensor]:
    top = 2**bits - 1
    scales = gain * (0.5 + torch.rand(shape, device="cuda")) / (top * 0.29 * cols**0.5)
    biases = -(top / 2) * scales + 0.1 * scales * torch.randn(shape, device="cuda")
    return scales.bfloat16(), biases.bfloat16()


def _vector(*shape: int, mean: float = 0.0, spread: float = 0.1) -> torch.Tensor:
    return mean + spread * torch.randn(shape, device="cuda")


class RandomModel:
    def __init__(self, ops: CudaOps, shape: Shape = Shape(), seed: int = 0) -> None:  # noqa: B008
        torch.manual_seed(seed)
        self.ops, self.shape, s = ops, shape, shape
        self.layers = [self._layer(i % 4 == 3) for i in range(s.layers)]
        self.ends = Ends(random_affine(s.vocab, s.hidden), _vector(s.hidden, mean=1.0), random_affine(s.vocab, s.hidden))
        n = s.layers * s.experts
        self.pool = ExpertPool(ops.device, ExpertShape(s.hidden, s.width), n, s.layers, s.experts)
        self.pool.table.copy_(torch.randperm(n, device="cuda").to(torch.int32).reshape(s.layers, s.experts))
        self._fill_pool()

    def _fill_pool(self) -> None:
        pool, s = self.pool, self.shape
        for start in range(0, len(pool.words), 512):
            some = pool.words[start : start + 512]
            some.random_(-(2**31), 2**31 - 1)
            for i, part in enumerate(PARTS):
                at = (i * pool.shape.matrix_words + pool.shape.code_words) * 2
                cols, gain = (s.width, GAIN) if part == "down" else (s.hidden, 1.0)
                n = s.hidden * s.width // 64
                scales, biases = _scales((len(some), n), cols, 4, gain)
                some.view(torch.bfloat16)[:, at : at + n] = scales
                some.view(torch.bfloat16)[:, at + n : at + 2 * n] = biases

    def _layer(self, full: bool) -> LayerWeights:
        s = self.shape
        mixer, weights = self._attention() if full else self._delta()
        ffn = {
            "router": random_affine(s.experts, s.hidden, 8, 2.0),
            "shared_gate": random_affine(1, s.hidden, 8),
            "shared_gate_proj": random_affine(s.width, s.hidden),
            "shared_up_proj": random_affine(s.width, s.hidden),
            "shared_down_proj": random_affine(s.hidden, s.width, gain=GAIN),
        }
        moe = Moe(Router("softmax", s.experts, s.k, True), s.width, s.width, True)
        norms = (_vector(s.hidden, mean=1.0), _vector(s.hidden, mean=1.0))
        return LayerWeights(Layer(mixer, moe, {}, {}, None, None), weights, ffn, *norms)  # type: ignore[arg-type]

    def _delta(self):
        s = self.shape
        spec = DeltaNet(s.key_heads, s.value_heads, s.head, s.head, 4, False)
        inner = s.value_heads * s.head
        return spec, {
            "in_proj_qkv": random_affine(spec.channels, s.hidden),
            "in_proj_z": random_affine(inner, s.hidden),
            "in_proj_b": random_affine(s.value_heads, s.hidden),
            "in_proj_a": random_affine(s.value_heads, s.hidden),
            "conv1d": _vector(spec.channels, 4, spread=0.5),
            "A_log": _vector(s.value_heads),
            "dt_bias": _vector(s.value_heads),
            "norm": _vector(s.head, mean=1.0),
            "out_proj": random_affine(s.hidden, inner, gain=GAIN),
        }

    def _attention(self):
        s = self.shape
        spec = Attention(s.heads, s.kv_heads, s.head_dim, Rope(s.rotary, 1e7, "half"), True, False)
        return spec, {
            "q_proj": random_affine(2 * s.heads * s.head_dim, s.hidden),
            "k_proj": random_affine(s.kv_heads * s.head_dim, s.hidden),
            "v_proj": random_affine(s.kv_heads * s.head_dim, s.hidden),
            "q_norm": _vector(s.head_dim, mean=1.0),
            "k_norm": _vector(s.head_dim, mean=1.0),
            "o_proj": random_affine(s.hidden, s.heads * s.head_dim, gain=GAIN),
        }

    def states(self, length: int):
        """Random ones, as after `length` tokens."""
        found = [self.ops.new_state(layer.spec.mixer, "bf16", StateAccount()) for layer in self.layers]
        for state in found:
            for rows in state.rows.values():
                rows.append(torch.randn(length, *rows.row_shape, device="cuda"))
            for array in state.arrays.values():
                array.normal_(0, 0.1 if length else 0.0)
        return found

    @property
    def token_bytes(self) -> int:
        """That one decoded token must move: weights read once, recurrent states read and written."""

        def size(m: object) -> int:
            if isinstance(m, AffineMatrix):
                return m.codes.nbytes + m.scales.nbytes + m.biases.nbytes
            return m.nbytes if isinstance(m, torch.Tensor) else 0

        trunk = sum(size(m) for w in self.layers for m in (*w.mixer.values(), *w.ffn.values()))
        experts = len(self.layers) * self.shape.k * self.pool.shape.slot_words * 4
        states = sum(2 * a.nbytes for st in self.states(1) for a in st.arrays.values())
        return trunk + size(self.ends.head) + experts + states
