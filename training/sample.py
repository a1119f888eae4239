"""Text from a model folder through moeflux: `python -m training.sample FOLDER [PROMPT ...] [--chat]`."""

import argparse
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np

import moeflux
from moeflux.session.generate import end_tokens
from moeflux.text.tokenizer import Tokenizer
from training.config import IM_END, IM_START

PROMPTS = ("Once upon a time", "It was late in the evening when", "The old king", "Chapter I\n\n")
REQUESTS = (
    "Tell me a story about a fox and a king.",
    "Hello!",
    "Who are you?",
    "Continue: The door opened slowly, and a stranger came in.",
    "Tell me about the sea.",
)


@dataclass(frozen=True)
class Sampling:
    temperature: float = 0.7
    top_p: float = 1.0
    penalty: float = 1.0  # of tokens that occurred, as in transformers


def sample(engine: moeflux.Engine, ids: list[int], n: int, how: Sampling, random: np.random.Generator) -> Iterator[int]:
    ends, sequence, pending, seen = end_tokens(engine), engine.sequence(), ids, set(ids)
    for _ in range(n):
        (rows,) = engine.forward(moeflux.Segment(sequence, pending))
        assert rows is not None
        logits, repeated = rows[0].astype(np.float64), list(seen)
        logits[repeated] *= np.where(logits[repeated] > 0, 1 / how.penalty, how.penalty)
        token = _choose(logits / how.temperature, how.top_p, random)
        if token in ends:
            return
        yield token
        pending = [token]
        seen.add(token)


def _choose(logits: np.ndarray, top_p: float, random: np.random.Generator) -> int:
    order = np.argsort(-logits)
    shares = np.exp(logits[order] - logits[order[0]])
    shares /= shares.sum()
    shares[np.cumsum(shares) - shares >= top_p] = 0
    return int(order[random.choice(len(order), p=shares / shares.sum())])


def chat_ids(tokenizer: Tokenizer, request: str) -> list[int]:
    """One request, as the chat template writes it."""
    newline = tokenizer.encode("\n")
    user, assistant = tokenizer.encode("user\n"), tokenizer.encode("assistant\n")
    return [IM_START, *user, *tokenizer.encode(request), IM_END, *newline, IM_START, *assistant]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path)
    parser.add_argument("prompts", nargs="*")
    parser.add_argument("--chat", action="store_true")
    parser.add_argument("--tokens", type=int, default=200)
    parser.add_argument("--temperature", type=float, default=Sampling.temperature)
    parser.add_argument("--top-p", type=float, default=Sampling.top_p)
    parser.add_argument("--penalty", type=float, default=Sampling.penalty)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--backend", default="auto")
    arguments = parser.parse_args()
    tokenizer = Tokenizer.open(arguments.folder)
    random = np.random.default_rng(arguments.seed)
    how = Sampling(arguments.temperature, arguments.top_p, arguments.penalty)
    with moeflux.load(arguments.folder, backend=arguments.backend) as engine:
        for prompt in arguments.prompts or (REQUESTS if arguments.chat else PROMPTS):
            ids = chat_ids(tokenizer, prompt) if arguments.chat else tokenizer.encode(prompt)
            found = list(sample(engine, ids, arguments.tokens, how, random))
            print(f"### {prompt!r}\n\n{tokenizer.decode(found)}\n", flush=True)


if __name__ == "__main__":
    main()
