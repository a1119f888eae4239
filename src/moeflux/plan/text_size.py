"""What text costs in memory, before any of it is read: tokenizer, vocabulary for constraints, logits and sampling.

Measured with byte-level BPE tokenizers of 8,000 to 248,000 ids (`python benchmarks/memory.py --text`), and rounded up. It
follows from the number of ids and the size of tokenizer.json.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from moeflux.core.config import TextUse
from moeflux.formats.checkpoint import has_weights

MIB = 2**20

LEAST_ID_BYTES = 12  # of an id in tokenizer.json: its text, its number, what separates them
USUAL_ID_BYTES = 50  # the same with its merge, for a model of which only config.json is here

KEPT_ID_BYTES, KEPT_FILE_SHARE = 300, 2  # of an open tokenizer: tables in both directions, merges, and the texts twice
OPEN_ID_BYTES, OPEN_FILE_SHARE = 700, 3  # while it is being opened: the file, its parts, and what is made of them
TEXT_BYTES = 16 * MIB  # words that the tokenizer remembers, and a piece of text that is being encoded
CONSTRAINT_ID_BYTES = 450  # pieces as bytes, llguidance's tree of them, and the pieces by their bytes
CONSTRAINT_BYTES = 4 * MIB  # and a grammar for each sequence:
GRAMMAR_BYTES = 2 * MIB

TURN_BYTES = 16 * MIB  # of logits that are computed together where every token's are wanted
TURN_ROWS = 128
RETURNED_BYTES = 8 * MIB  # of logits that are handed out, as `score` does
ROW_ID_BYTES = 5  # of a row of logits and of the test whether it is finite
TALLY_ID_BYTES = 8  # of a sequence: which tokens came how often
SAMPLING_ID_BYTES = 48  # while one token is chosen


@dataclass(frozen=True)
class TextNeeds:
    """Bytes. `opening`: while the tokenizer is opened, which is before any weight is loaded."""

    kept: int = 0
    opening: int = 0
    constraints: int = 0


def text_needs(model: Path, vocab: int, use: TextUse, sequences: int = 1) -> TextNeeds:
    """Of a model folder; of a bare config.json as if there was a usual tokenizer beside it."""
    path = model / "tokenizer.json"
    if use == "none" or (has_weights(model) and not path.exists()):
        return TextNeeds()
    n_bytes = path.stat().st_size if path.exists() else USUAL_ID_BYTES * vocab
    n_ids = min(vocab, n_bytes // LEAST_ID_BYTES)
    constraints = CONSTRAINT_ID_BYTES * n_ids + CONSTRAINT_BYTES + GRAMMAR_BYTES * sequences
    return TextNeeds(
        kept=KEPT_ID_BYTES * n_ids + KEPT_FILE_SHARE * n_bytes + TEXT_BYTES,
        opening=OPEN_ID_BYTES * n_ids + OPEN_FILE_SHARE * n_bytes + TEXT_BYTES,
        constraints=constraints if use == "all" else 0,
    )


def turn_rows(vocab: int) -> int:
    """Rows of logits that are computed together where every token's are wanted."""
    return max(1, min(TURN_ROWS, TURN_BYTES // (4 * vocab)))


def logit_rows(vocab: int, sequences: int) -> int:
    """Rows of logits that there is memory for: those of a turn, or of all sequences before and after a step."""
    return max(turn_rows(vocab), 2 * sequences)


def logit_bytes(vocab: int, sequences: int) -> int:
    each = ROW_ID_BYTES * logit_rows(vocab, sequences) + TALLY_ID_BYTES * sequences + SAMPLING_ID_BYTES
    return vocab * each + RETURNED_BYTES
