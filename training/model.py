"""The text model of `qwen3_5_moe` for training: parameter names and arithmetic as in transformers, without caches.

Matrices may be bfloat16; norms, gates, routing and the delta rule are computed in float32.
"""

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from training.config import ModelShape
from training.delta import gated_delta_rule
from training.experts import run_experts


class Norm(nn.Module):
    """RMS norm whose weight is stored less one."""

    def __init__(self, size: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(size))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        return (_normed(x, self.eps) * (1 + self.weight.float())).to(x.dtype)


class GatedNorm(nn.Module):
    """RMS norm with a plain weight, times silu of a gate."""

    def __init__(self, size: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))
        self.eps = eps

    def forward(self, x: Tensor, gate: Tensor) -> Tensor:
        return (_normed(x, self.eps) * self.weight.float() * F.silu(gate.float())).to(gate.dtype)


def _normed(x: Tensor, eps: float) -> Tensor:
    x = x.float()
    return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + eps)


def _linear(n_in: int, n_out: int) -> nn.Linear:
    return nn.Linear(n_in, n_out, bias=False)


class Attention(nn.Module):
    def __init__(self, shape: ModelShape) -> None:
        super().__init__()
        self.shape = shape
        width, kv_width = shape.heads * shape.head_dim, shape.kv_heads * shape.head_dim
        self.q_proj = _linear(shape.hidden, 2 * width)
        self.k_proj = _linear(shape.hidden, kv_width)
        self.v_proj = _linear(shape.hidden, kv_width)
        self.o_proj = _linear(width, shape.hidden)
        self.q_norm = Norm(shape.head_dim, shape.eps)
        self.k_norm = Norm(shape.head_dim, shape.eps)

    def forward(self, x: Tensor) -> Tensor:
        shape, (batch, length, _) = self.shape, x.shape
        q, gate = self.q_proj(x).view(batch, length, shape.heads, -1).chunk(2, dim=-1)
        k = self.k_proj(x).view(batch, length, shape.kv_heads, -1)
        v = self.v_proj(x).view(batch, length, shape.kv_heads, -1)
        q, k = self._rotate(self.q_norm(q)), self._rotate(self.k_norm(k))
        share = shape.heads // shape.kv_heads
        k, v = k.repeat_interleave(share, dim=2), v.repeat_interleave(share, dim=2)
        mixed = F.scaled_dot_product_attention(*(h.transpose(1, 2) for h in (q, k, v)), is_causal=True)
        mixed = mixed.transpose(1, 2) * torch.sigmoid(gate)
        return self.o_proj(mixed.reshape(batch, length, -1))

    def _rotate(self, x: Tensor) -> Tensor:
        """The first channels only, as two halves."""
        dim = int(self.shape.head_dim * self.shape.rope_share)
        steps = torch.arange(0, dim, 2, device=x.device).float() / dim
        angles = torch.arange(x.shape[1], device=x.device).float()[:, None] * self.shape.rope_theta**-steps
        cos, sin = (f(angles)[:, None] for f in (torch.cos, torch.sin))  # [T, 1, dim / 2]
        first, second, rest = x.split([dim // 2, dim // 2, x.shape[-1] - dim], dim=-1)
        first, second = first.float(), second.float()
        turned = torch.cat([first * cos - second * sin, second * cos + first * sin], dim=-1)
        return torch.cat([turned.to(x.dtype), rest], dim=-1)


class DeltaNet(nn.Module):
    def __init__(self, shape: ModelShape) -> None:
        super().__init__()
        self.shape = shape
        self.key_width, value_width = shape.key_heads * shape.key_dim, shape.value_heads * shape.value_dim
        channels = 2 * self.key_width + value_width
        self.in_proj_qkv = _linear(shape.hidden, channels)
        self.in_proj_z = _linear(shape.hidden, value_width)
        self.in_proj_b = _linear(shape.hidden, shape.value_heads)
        self.in_proj_a = _linear(shape.hidden, shape.value_heads)
        self.conv1d = nn.Conv1d(channels, channels, shape.conv_width, groups=channels, bias=False)
        self.A_log = nn.Parameter(torch.zeros(shape.value_heads))
        self.dt_bias = nn.Parameter(torch.ones(shape.value_heads))
        self.norm = GatedNorm(shape.value_dim, shape.eps)
        self.out_proj = _linear(value_width, shape.hidden)

    def forward(self, x: Tensor) -> Tensor:
        shape, (batch, length, _) = self.shape, x.shape
        inputs = (self.in_proj_qkv, self.in_proj_z, self.in_proj_b, self.in_proj_a)
        mixed = F.linear(x, torch.cat([module.weight for module in inputs]))
        qkv, z, b, a = mixed.split([module.out_features for module in inputs], dim=-1)
        q, k, v = self._convolve(qkv).split([self.key_width, self.key_width, z.shape[-1]], dim=-1)
        q, k = (_unit(h.unflatten(-1, (shape.key_heads, -1))) for h in (q, k))
        g = -self.A_log.float().exp() * F.softplus(a.float() + self.dt_bias.float())
        v = v.unflatten(-1, (shape.value_heads, -1))
        y = gated_delta_rule(q * shape.key_dim**-0.5, k, v, g, b.float().sigmoid())
        y = self.norm(y, z.view(batch, length, shape.value_heads, -1))
        return self.out_proj(y.reshape(batch, length, -1))

    def _convolve(self, x: Tensor) -> Tensor:
        """Causal, one kernel per channel, then silu; the last tap is the token itself."""
        width, length = self.shape.conv_width, x.shape[1]
        taps, padded = self.conv1d.weight[:, 0].float(), F.pad(x, (0, 0, width - 1, 0))
        return F.silu(sum(padded[:, i : i + length].float() * taps[:, i] for i in range(width)))


def _unit(x: Tensor) -> Tensor:
    return x * torch.rsqrt(x.square().sum(-1, keepdim=True) + 1e-6)


class Experts(nn.Module):
    def __init__(self, shape: ModelShape) -> None:
        super().__init__()
        self.gate_up_proj = nn.Parameter(torch.zeros(shape.experts, 2 * shape.expert_width, shape.hidden))
        self.down_proj = nn.Parameter(torch.zeros(shape.experts, shape.hidden, shape.expert_width))


class Mlp(nn.Module):
    def __init__(self, hidden: int, width: int) -> None:
        super().__init__()
        self.gate_proj = _linear(hidden, width)
        self.up_proj = _linear(hidden, width)
        self.down_proj = _linear(width, hidden)

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))


