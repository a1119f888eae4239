"""Text comes out whole: no half characters, nothing lost."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from conftest import DATA
from moeflux import FormatError, MissingTensorError
from moeflux.text.tokenizer import Detokenizer, Tokenizer

TOKENIZER = Tokenizer.open(DATA / "mlx" / "qwen3_moe-4bit-f32")


@given(st.text(st.characters(exclude_categories=["Cs"]), max_size=40))
def test_pieces_join_to_the_text(text):
    ids = TOKENIZER.encode(text)
    detokenizer = Detokenizer(TOKENIZER)
    pieces = [detokenizer.add(token) for token in ids]
    assert "".join(pieces) + detokenizer.finish() == TOKENIZER.decode(ids)


def test_characters_are_never_split():
    ids = TOKENIZER.encode("né🙂漢")
    detokenizer = Detokenizer(TOKENIZER)
    pieces = [detokenizer.add(token) for token in ids]
    assert all("\ufffd" not in piece for piece in pieces)
    assert "".join(pieces) == "né🙂漢"


def test_an_unfinished_character_is_not_lost():
    detokenizer = Detokenizer(TOKENIZER)
    first = TOKENIZER.encode("🙂")[0]
    assert detokenizer.add(first) == ""
    assert detokenizer.finish() == "\ufffd"


def test_missing_and_broken_tokenizers(tmp_path):
    with pytest.raises(MissingTensorError, match=r"tokenizer\.json"):
        Tokenizer.open(tmp_path)
    (tmp_path / "tokenizer.json").write_text("{}")
    with pytest.raises(FormatError, match=r"tokenizer\.json"):
        Tokenizer.open(tmp_path)
