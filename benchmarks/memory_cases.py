"""What one process does whose memory is measured: `python benchmarks/memory_cases.py CASE MODEL RAM`."""

from __future__ import annotations

import sys

import moeflux
from moeflux.api import Engine
from moeflux.core.errors import BudgetError
from moeflux.session.entry import Limits
from moeflux.session.handle import RequestOptions
from moeflux.session.prefixes import PrefixStore
from moeflux.session.session import Session
from moeflux.session.worker import Worker

CONTEXT = 1024
PROMPT = 700
N_CONVERSATIONS = 8
N_TOKENS = 8


def conversations(model: str, ram: str) -> None:
    """Eight callers at a time through the worker, each with a long prompt of its own, two turns each."""
    with (
        moeflux.load(model, ram=ram, context=CONTEXT, sequences=N_CONVERSATIONS) as engine,
        Worker(engine, engine.text) as worker,
    ):
        texts = [prompt(engine, i, PROMPT) for i in range(N_CONVERSATIONS)]
        for turn in range(2):
            handles = [worker.submit(ids, RequestOptions(max_tokens=N_TOKENS)) for ids in texts]
            answers = [[token.id for token in handle.tokens()] for handle in handles]
            for i, answer in enumerate(answers):
                texts[i] += [*answer, *prompt(engine, i + turn, 50)]


def prefixes(model: str, ram: str) -> None:
    """More prompts than the store has room for, some of which begin alike."""
    with moeflux.load(model, ram=ram, context=CONTEXT, prefixes="48MB") as engine:
        store = PrefixStore(engine, Limits(ram_bytes=engine.config.prefix_bytes))
        for i in range(12):
            session = Session(engine, store, anchor_every=256)
            session.sync([*prompt(engine, 0, 300), *prompt(engine, i % 5, 300)])
            session.anchor()


def too_much(model: str, ram: str) -> None:
    """What nobody planned for: sequences, checkpoints and logits until each is refused, then text on top."""
    with moeflux.load(model, ram=ram, context=CONTEXT) as engine:
        sequences = []
        try:
            for i in range(200):
                sequences.append(engine.sequence())
                engine.prefill(sequences[-1], prompt(engine, i, 300))
                sequences[-1].limit_checkpoints(1000)
                sequences[-1].checkpoint()
        except BudgetError:
            pass
        try:
            kept = [engine.score(prompt(engine, 1, CONTEXT)) for _ in range(20)]
        except BudgetError:
            kept = []
        sequences.clear()
        kept.clear()
        grammar = moeflux.Grammar.regex("[a-z]{5}")
        for _ in engine.generate("some text to go on with", max_tokens=4, grammar=grammar):
            pass


def prompt(engine: Engine, seed: int, n: int) -> list[int]:
    return [(7 * i * (seed + 1) + 131 * seed) % 4000 % engine.spec.vocab for i in range(n)]


if __name__ == "__main__":
    {"conversations": conversations, "prefixes": prefixes, "too much": too_much}[sys.argv[1]](*sys.argv[2:])
