"""Float32 master weights with Muon for the matrices of the layers and AdamW for the rest.

The model itself computes with copies of the masters: bfloat16 for most matrices, and, once asked, the values that
quantisation will leave. Gradients of the copies are applied to the masters, so that training sees the rounding.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from training.config import BITS, GROUP, ROUTER_BITS
from training.model import Model
from training.quantize import quantized

MUON_MOMENTUM = 0.95
ADAM_BETAS = (0.9, 0.95)
ADAM_EPS = 1e-10

Named = list[tuple[str, nn.Parameter]]
Quantize = Callable[[Tensor, int], Tensor]


@dataclass(frozen=True)
class Rates:
    """Of one step. Decays are relative to the learning rates."""

    matrices: float
    others: float
    matrix_decay: float
    other_decay: float


def bits_of(name: str) -> int | None:
    """In how many bits a parameter is stored; None for the plain ones."""
    if name.endswith(("mlp.gate.weight", "mlp.shared_expert_gate.weight")):
        return ROUTER_BITS
    plain = name.endswith(("A_log", "dt_bias", "conv1d.weight", "norm.weight"))
    return None if plain else BITS


def _uses_muon(name: str) -> bool:
    return bits_of(name) == BITS and not name.endswith(("embed_tokens.weight", "in_proj_a.weight", "in_proj_b.weight"))


def split_experts(name: str, weight: Tensor) -> Tensor:
    """A parameter as a stack of matrices [n, out, in]: gate and up are matrices of their own."""
    if name.endswith("gate_up_proj"):
        return weight.unflatten(1, (2, -1)).flatten(0, 1)
    return weight if weight.dim() == 3 else weight[None]


class MuonStack:
    """Parameters whose matrices have one shape, as one array [n, out, in]."""

    def __init__(self, named: Named, dtype: torch.dtype) -> None:
        self._named = named
        self.master = torch.cat([split_experts(name, parameter.data.float()) for name, parameter in named])
        self.momentum = torch.zeros_like(self.master)
        self._copy = self.master.to(dtype)
        for (_, parameter), part in zip(named, self._parts(self._copy), strict=True):
            parameter.data = part

    def step(self, rate: float, decay: float) -> None:
        grad = torch.cat([split_experts(name, parameter.grad) for name, parameter in self._named]).float()
        self.momentum.lerp_(grad, 1 - MUON_MOMENTUM)
        update = orthogonalized(grad.lerp(self.momentum, MUON_MOMENTUM))
        self.master.mul_(1 - rate * decay).add_(update, alpha=-rate)

    def publish(self, quantize: Quantize | None) -> None:
        if quantize:
            self._copy.copy_(quantize(self.master.view(-1, GROUP), BITS).view_as(self.master))
        else:
            self._copy.copy_(self.master)

    def named_masters(self) -> Iterator[tuple[str, Tensor]]:
        return zip((name for name, _ in self._named), self._parts(self.master), strict=True)

    def state(self) -> list[Tensor]:
        return [self.master, self.momentum]

    def _parts(self, stack: Tensor) -> list[Tensor]:
        sizes = [split_experts(name, parameter.data).shape[0] for name, parameter in self._named]
        parts = zip(stack.split(sizes), self._named, strict=True)
        return [part.view(parameter.shape) for part, (_, parameter) in parts]


class AdamVector:
    """Parameters that are stored in the same number of bits, as one vector."""

    def __init__(self, named: Named, bits: int | None, dtype: torch.dtype) -> None:
        self._named, self._bits = named, bits
        self.master = torch.cat([parameter.data.float().flatten() for _, parameter in named])
        self.first, self.second = torch.zeros_like(self.master), torch.zeros_like(self.master)
        self._offset = torch.cat([torch.full_like(p.data.float(), _stored_offset(name)).flatten() for name, p in named])
        self._exact = torch.cat([torch.full_like(p.data.float(), name.endswith("A_log")).flatten() for name, p in named])
        for name, parameter in named:
            if bits is not None and not name.endswith("mlp.gate.weight"):  # vectors and the router stay in float32
                parameter.data = parameter.data.to(dtype)
        self._parameters = [parameter.data for _, parameter in named]

    def step(self, rate: float, decay: float, steps: int) -> None:
        grad = torch.cat([parameter.grad.flatten() for _, parameter in self._named]).float()
        self.first.lerp_(grad, 1 - ADAM_BETAS[0])
        self.second.lerp_(grad.square(), 1 - ADAM_BETAS[1])
        spread = (self.second / (1 - ADAM_BETAS[1] ** steps)).sqrt_().add_(ADAM_EPS)
        self.master.mul_(1 - rate * (0.0 if self._bits is None else decay))
        self.master.addcdiv_(self.first, spread, value=-rate / (1 - ADAM_BETAS[0] ** steps))

    def publish(self, quantize: Quantize | None) -> None:
        values = self.master
        if quantize and self._bits is not None:
            values = quantize(self.master.view(-1, GROUP), self._bits).flatten()
        elif quantize:
            rounded = (self.master + self._offset).bfloat16().float() - self._offset
            values = torch.where(self._exact > 0, self.master, rounded)
        torch._foreach_copy_(self._parameters, self._parts(values))

    def named_masters(self) -> Iterator[tuple[str, Tensor]]:
        return zip((name for name, _ in self._named), self._parts(self.master), strict=True)

    def state(self) -> list[Tensor]:
        return [self.master, self.first, self.second]

    def _parts(self, vector: Tensor) -> list[Tensor]:
        parts = vector.split([parameter.numel() for _, parameter in self._named])
        return [part.view(parameter.shape) for part, (_, parameter) in zip(parts, self._named, strict=True)]


def _stored_offset(name: str) -> float:
    """Norms are stored plus one, but for that of the delta net."""
    return 1.0 if name.endswith("norm.weight") and not name.endswith("linear_attn.norm.weight") else 0.0


class Optimizer:
    def __init__(self, model: Model) -> None:
        stacks: dict[tuple[int, ...], Named] = {}
        vectors: dict[int | None, Named] = {}
        for name, parameter in model.named_parameters():
            if _uses_muon(name):
                stacks.setdefault(tuple(split_experts(name, parameter).shape[1:]), []).append((name, parameter))
            else:
                vectors.setdefault(bits_of(name), []).append((name, parameter))
        on_gpu = next(model.parameters()).is_cuda
        dtype = torch.bfloat16 if on_gpu else torch.float32
        self._stacks = [MuonStack(named, dtype) for named in stacks.values()]
        self._vectors = [AdamVector(named, bits, dtype) for bits, named in vectors.items()]
        self._quantize: Quantize = torch.compile(quantized, dynamic=True) if on_gpu else quantized
        self._steps = 0

    @torch.no_grad()
    def step(self, rates: Rates) -> None:
        self._steps += 1
        for stack in self._stacks:
            stack.step(rates.matrices, rates.matrix_decay)
        for vector in self._vectors:
            vector.step(rates.others, rates.other_decay, self._steps)

    @torch.no_grad()
    def publish(self, quantize: bool) -> None:
        """Give the model its copies: rounded to bfloat16, or to what will be stored."""
        for part in (*self._stacks, *self._vectors):
            part.publish(self._quantize if quantize else None)

    def named_masters(self) -> dict[str, Tensor]:
        return {name: master for part in (*self._stacks, *self._vectors) for name, master in part.named_masters()}

    def state(self) -> dict[str, Any]:
        return {"tensors": [part.state() for part in (*self._stacks, *self._vectors)], "steps": self._steps}

    @torch.no_grad()
    def restore(self, state: dict[str, Any]) -> None:
        for part, saved in zip((*self._stacks, *self._vectors), state["tensors"], strict=True):
            for mine, theirs in zip(part.state(), saved, strict=True):
                mine.copy_(theirs)
        self._steps = state["steps"]


def orthogonalized(matrices: Tensor) -> Tensor:
    """[n, out, in] to about the nearest orthogonal matrices, scaled to the size of an Adam update.

    Newton-Schulz iterations of a quintic whose slope at zero is steep: singular values end near one, not at it.
    """
    n_out, n_in = matrices.shape[1:]
    x = matrices.bfloat16()
    x = x.mT if n_out > n_in else x
    x = x / (x.norm(dim=(-2, -1), keepdim=True) + 1e-7)
    for _ in range(5):
        a = x @ x.mT
        x = torch.baddbmm(x, torch.baddbmm(a, a, a, beta=-4.7750, alpha=2.0315), x, beta=3.4445)
    x = x.mT if n_out > n_in else x
    return x.float() * (0.2 * max(n_out, n_in) ** 0.5)
