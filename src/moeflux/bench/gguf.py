"""Random GGUF files of published shapes for llama.cpp, Q4_0 throughout: 4.5 bits per weight, as affine 4-bit group 64.

The head is Q4_0 too, where llama.cpp's own quantiser takes Q6_K, so that both engines touch the same bytes. There is no
vocabulary but its size: token ids are fed directly. Written by hand, because the format is simple and a peer is never a
dependency.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import IO, Any

import numpy as np
import numpy.typing as npt

from moeflux.bench.synthetic import MODEL_MODE, RESIDUAL_GAIN
from moeflux.core.atomic_file import write_atomically
from moeflux.core.errors import OptionError

ARCHS = {"qwen3_moe": "qwen3moe", "qwen3_5_moe": "qwen35moe"}  # model_type to llama.cpp's name
F32, Q4_0 = 0, 2  # GGML's numbers of types
ALIGNMENT = 32
BLOCK, BLOCK_BYTES = 32, 18  # weights of a Q4_0 block; its bytes: a float16 scale and 4-bit codes
CODE_STD = (255 / 12) ** 0.5  # codes are uniform on -8..7
POOL_BLOCKS = 2**20

Progress = Callable[[int, int], None]
Metadata = dict[str, int | float | str | list[int]]


@dataclass(frozen=True)
class Tensor:
    """`dims` in GGML's order: columns first. F32 values are normal, with this mean and spread."""

    name: str
    type: int
    dims: tuple[int, ...]
    spread: float
    mean: float = 0.0

    @property
    def nbytes(self) -> int:
        return prod(self.dims) * 4 if self.type == F32 else prod(self.dims) // BLOCK * BLOCK_BYTES


def metadata(config: Mapping[str, Any]) -> Metadata:
    arch, text = _arch(config), config.get("text_config", config)
    head = text["head_dim"]
    fields: Metadata = {
        "vocab_size": text["vocab_size"],
        "context_length": text["max_position_embeddings"],
        "embedding_length": text["hidden_size"],
        "block_count": text["num_hidden_layers"],
        "feed_forward_length": text.get("intermediate_size", text["moe_intermediate_size"]),
        "expert_feed_forward_length": text["moe_intermediate_size"],
        "expert_count": text["num_experts"],
        "expert_used_count": text["num_experts_per_tok"],
        "attention.head_count": text["num_attention_heads"],
        "attention.head_count_kv": text["num_key_value_heads"],
        "attention.key_length": head,
        "attention.value_length": head,
        "attention.layer_norm_rms_epsilon": float(text["rms_norm_eps"]),
        "rope.freq_base": float(text["rope_theta"]),
    }
    if arch == "qwen35moe":
        n_value = text["linear_num_value_heads"]
        fields |= {
            "expert_shared_feed_forward_length": text["shared_expert_intermediate_size"],
            "full_attention_interval": text["full_attention_interval"],
            "rope.dimension_count": int(head * text["partial_rotary_factor"]),
            "rope.dimension_sections": [11, 11, 10, 0],  # of time, height, width: for text they are all the position
            "ssm.conv_kernel": text["linear_conv_kernel_dim"],
            "ssm.inner_size": n_value * text["linear_value_head_dim"],
            "ssm.state_size": text["linear_key_head_dim"],
            "ssm.time_step_rank": n_value,
            "ssm.group_count": text["linear_num_key_heads"],
        }
    general: Metadata = {
        "general.architecture": arch,
        "general.name": "random weights",
        "general.file_type": 2,  # mostly Q4_0
        "general.quantization_version": 2,
        "tokenizer.ggml.model": "no_vocab",
    }
    return general | {f"{arch}.{key}": value for key, value in fields.items()}


def tensors(config: Mapping[str, Any]) -> list[Tensor]:
    arch, text = _arch(config), config.get("text_config", config)
    hidden, vocab = text["hidden_size"], text["vocab_size"]
    found = [Tensor("token_embd.weight", Q4_0, (hidden, vocab), 1.0), _norm("output_norm", hidden)]
    found.append(_matrix("output", hidden, vocab))
    for layer in range(text["num_hidden_layers"]):
        full = arch == "qwen3moe" or (layer + 1) % text["full_attention_interval"] == 0
        mixer = _attention(text, 2 if arch == "qwen35moe" else 1) if full else _delta_net(text)
        norms = ("attn_norm", "ffn_norm" if arch == "qwen3moe" else "post_attention_norm")
        block = [*mixer, *(_norm(name, hidden) for name in norms), *_experts(text)]
        found += [Tensor(f"blk.{layer}.{t.name}", t.type, t.dims, t.spread, t.mean) for t in block]
    return found


def gguf_bytes(config: Mapping[str, Any]) -> int:
    """Of the whole file."""
    return len(_header(config)) + sum(_aligned(tensor.nbytes) for tensor in tensors(config))


def write_gguf(config: Mapping[str, Any], path: Path, seed: int = 0, progress: Progress | None = None) -> int:
    """The file appears when it is complete; returns its bytes. The same config and seed give the same bytes."""
    todo, pool = tensors(config), _Pool(seed)
    total = gguf_bytes(config)

    def write(out: IO[bytes]) -> None:
        done = out.write(_header(config))
        for tensor in todo:
            for block in pool.blocks(tensor):
                done += out.write(block.data)
                if progress:
                    progress(done, total)
            done += out.write(b"\0" * (_aligned(done) - done))

    write_atomically(path, write, n_bytes=total, mode=MODEL_MODE)
    return total


def _arch(config: Mapping[str, Any]) -> str:
    arch = ARCHS.get(config["model_type"])
    if arch is None:
        raise OptionError(f"no GGUF of {config['model_type']} can be made here", hint=f"one of: {', '.join(ARCHS)}")
    return arch


