"""The tokenizer: byte-level BPE trained on the corpus, and the files that describe it."""

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers, trainers

from training.config import END_OF_TEXT, IM_END, SPECIAL_TOKENS

# Words with the space before them, single digits, runs of signs with the line ends after them, white space.
PIECES = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"

CHAT_TEMPLATE = (
    "{%- for message in messages %}"
    "{{- '<|im_start|>' + message.role + '\\n' + message.content | trim + '<|im_end|>\\n' }}"
    "{%- endfor %}"
    "{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{%- endif %}"
)


def train_tokenizer(texts: Iterable[str], vocab: int) -> Tokenizer:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(PIECES), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab,
        special_tokens=[AddedToken(token, normalized=False, special=True) for token in SPECIAL_TOKENS],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    return tokenizer


def write_tokenizer_files(tokenizer: Tokenizer, folder: Path, context: int) -> None:
    tokenizer.save(str(folder / "tokenizer.json"))
    settings: dict[str, Any] = {
        "add_prefix_space": False,
        "bos_token": None,
        "chat_template": CHAT_TEMPLATE,
        "clean_up_tokenization_spaces": False,
        "eos_token": SPECIAL_TOKENS[IM_END],
        "model_max_length": context,
        "pad_token": SPECIAL_TOKENS[END_OF_TEXT],
        "tokenizer_class": "PreTrainedTokenizerFast",
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(settings, indent=2) + "\n")
    generation = {
        "do_sample": True,
        "eos_token_id": [IM_END, END_OF_TEXT],
        "pad_token_id": END_OF_TEXT,
        "repetition_penalty": 1.15,
        "temperature": 0.8,
        "top_p": 0.95,
    }
    (folder / "generation_config.json").write_text(json.dumps(generation, indent=2) + "\n")
