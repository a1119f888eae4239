"""Tiny tokenizers of several kinds, made here, with the added tokens that real families have."""

from __future__ import annotations

from functools import cache

import tokenizers
from tokenizers import decoders, models, normalizers, pre_tokenizers, trainers

from moeflux.text.tokenizer import Tokenizer

CORPUS = [
    "The quick brown fox jumps over the lazy dog. " * 3,
    'He said: {"name": "get_weather", "arguments": {"city": "Köln", "days": 3}}',
    "Größe, naïve, 漢字, кириллица, 🙂🚀, tab\tand\nnewlines\n\n",
    "<function=search><parameter=query>value</parameter></function>",
]

QWEN = {
    "<|endoftext|>": True, "<|im_start|>": True, "<|im_end|>": True,
    "<think>": False, "</think>": False, "<tool_call>": False, "</tool_call>": False,
    "<tool_response>": False, "</tool_response>": False,
}  # fmt: skip
DEEPSEEK = {
    "<｜begin▁of▁sentence｜>": True, "<｜end▁of▁sentence｜>": True, "<｜User｜>": False, "<｜Assistant｜>": False,
    "<think>": False, "</think>": False, "<｜tool▁calls▁begin｜>": False, "<｜tool▁calls▁end｜>": False,
    "<｜tool▁call▁begin｜>": False, "<｜tool▁call▁end｜>": False, "<｜tool▁sep｜>": False,
}  # fmt: skip
KIMI = {
    "[EOS]": True, "<|im_end|>": True, "<|im_user|>": True, "<|im_assistant|>": True, "<|im_middle|>": True,
    "<think>": False, "</think>": False, "<|tool_calls_section_begin|>": False, "<|tool_calls_section_end|>": False,
    "<|tool_call_begin|>": False, "<|tool_call_argument_begin|>": False, "<|tool_call_end|>": False,
}  # fmt: skip
FAMILIES = {"qwen": QWEN, "deepseek": DEEPSEEK, "kimi": KIMI, "bare": {"<|endoftext|>": True}}


@cache
def byte_level(family: str = "qwen", config: tuple[tuple[str, object], ...] = ()) -> Tokenizer:
    inner = tokenizers.Tokenizer(models.BPE())
    inner.normalizer = normalizers.NFC()
    inner.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    inner.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    inner.train_from_iterator(CORPUS, trainers.BpeTrainer(vocab_size=400, initial_alphabet=alphabet, show_progress=False))
    for content, special in FAMILIES[family].items():
        inner.add_tokens([tokenizers.AddedToken(content, special=special, normalized=False)])
    return Tokenizer(inner, dict(config))


@cache
def byte_fallback() -> Tokenizer:
    """As SentencePiece makes them: pieces with a mark for space, and bytes where there is no piece."""
    vocab = {"<unk>": 0, **{f"<0x{byte:02X}>": 1 + byte for byte in range(256)}}
    for piece in ["▁", "▁the", "▁fox", "e", "t", "h", "fo", "x", "ß", "漢"]:
        vocab[piece] = len(vocab)
    inner = tokenizers.Tokenizer(models.BPE(vocab, [], byte_fallback=True, unk_token="<unk>"))
    inner.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    inner.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    return Tokenizer(inner)


@cache
def words() -> Tokenizer:
    """One token per word, joined by spaces."""
    inner = tokenizers.Tokenizer(models.WordLevel({"?": 0, "a": 1, "bird": 2, "sang": 3}, unk_token="?"))
    inner.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return Tokenizer(inner)
