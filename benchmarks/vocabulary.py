"""A byte-level BPE tokenizer.json of any size, made from a seed, as large in files and in memory as real ones."""

from __future__ import annotations

import json
import random
from pathlib import Path

ADDED = ("<|endoftext|>", "<|im_start|>", "<|im_end|>", "<think>", "</think>", "<tool_call>", "</tool_call>")
N_SPECIAL = 3
LETTERS = "etaoinshrdlucmfwypvbgkjqxz"
CHATML = """{%- for message in messages -%}<|im_start|>{{ message.role }}
{{ message.content }}<|im_end|>
{% endfor %}{%- if add_generation_prompt -%}<|im_start|>assistant
{% endif %}"""


def write_vocabulary(folder: Path, n_ids: int, seed: int = 0) -> None:
    """tokenizer.json, tokenizer_config.json and a chat template beside the weights of a model."""
    (folder / "tokenizer.json").write_text(json.dumps(make_tokenizer(n_ids, seed), ensure_ascii=False))
    (folder / "tokenizer_config.json").write_text(json.dumps({"eos_token": "<|im_end|>"}))
    (folder / "chat_template.jinja").write_text(CHATML)


def make_tokenizer(n_ids: int, seed: int) -> dict[str, object]:
    """Every merge puts one more letter behind a token that is there already."""
    chosen = random.Random(seed)
    vocab = {character: i for i, character in enumerate(_alphabet())}
    grown, merges = [*LETTERS, _alphabet()[ord(" ")]], []
    while len(vocab) < n_ids - len(ADDED):
        left, right = chosen.choice(grown), chosen.choice(LETTERS)
        if left + right not in vocab:
            vocab[left + right] = len(vocab)
            merges.append([left, right])
            grown.append(left + right)
    flags = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False}
    added = [{"id": len(vocab) + i, "content": c, "special": i < N_SPECIAL, **flags} for i, c in enumerate(ADDED)]
    byte_level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True}
    model = {"type": "BPE", "vocab": vocab, "merges": merges}
    return {
        "version": "1.0", "added_tokens": added, "normalizer": {"type": "NFC"}, "pre_tokenizer": byte_level,
        "decoder": byte_level, "model": model,
    }  # fmt: skip


def _alphabet() -> list[str]:
    """How byte-level tokenizers write bytes: printable ones as themselves, the others as characters from 256 on."""
    printable = {*range(33, 127), *range(161, 173), *range(174, 256)}
    others = iter(range(256, 512))
    return [chr(byte) if byte in printable else chr(next(others)) for byte in range(256)]
