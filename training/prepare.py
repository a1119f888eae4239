"""From the corpus to arrays of tokens: `python -m training.prepare CORPUS DATA`.

Writes DATA/tokenizer.json and DATA/tokens.npz (xz inside, so that it is small enough to carry to a GPU machine).
"""

import argparse
import io
import lzma
import random
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np
from tokenizers import Tokenizer

from training.chat import Conversation, conversations, small_talk
from training.config import END_OF_TEXT, IM_END, IM_START, ModelShape
from training.corpus import FAIRY_TALES, Document, read_corpus
from training.tokenizer import train_tokenizer, write_tokenizer_files

CHAT_SHARES = {FAIRY_TALES: 1.0, "eltec": 0.5, "novels100": 0.5}  # of the passages of a source
TALE_ROUNDS = 2  # different cuts and requests for each fairy tale
SMALL_TALKS = 150
DATA_FILE = "tokens.npz.xz"


def prepare(corpus: Path, folder: Path, vocab: int) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    train = sorted(read_corpus(corpus / "train.jsonl.xz"), key=lambda document: document.source != FAIRY_TALES)
    validation = list(read_corpus(corpus / "validation.jsonl.xz"))
    started = time.monotonic()
    tokenizer = train_tokenizer((document.text for document in train), vocab)
    write_tokenizer_files(tokenizer, folder, ModelShape().context)
    print(f"tokenizer: {time.monotonic() - started:.0f} s", flush=True)
    arrays = {
        **encode_plain(tokenizer, train),
        **encode_validation(tokenizer, validation),
        **encode_chat(tokenizer, train),
    }
    buffer = io.BytesIO()
    np.savez(buffer, **arrays)
    (folder / DATA_FILE).write_bytes(lzma.compress(buffer.getvalue(), preset=6))
    for name, array in arrays.items():
        print(f"{name}: {array.dtype} {array.shape}")
    chars = int(arrays["validation_chars"].sum())
    print(f"{chars / arrays['validation'].size:.3f} characters per token of validation; {time.monotonic() - started:.0f} s")


def load_arrays(folder: Path) -> dict[str, np.ndarray]:
    with lzma.open(folder / DATA_FILE) as file:
        return dict(np.load(io.BytesIO(file.read())))


def encode_plain(tokenizer: Tokenizer, documents: Sequence[Document]) -> dict[str, np.ndarray]:
    """All documents in one stream, fairy tales first, each ended by the end-of-text token."""
    parts = [np.array([*tokenizer.encode(document.text).ids, END_OF_TEXT], dtype=np.uint16) for document in documents]
    tales = sum(part.size for part, document in zip(parts, documents, strict=True) if document.source == FAIRY_TALES)
    return {"train": np.concatenate(parts), "train_tales": np.array(tales)}


def encode_validation(tokenizer: Tokenizer, documents: Sequence[Document]) -> dict[str, np.ndarray]:
    parts = [np.array(tokenizer.encode(document.text).ids, dtype=np.uint16) for document in documents]
    return {
        "validation": np.concatenate(parts),
        "validation_sizes": np.array([part.size for part in parts]),
        "validation_chars": np.array([len(document.text) for document in documents]),
        "validation_tales": np.array([document.source == FAIRY_TALES for document in documents]),
    }


def encode_chat(tokenizer: Tokenizer, documents: Sequence[Document]) -> dict[str, np.ndarray]:
    """Conversations in one stream in random order; `chat_answers` marks the tokens that the model learns to say."""
    random_ = random.Random(1)
    encoded = [encode_conversation(tokenizer, turns) for turns in _all_conversations(documents, random_)]
    random_.shuffle(encoded)
    sizes = [len(ids) for ids, _ in encoded]
    return {
        "chat": np.concatenate([np.array(ids, dtype=np.uint16) for ids, _ in encoded]),
        "chat_answers": np.concatenate([np.array(answer, dtype=bool) for _, answer in encoded]),
        "chat_sizes": np.array(sizes),
    }


def _all_conversations(documents: Sequence[Document], random_: random.Random) -> Iterator[Conversation]:
    for document in documents:
        rounds = TALE_ROUNDS if document.source == FAIRY_TALES else 1
        for _ in range(rounds):
            yield from conversations(document, random_, CHAT_SHARES[document.source])
    for _ in range(SMALL_TALKS):
        yield small_talk(random_)


def encode_conversation(tokenizer: Tokenizer, turns: Conversation) -> tuple[list[int], list[bool]]:
    """As the chat template writes it."""
    newline = tokenizer.encode("\n").ids
    ids: list[int] = []
    answers: list[bool] = []
    for role, text in turns:
        head = [IM_START, *tokenizer.encode(f"{role}\n").ids]
        body = [*tokenizer.encode(text.strip()).ids, IM_END]
        ids += [*head, *body, *newline]
        answers += [False] * len(head) + [role == "assistant"] * len(body) + [False] * len(newline)
    return ids, answers


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("corpus", type=Path)
    parser.add_argument("data", type=Path)
    parser.add_argument("--vocab", type=int, default=ModelShape().vocab)
    arguments = parser.parse_args()
    prepare(arguments.corpus, arguments.data, arguments.vocab)


if __name__ == "__main__":
    main()
