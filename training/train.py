"""The training loop: `python -m training.train DATA RUN [--steps N] [--seconds S]`.

RUN/state.pt holds everything needed to go on; a run that is stopped (by `--seconds`, or by hand after a save) resumes
from it when started again with the same arguments. RUN/weights.pt holds the master weights alone, for `export`.
"""

import argparse
import json
import os
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from training.batches import ChatWindows, PlainWindows, validation_set
from training.config import ModelShape, shape_fields
from training.evaluate import Score, evaluate
from training.model import Model, initialize
from training.optimizer import Optimizer, Rates
from training.prepare import load_arrays


@dataclass(frozen=True)
class Recipe:
    """Shares are of the whole run: one stage follows the other without a break in the learning rate."""

    steps: int = 9000
    rows: int = 32
    length: int = 2048
    rate: float = 3e-3
    matrix_decay: float = 0.8
    other_decay: float = 0.1
    dropout: float = 0.2
    balance: float = 0.01  # weight of the load-balancing loss
    warmup_steps: int = 150
    cool_from: float = 0.4  # the learning rate falls to zero from here on
    quantize_from: float = 0.7  # weights are rounded to their stored values from here on
    chat_from: float = 0.9
    chat_share: float = 0.25  # of the rows of a step, then
    tale_rounds: int = 1
    seed: int = 1

    def learning_rate(self, step: int) -> float:
        warm = min(1.0, (step + 1) / self.warmup_steps)
        cool = min(1.0, (1 - step / self.steps) / (1 - self.cool_from))
        return self.rate * warm * cool

    def quantizes(self, step: int) -> bool:
        return step >= self.quantize_from * self.steps

    def chat_rows(self, step: int) -> int:
        return round(self.chat_share * self.rows) if step >= self.chat_from * self.steps else 0


class Trainer:
    def __init__(self, recipe: Recipe, shape: ModelShape, data: Path, run: Path, device: str) -> None:
        self.recipe, self.run = recipe, run
        arrays = load_arrays(data)
        self.model = Model(shape)
        initialize(self.model, recipe.seed)
        self.model.to(device)
        self.optimizer = Optimizer(self.model)
        self.plain = PlainWindows(arrays, recipe.length, recipe.tale_rounds, recipe.seed, device)
        self.chat = ChatWindows(arrays, recipe.length, recipe.seed, device)
        self.validation = validation_set(arrays, recipe.length, device)
        self.step = 0
        if device == "cuda":
            self.model.compile_parts()
        if (run / "state.pt").exists():
            self._resume()
        self.optimizer.publish(recipe.quantizes(self.step))

    def advance(self) -> tuple[Tensor, Tensor]:
        """One step: mean nats per target, and the balancing loss of each layer."""
        recipe = self.recipe
        n_chat = recipe.chat_rows(self.step)
        tokens, targets = self.plain.draw(recipe.rows - n_chat)
        if n_chat:
            more_tokens, more_targets = self.chat.draw(n_chat)
            tokens, targets = torch.cat([tokens, more_tokens]), torch.cat([targets, more_targets])
        losses, routing = self.model.losses(tokens, targets, recipe.dropout)
        nats = losses.sum() / (targets >= 0).sum()
        (nats + recipe.balance * routing.imbalance.mean()).backward()
        rate = recipe.learning_rate(self.step)
        self.optimizer.step(Rates(rate, rate, recipe.matrix_decay, recipe.other_decay))
        self.model.zero_grad(set_to_none=True)
        self.step += 1
        self.optimizer.publish(recipe.quantizes(self.step))
        return nats.detach(), routing.imbalance.detach()

    def score(self, quantize: bool) -> Score:
        self.optimizer.publish(quantize)
        score = evaluate(self.model, self.validation)
        self.optimizer.publish(self.recipe.quantizes(self.step))
        return score

    def save(self) -> None:
        drawn = (self.plain.deck.drawn, self.chat.deck.drawn)
        state = {"step": self.step, "drawn": drawn, "optimizer": self.optimizer.state()}
        _write(self.run / "state.pt", lambda path: torch.save(state, path))
        self.save_weights()

    def save_weights(self) -> None:
        masters = {name: master.cpu().clone() for name, master in self.optimizer.named_masters().items()}
        content = {"shape": shape_fields(self.model.shape), "step": self.step, "weights": masters}
        _write(self.run / "weights.pt", lambda path: torch.save(content, path))

    def _resume(self) -> None:
        device = next(self.model.parameters()).device
        state: dict[str, Any] = torch.load(self.run / "state.pt", map_location=device)
        self.step = state["step"]
        self.plain.deck.drawn, self.chat.deck.drawn = state["drawn"]
        self.optimizer.restore(state["optimizer"])


def _write(path: Path, write: Callable[[Path], None]) -> None:
    temporary = path.with_suffix(".part")
    write(temporary)
    os.replace(temporary, path)


def train(trainer: Trainer, seconds: float, log_every: int, score_every: int) -> bool:
    """Until the last step or until the time is up, and saved then. Whether it is finished."""
    recipe, started = trainer.recipe, time.monotonic()
    last = started
    total = torch.zeros((), device=next(trainer.model.parameters()).device)
    while trainer.step < recipe.steps and time.monotonic() - started < seconds:
        nats, imbalance = trainer.advance()
        total += nats
        step = trainer.step
        if step % log_every == 0:
            mean, worst = float(total) / log_every, float(imbalance.max())
            total.zero_()
            now = time.monotonic()
            speed = log_every * recipe.rows * recipe.length / (now - last)
            last = now
            seen = f"step {step} nats {mean:.4f} imbalance {worst:.3f} rate {recipe.learning_rate(step):.2e}"
            print(f"{seen} {speed / 1e3:.0f}k tokens/s {now - started:.0f} s", flush=True)
            if mean != mean:
                raise FloatingPointError(f"the loss is not a number at step {step}")
        if step % score_every == 0 and step < recipe.steps:
            report(trainer)
            trainer.save_weights()
            last = time.monotonic()
    trainer.save()
    if trainer.step == recipe.steps:
        report(trainer)
        return True
    return False


def report(trainer: Trainer) -> None:
    for quantize in (False, True):
        print(f"validation {'4-bit' if quantize else 'bf16'}: {trainer.score(quantize).summary()}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("data", type=Path)
    parser.add_argument("run", type=Path)
    parser.add_argument("--seconds", type=float, default=float("inf"))
    parser.add_argument("--log-every", type=int, default=50)
    parser.add_argument("--score-every", type=int, default=500)
    parser.add_argument("--recipe", default="{}", help="JSON: other values for fields of the recipe")
    parser.add_argument("--shape", default="{}", help="JSON: other values for fields of the shape")
    arguments = parser.parse_args()
    recipe = Recipe(**json.loads(arguments.recipe))
    device = "cuda" if torch.cuda.is_available() else "cpu"
    torch.set_float32_matmul_precision("high")
    arguments.run.mkdir(parents=True, exist_ok=True)
    torch.manual_seed(recipe.seed)
    trainer = Trainer(recipe, ModelShape(**json.loads(arguments.shape)), arguments.data, arguments.run, device)
    print(
        f"recipe {json.dumps(asdict(recipe))}; {len(trainer.plain.deck)} windows of text, {len(trainer.chat.deck)} of chat"
    )
    done = train(trainer, arguments.seconds, arguments.log_every, arguments.score_every)
    print("finished" if done else f"stopped at step {trainer.step}", flush=True)


if __name__ == "__main__":
    main()
