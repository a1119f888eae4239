"""Reading the corpus: one document a line, paragraphs separated by a blank line."""

import json
import lzma
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

FAIRY_TALES = "fairytaleqa"


@dataclass(frozen=True)
class Document:
    source: str
    title: str
    text: str


def read_corpus(path: Path) -> Iterator[Document]:
    with lzma.open(path, "rt", encoding="utf-8") as lines:
        for line in lines:
            row = json.loads(line)
            yield Document(row["source"], row["title"], row["text"])


def paragraphs(text: str) -> list[str]:
    """Whole paragraphs: some sources break lines inside sentences, which shows in how a paragraph ends and goes on."""
    joined: list[str] = []
    for part in text.split("\n\n"):
        part = " ".join(part.split())
        if not part:
            continue
        broken = joined and re.search(r"[\w,;]$", joined[-1]) and re.match(r"[a-z\"'“‘(]", part)
        if broken or (joined and re.search(r"\b(?:Mrs?|Dr|St)\.$", joined[-1])):
            joined[-1] += f" {part}"
        else:
            joined.append(part)
    return joined
