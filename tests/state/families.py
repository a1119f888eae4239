"""Engines over the four families and the logits of any tokens, from a sequence that never went back."""

from __future__ import annotations

from functools import cache

import moeflux
from conftest import DATA

FAMILIES = ["qwen3_moe-4bit-f32", "qwen3_next-4bit-f32", "qwen3_5_moe_vl_fused-4bit-f32", "deepseek_v3-4bit-f32"]
HYBRID = "qwen3_5_moe_vl_fused-4bit-f32"
LATENT = "deepseek_v3-4bit-f32"
PLAIN = "qwen3_moe-4bit-f32"


@cache
def opened(name, **options):
    return moeflux.load(DATA / "mlx" / name, threads=1, context=1024, **options)


@cache
def _fresh(name, tokens):
    return opened(name).score(tokens)[-1]


def fresh_logits(name, tokens):
    """Of the last token."""
    return _fresh(name, tuple(tokens))


def text(n, branch=0, first=0):
    """Tokens at positions first, first + 1, ...: equal in one branch, different in others."""
    return [(7 * i + 131 * branch + i * i % 37) % 512 for i in range(first, first + n)]
