"""Tiny models that can hold a conversation: a committed checkpoint with a tokenizer and a template of our own."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

from conftest import DATA
from text import tiny

CHECKPOINT = DATA / "mlx" / "qwen3_5_moe_vl_fused-4bit-f32"
TEMPLATES = Path(__file__).parent.parent / "text" / "templates"
NAMES = {"eos_token": "<|im_end|>", "pad_token": "<|endoftext|>"}


def chat_model(folder: Path, template: str | None = "chatml", generation: dict | None = None) -> Path:
    """Its weights are random, so what it says means nothing, but it says it by the rules."""
    shutil.copytree(CHECKPOINT, folder)
    (folder / "tokenizer.json").write_text(tiny.byte_level("qwen").to_json())
    (folder / "tokenizer_config.json").write_text(json.dumps(NAMES))
    (folder / "generation_config.json").write_text(json.dumps(generation or {}))
    if template:
        shutil.copy(TEMPLATES / f"{template}.jinja", folder / "chat_template.jinja")
    return folder


def readable(text) -> dict[int, float]:
    """A bias towards tokens that are letters: random weights otherwise mostly say broken bytes."""
    pieces = {id: text.tokenizer.piece(id) for id in range(text.n_ids)}
    return {id: 50.0 for id, piece in pieces.items() if piece.isalpha() and id not in text.tokenizer.added.values()}
