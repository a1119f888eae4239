"""What text costs one process: `python benchmarks/memory_text.py FOLDER N_IDS` prints one JSON object."""

from __future__ import annotations

import json
import sys
from pathlib import Path

from moeflux.core.allocator import release_freed
from moeflux.plan.memory import used_at_most, used_now
from moeflux.plan.text_size import text_needs
from moeflux.sampling.constraint import Grammar, Vocabulary
from moeflux.text.tokenizer import Tokenizer


def main(folder: Path, n_ids: int) -> None:
    release_freed()
    before = used_now()
    tokenizer = Tokenizer.open(folder)
    opening = used_at_most() - before
    n = tokenizer.n_ids
    tokenizer.decode(tokenizer.encode("the quick brown fox jumps over the lazy dog\n" * 2000))
    kept = used_now() - before
    pieces = [tokenizer.piece(id) for id in range(n)]
    vocabulary = Vocabulary(pieces, tokenizer.added.values(), [tokenizer.named_id("eos_token")], tokenizer.encode_plain)
    vocabulary.constrain(Grammar.regex("[a-z]{5}")).allowed()
    constraints = used_now() - before - kept
    (folder / "config.json").write_text("{}")
    planned = text_needs(folder, n_ids, "all")
    row = {"n_ids": n, "file": (folder / "tokenizer.json").stat().st_size, "opening": opening, "kept": kept}
    row |= {"constraints": constraints, "planned_opening": planned.opening, "planned_kept": planned.kept}
    print(json.dumps(row | {"planned_constraints": planned.constraints}))


main(Path(sys.argv[1]), int(sys.argv[2]))