@dataclass(frozen=True)
class Routing:
    """What one layer's router did: rows per expert, and the balancing loss (1 where all are used alike)."""

    counts: Tensor
    imbalance: Tensor


class Moe(nn.Module):
    def __init__(self, shape: ModelShape) -> None:
        super().__init__()
        self.chosen = shape.chosen
        self.gate = _linear(shape.hidden, shape.experts)
        self.experts = Experts(shape)
        self.shared_expert = Mlp(shape.hidden, shape.shared_width)
        self.shared_expert_gate = _linear(shape.hidden, 1)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        flat = x.flatten(0, -2)
        scores = F.linear(flat.float(), self.gate.weight.float()).softmax(-1)
        weights, ids = scores.topk(self.chosen, dim=-1)
        weights = weights / weights.sum(-1, keepdim=True)
        y, counts = run_experts(flat, ids, weights, self.experts.gate_up_proj, self.experts.down_proj)
        shared = self.shared_expert(flat) * torch.sigmoid(self.shared_expert_gate(flat))
        load = counts / ids.numel()
        imbalance = scores.shape[1] * (load * scores.mean(0)).sum()
        return (y + shared).view_as(x), counts, imbalance


class Layer(nn.Module):
    def __init__(self, shape: ModelShape, full: bool) -> None:
        super().__init__()
        self.full = full
        if full:
            self.self_attn = Attention(shape)
        else:
            self.linear_attn = DeltaNet(shape)
        self.mlp = Moe(shape)
        self.input_layernorm = Norm(shape.hidden, shape.eps)
        self.post_attention_layernorm = Norm(shape.hidden, shape.eps)

    def forward(self, x: Tensor, dropout: float) -> tuple[Tensor, Tensor, Tensor]:
        mixer = self.self_attn if self.full else self.linear_attn
        x = x + _drop(mixer(self.input_layernorm(x)), dropout)
        y, counts, imbalance = self.mlp(self.post_attention_layernorm(x))
        return x + _drop(y, dropout), counts, imbalance


