"""Whether the training code computes what it should: `python -m training.check [--speed]`.

Against transformers' model on random weights, kernels against plain torch, quantised values against moeflux's quantiser.
"""

import argparse
import time
from typing import Any

import numpy as np
import torch
from torch import Tensor

from moeflux.formats.quant import Affine, Matrix, decode, quantize
from training import delta
from training.config import GROUP, ModelShape, text_config
from training.model import Model, initialize
from training.optimizer import Optimizer, Rates
from training.quantize import quantized


def difference(a: Tensor, b: Tensor) -> float:
    a, b = a.double().cpu(), b.double().cpu()
    return float((a - b).norm() / b.norm())


def check_quantizer(device: str) -> None:
    weight = torch.randn(64, 384, generator=torch.Generator().manual_seed(1)) * 0.05
    for bits in (4, 8):
        parts = quantize(weight.numpy(), bits, GROUP)
        expected = decode(Matrix(Affine(bits, GROUP, "BF16"), tuple(weight.shape), parts, "check"))
        found = quantized(weight.to(device), bits).cpu().numpy()
        print(f"quantiser, {bits} bits: {np.mean(found != expected):.5f} of the values differ")


def check_delta(device: str, length: int = 512) -> None:
    """The chunked form and its gradients on `device` against the token-by-token recurrence in float64."""
    generator = torch.Generator().manual_seed(2)

    def draw(*size: int) -> Tensor:
        return torch.randn(size, generator=generator)

    unit = torch.nn.functional.normalize
    q, k = unit(draw(2, length, 2, 64), dim=-1), unit(draw(2, length, 2, 64) + 0.5, dim=-1)
    v, g, beta = draw(2, length, 4, 64), -draw(2, length, 4).exp() * 0.1, draw(2, length, 4).sigmoid()
    inputs = (q, k, v, g, beta)
    probe = draw(2, length, 4, 64)
    results = []
    for place, rule, dtype in ((device, delta.gated_delta_rule, torch.float32), ("cpu", _recurrence, torch.float64)):
        given = [x.to(place, dtype, copy=True).requires_grad_() for x in inputs]
        out = rule(*given)
        (out * probe.to(out)).sum().backward()
        results.append([out.detach(), *(x.grad for x in given)])
    names = ("output", "dq", "dk", "dv", "dg", "dbeta")
    errors = (f"{n} {difference(a, b):.1e}" for n, a, b in zip(names, *results, strict=True))
    print(f"delta rule on {device}, relative errors: {', '.join(errors)}")


def _recurrence(q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor) -> Tensor:
    share = v.shape[2] // k.shape[2]
    q, k = q.repeat_interleave(share, 2), k.repeat_interleave(share, 2)
    state = v.new_zeros(v.shape[0], v.shape[2], k.shape[3], v.shape[3])
    rows = []
    for t in range(v.shape[1]):
        state = state * g[:, t].exp()[..., None, None]
        change = (v[:, t] - (state * k[:, t, :, :, None]).sum(-2)) * beta[:, t, :, None]
        state = state + k[:, t, :, :, None] * change[:, :, None]
        rows.append((state * q[:, t, :, :, None]).sum(-2))
    return torch.stack(rows, 1)


def check_model(shape: ModelShape, device: str, length: int = 192) -> None:
    """Logits in float32 and, on a GPU, bfloat16 (whose routing flips make it differ more)."""
    from transformers import Qwen3_5MoeForCausalLM, Qwen3_5MoeTextConfig

    config = Qwen3_5MoeTextConfig(**text_config(shape))
    reference = Qwen3_5MoeForCausalLM._from_config(config, dtype=torch.float32, attn_implementation="eager").eval()
    mine = Model(shape)
    initialize(mine, 3)
    with torch.no_grad():
        for name, weight in mine.named_parameters():
            if "norm" in name:
                weight += 0.2 * torch.randn(weight.shape)
    missing = reference.load_state_dict({**mine.state_dict()}, strict=False)
    assert not missing.unexpected_keys, missing
    assert set(missing.missing_keys) <= {"lm_head.weight"}, missing
    reference.tie_weights()
    tokens = torch.randint(0, shape.vocab, (2, length))
    torch.set_float32_matmul_precision("highest")
    with torch.no_grad():
        expected = reference(tokens).logits
        print(f"logits, float32 on {device}: {difference(mine.to(device).logits(tokens.to(device)), expected):.1e}")
        if device == "cuda":
            Optimizer(mine).publish(False)
            print(f"logits, bfloat16 on {device}: {difference(mine.logits(tokens.to(device)), expected):.1e}")
    torch.set_float32_matmul_precision("high")


def check_speed(shape: ModelShape, rows: int, length: int, steps: int = 20, profile: bool = False) -> None:
    model = Model(shape)
    initialize(model, 1)
    model.cuda()
    optimizer = Optimizer(model)
    model.compile_parts()

    def step() -> None:
        tokens = torch.randint(0, shape.vocab, (rows, length + 1), device="cuda")
        losses, routing = model.losses(tokens[:, :-1], tokens[:, 1:], 0.1)
        (losses.mean() + 0.01 * routing.imbalance.mean()).backward()
        optimizer.step(Rates(1e-3, 1e-3, 0.1, 0.1))
        model.zero_grad(set_to_none=True)
        optimizer.publish(True)

    started = time.monotonic()
    for _ in range(3):
        step()
    torch.cuda.synchronize()
    compiled = time.monotonic()
    for _ in range(steps):
        step()
    torch.cuda.synchronize()
    speed = steps * rows * length / (time.monotonic() - compiled)
    memory = torch.cuda.max_memory_allocated() / 2**30
    print(
        f"{rows} x {length}: {speed / 1e3:.0f}k tokens/s, {memory:.1f} GiB; first steps {compiled - started:.0f} s",
        flush=True,
    )
    if profile:
        _profile(step)


def _profile(step: Any) -> None:
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profiler:
        for _ in range(3):
            step()
        torch.cuda.synchronize()
    print(profiler.key_averages().table(sort_by="self_cuda_time_total", row_limit=40, max_name_column_width=70))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--speed", action="store_true")
    arguments = parser.parse_args()
    device = "cuda" if torch.cuda.is_available() else "cpu"
    torch.manual_seed(0)
    check_quantizer(device)
    check_delta(device)
    check_model(ModelShape() if device == "cuda" else ModelShape(vocab=512, layers=4, experts=8, hidden=128), device)
    if arguments.speed:
        torch.set_float32_matmul_precision("high")
        check_speed(ModelShape(), 32, 2048, profile=True)


if __name__ == "__main__":
    main()
