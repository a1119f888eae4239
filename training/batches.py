"""Windows of tokens for training and validation. What a step gets depends on the seed and the rows drawn before it."""

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from training.config import END_OF_TEXT

IGNORED = -1


class Deck:
    """Rows in the order that `deal(epoch)` gives, epoch after epoch."""

    def __init__(self, deal: Callable[[int], np.ndarray]) -> None:
        self._deal, self._epoch, self._rows = deal, 0, deal(0)
        self.drawn = 0  # in all epochs; may be set, to go on from there

    def __len__(self) -> int:
        return len(self._rows)

    def draw(self, n: int) -> np.ndarray:
        return np.array([self._next() for _ in range(n)])

    def _next(self) -> int:
        epoch, index = divmod(self.drawn, len(self._rows))
        if epoch != self._epoch:
            self._epoch, self._rows = epoch, self._deal(epoch)
        self.drawn += 1
        return int(self._rows[index])


class PlainWindows:
    """The stream cut into windows, anew and in another order in every epoch; fairy tales come several times."""

    def __init__(self, arrays: dict[str, np.ndarray], length: int, tale_rounds: int, seed: int, device: str) -> None:
        stream, n_tales = arrays["train"], int(arrays["train_tales"])
        self._stream = torch.from_numpy(stream.astype(np.int32)).to(device)
        self._length, self._seed = length, seed
        self._sizes = [len(stream), *[n_tales] * (tale_rounds - 1)]
        self.deck = Deck(self._cut)

    def draw(self, n: int) -> tuple[Tensor, Tensor]:
        window = self._stream[_span(self.deck.draw(n), self._length, self._stream.device)].long()
        return window[:, :-1], window[:, 1:]

    def _cut(self, epoch: int) -> np.ndarray:
        random = np.random.default_rng((self._seed, epoch))
        starts = []
        for size in self._sizes:
            count = size // self._length - 1  # one window less than fit, so that every offset gives as many
            starts.append(random.integers(0, self._length) + self._length * np.arange(count))
        return random.permutation(np.concatenate(starts))


class ChatWindows:
    """Whole conversations packed into windows; only answers are learnt."""

    def __init__(self, arrays: dict[str, np.ndarray], length: int, seed: int, device: str) -> None:
        self._tokens = torch.from_numpy(arrays["chat"].astype(np.int32)).to(device)
        self._answers = torch.from_numpy(arrays["chat_answers"]).to(device)
        self._length = length
        starts = _pack(np.cumsum(arrays["chat_sizes"]) - arrays["chat_sizes"], len(arrays["chat"]), length)
        self.deck = Deck(lambda epoch: np.random.default_rng((seed, epoch)).permutation(starts))

    def draw(self, n: int) -> tuple[Tensor, Tensor]:
        at = _span(self.deck.draw(n), self._length, self._tokens.device)
        window = self._tokens[at].long()
        return window[:, :-1], torch.where(self._answers[at[:, 1:]], window[:, 1:], IGNORED)


def _span(starts: np.ndarray, length: int, device: torch.device) -> Tensor:
    return torch.from_numpy(starts).to(device)[:, None] + torch.arange(length + 1, device=device)


def _pack(starts: np.ndarray, total: int, length: int) -> np.ndarray:
    """Windows that begin with a conversation; the last one in a window may be cut, and begins the next window."""
    chosen, at = [], 0
    while at < len(starts) and starts[at] + length + 1 <= total:
        chosen.append(starts[at])
        at = max(at + 1, int(np.searchsorted(starts, starts[at] + length, side="right")) - 1)
    return np.array(chosen, dtype=np.int64)


@dataclass(frozen=True)
class ValidationSet:
    """Every token of every document is predicted once, from at most `length` tokens before it."""

    tokens: Tensor  # [rows, length]
    targets: Tensor
    is_tale: Tensor  # [rows]
    chars: dict[str, int]  # of "tales" and "novels"


def validation_set(arrays: dict[str, np.ndarray], length: int, device: str) -> ValidationSet:
    tokens, targets, is_tale, at = [], [], [], 0
    chars = {"tales": 0, "novels": 0}
    rows = zip(arrays["validation_sizes"], arrays["validation_chars"], arrays["validation_tales"], strict=True)
    for size, n_chars, tale in rows:
        text = arrays["validation"][at : at + size].astype(np.int64)
        at += size
        chars["tales" if tale else "novels"] += int(n_chars)
        for start in range(0, size, length):
            wanted = text[start : start + length]
            before = np.concatenate([text[start - 1 : start] if start else [END_OF_TEXT], wanted[:-1]])
            missing = length - len(wanted)
            tokens.append(np.pad(before, (0, missing), constant_values=END_OF_TEXT))
            targets.append(np.pad(wanted, (0, missing), constant_values=IGNORED))
            is_tale.append(bool(tale))
    return ValidationSet(
        torch.from_numpy(np.stack(tokens)).to(device),
        torch.from_numpy(np.stack(targets)).to(device),
        torch.tensor(is_tale, device=device),
        chars,
    )