def _matrix(name: str, columns: int, *rows: int, gain: float = 1.0) -> Tensor:
    return Tensor(f"{name}.weight", Q4_0, (columns, *rows), gain * columns**-0.5)


def _norm(name: str, size: int) -> Tensor:
    return Tensor(f"{name}.weight", F32, (size,), 0.0, 1.0)


def _attention(text: Mapping[str, Any], queries: int) -> list[Tensor]:
    """`queries` is 2 where a gate comes with each query."""
    hidden, head = text["hidden_size"], text["head_dim"]
    n_q, n_kv = head * text["num_attention_heads"], head * text["num_key_value_heads"]
    return [
        _matrix("attn_q", hidden, n_q * queries),
        _matrix("attn_k", hidden, n_kv),
        _matrix("attn_v", hidden, n_kv),
        _matrix("attn_output", n_q, hidden, gain=RESIDUAL_GAIN),
        _norm("attn_q_norm", head),
        _norm("attn_k_norm", head),
    ]


def _delta_net(text: Mapping[str, Any]) -> list[Tensor]:
    hidden, heads = text["hidden_size"], text["linear_num_value_heads"]
    values = heads * text["linear_value_head_dim"]
    mixed = 2 * text["linear_num_key_heads"] * text["linear_key_head_dim"] + values
    kernel = text["linear_conv_kernel_dim"]
    return [
        _matrix("attn_qkv", hidden, mixed),
        _matrix("attn_gate", hidden, values),
        _matrix("ssm_beta", hidden, heads),
        _matrix("ssm_alpha", hidden, heads),
        Tensor("ssm_conv1d.weight", F32, (kernel, mixed), kernel**-0.5),
        Tensor("ssm_dt.bias", F32, (heads,), 0.3),
        Tensor("ssm_a", F32, (heads,), 0.0, -1.0),  # minus the exponential of A_log: it must be negative
        _norm("ssm_norm", text["linear_value_head_dim"]),
        _matrix("ssm_out", values, hidden, gain=RESIDUAL_GAIN),
    ]


def _experts(text: Mapping[str, Any]) -> list[Tensor]:
    hidden, inner, n = text["hidden_size"], text["moe_intermediate_size"], text["num_experts"]
    found = [
        Tensor("ffn_gate_inp.weight", F32, (hidden, n), hidden**-0.5),
        _matrix("ffn_gate_exps", hidden, inner, n),
        _matrix("ffn_up_exps", hidden, inner, n),
        _matrix("ffn_down_exps", inner, hidden, n, gain=RESIDUAL_GAIN),
    ]
    if shared := text.get("shared_expert_intermediate_size"):
        found += [
            Tensor("ffn_gate_inp_shexp.weight", F32, (hidden,), hidden**-0.5),
            _matrix("ffn_gate_shexp", hidden, shared),
            _matrix("ffn_up_shexp", hidden, shared),
            _matrix("ffn_down_shexp", shared, hidden, gain=RESIDUAL_GAIN),
        ]
    return found


def _header(config: Mapping[str, Any]) -> bytes:
    fields, infos = metadata(config), tensors(config)
    parts = [b"GGUF", struct.pack("<IQQ", 3, len(infos), len(fields))]
    parts += [_string(key) + _value(value) for key, value in fields.items()]
    at = 0
    for tensor in infos:
        parts.append(_string(tensor.name) + struct.pack("<I", len(tensor.dims)))
        parts.append(struct.pack(f"<{len(tensor.dims)}QIQ", *tensor.dims, tensor.type, at))
        at += _aligned(tensor.nbytes)
    header = b"".join(parts)
    return header.ljust(_aligned(len(header)), b"\0")


def _string(text: str) -> bytes:
    return struct.pack("<Q", len(text.encode())) + text.encode()


def _value(value: int | float | str | list[int]) -> bytes:
    match value:
        case int():
            return struct.pack("<II", 4, value)
        case float():
            return struct.pack("<If", 6, value)
        case str():
            return struct.pack("<I", 8) + _string(value)
        case _:
            return struct.pack(f"<IIQ{len(value)}i", 9, 5, len(value), *value)


def _aligned(n: int) -> int:
    return n + -n % ALIGNMENT


class _Pool:
    """Random blocks read over and over at shifting places. Half of the scales are negative, so that weights have mean 0."""

    def __init__(self, seed: int) -> None:
        self._random = np.random.default_rng(seed)
        self._blocks = np.empty((POOL_BLOCKS, BLOCK_BYTES), dtype=np.uint8)
        self._blocks[:, 2:] = self._random.integers(0, 256, (POOL_BLOCKS, BLOCK_BYTES - 2), dtype=np.uint8)
        self._signs = self._random.choice(np.array([-1, 1], dtype=np.float16), POOL_BLOCKS)
        self._scale = 0.0
        self._at = 0

    def blocks(self, tensor: Tensor) -> Iterator[npt.NDArray[Any]]:
        if tensor.type == F32:
            yield self._random.normal(tensor.mean, tensor.spread, prod(tensor.dims)).astype("<f4")
            return
        scale = tensor.spread / CODE_STD
        if scale != self._scale:
            self._blocks[:, :2] = (self._signs * np.float16(scale)).astype("<f2").view(np.uint8).reshape(-1, 2)
            self._scale = scale
        left = prod(tensor.dims) // BLOCK
        while left:
            self._at = (self._at + 4099) % (POOL_BLOCKS // 2)
            block = self._blocks[self._at : self._at + min(left, POOL_BLOCKS // 2)]
            yield block
            left -= len(block)