def _drop(x: Tensor, share: float) -> Tensor:
    return F.dropout(x, share) if share else x


class Trunk(nn.Module):
    def __init__(self, shape: ModelShape) -> None:
        super().__init__()
        self.embed_tokens = nn.Embedding(shape.vocab, shape.hidden)
        self.layers = nn.ModuleList(Layer(shape, shape.is_full(i)) for i in range(shape.layers))
        self.norm = Norm(shape.hidden, shape.eps)


class Model(nn.Module):
    """Tied embeddings: `lm_head` is the embedding."""

    def __init__(self, shape: ModelShape) -> None:
        super().__init__()
        self.shape = shape
        self.model = Trunk(shape)
        self.run_layer = Layer.forward  # replaced where layers are compiled
        self.run_head = token_losses

    def forward(self, tokens: Tensor, dropout: float = 0.0) -> tuple[Tensor, Routing]:
        """Final hidden states [B, T, H] before the last norm, and the routing of all layers."""
        x = _drop(self.model.embed_tokens(tokens), dropout)
        counts, imbalances = [], []
        for layer in self.model.layers:
            x, rows, imbalance = self.run_layer(layer, x, dropout)
            counts.append(rows)
            imbalances.append(imbalance)
        return x, Routing(torch.stack(counts), torch.stack(imbalances))

    def logits(self, tokens: Tensor) -> Tensor:
        x, _ = self(tokens)
        return F.linear(self.model.norm(x), self.model.embed_tokens.weight).float()

    def losses(self, tokens: Tensor, targets: Tensor, dropout: float = 0.0) -> tuple[Tensor, Routing]:
        """Nats of every target, 0 where it is negative."""
        x, routing = self(tokens, dropout)
        return self.run_head(x, self.model.norm, self.model.embed_tokens.weight, targets), routing

    def compile_parts(self) -> None:
        """One graph for each kind of layer, shared by all layers of the kind, and one for the head."""
        torch._dynamo.config.cache_size_limit = 64
        torch._dynamo.config.specialize_float = True  # dropout is a constant of the graph
        self.run_layer = torch.compile(Layer.forward, dynamic=False)
        self.run_head = torch.compile(token_losses, dynamic=False)


def token_losses(x: Tensor, norm: Norm, table: Tensor, targets: Tensor) -> Tensor:
    logits = F.linear(norm(x), table).flatten(0, -2).float()
    return F.cross_entropy(logits, targets.flatten(), ignore_index=-1, reduction="none").view_as(targets)


def initialize(model: Model, seed: int) -> None:
    """Small outputs of every block, so that the residual stream starts as the embedding; decays spread over time scales."""
    generator = torch.Generator().manual_seed(seed)
    depth = (2 * model.shape.layers) ** -0.5
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if name.endswith("A_log"):
                weight.copy_(torch.empty_like(weight).uniform_(1, 16, generator=generator).log())
            elif name.endswith("dt_bias"):
                low, high = torch.tensor([1e-3, 1e-1]).log()
                rate = torch.empty_like(weight).uniform_(float(low), float(high), generator=generator).exp()
                weight.copy_(rate + torch.log(-torch.expm1(-rate)))  # softplus of it is the rate
            elif name.endswith("conv1d.weight"):
                weight.copy_(torch.empty_like(weight).uniform_(-0.5, 0.5, generator=generator))
            elif name.endswith("embed_tokens.weight"):
                weight.normal_(0, 0.02, generator=generator)
            elif weight.dim() > 1:
                scale = depth if name.endswith(("o_proj.weight", "out_proj.weight", "down_proj.weight", "down_proj")) else 1
                weight.normal_(0, 0.5 * scale * weight.shape[-1] ** -0.5, generator=generator)
