"""Long texts in pieces: the tokens of the whole, in little memory."""

from __future__ import annotations

import pytest
import tokenizers
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import models

from moeflux.session.demo import demo_model
from moeflux.text import pieces
from moeflux.text.tokenizer import Tokenizer
from text import tiny

PROSE = (
    "It's 12 o'clock, isn't it?\n\n  Größe naïve e\u0301té 漢字かな交じり文、кириллица 🙂🚀\ttab \r\n<|im_end|> end. " * 3
)
TOKENIZERS = {"tiny": tiny.byte_level, "demo": lambda: Tokenizer.open(demo_model())}


@pytest.mark.parametrize("name", TOKENIZERS)
@settings(max_examples=60)
@given(
    text=st.lists(
        st.sampled_from([*PROSE, "<|im_end|>", "<think>", "the", " dog", "\n", " " * 40, "word " * 30]), max_size=300
    ).map("".join)
)
def test_pieces_give_the_tokens_of_the_whole(name, text):
    tokenizer = TOKENIZERS[name]()
    whole = list(tokenizer._tokenizer.encode(text).ids)
    with pytest.MonkeyPatch.context() as patch:
        for module in (pieces, __import__("moeflux.text.tokenizer", fromlist=["PIECE"])):
            patch.setattr(module, "PIECE", 64)
        patch.setattr(pieces, "WINDOW", 48)
        found = [id for piece in tokenizer.encode_pieces(text) for id in piece]
        rendered, plain = tokenizer.encode_rendered(text), tokenizer.encode_plain(text)
    assert found == rendered == whole
    assert plain == tokenizer.encode_plain(text)


def test_a_long_text_is_cut():
    tokenizer, text = tiny.byte_level(), PROSE * 2000
    found = list(tokenizer.encode_pieces(text))
    assert len(found) > 5
    assert tokenizer.encode(text) == list(tokenizer._tokenizer.encode(text).ids)


def test_what_cannot_be_cut_is_encoded_as_it_is():
    text = "漢fox the " * 20_000
    assert len(list(tiny.byte_fallback().encode_pieces(text))) == 1
    run = "a" * (3 * pieces.PIECE)
    assert len(list(tiny.byte_level().encode_pieces(run))) == 1


def test_the_first_piece_has_the_token_that_begins_a_text():
    tokenizer = tiny.byte_level("deepseek", (("bos_token", "<｜begin▁of▁sentence｜>"), ("add_bos_token", True)))
    bos = tokenizer.named_id("bos_token")
    ids = tokenizer.encode("word\n" * 40_000)
    assert ids[0] == bos
    assert ids.count(bos) == 1


def test_ids_with_holes():
    inner = tokenizers.Tokenizer(models.WordLevel({"a": 0, "b": 7, "c": 3}, unk_token="a"))
    assert Tokenizer(inner).n_ids == 8
    twice = tokenizers.Tokenizer(models.WordLevel({"a": 0, "b": 9, "c": 9}, unk_token="a"))
    assert Tokenizer(twice).n_ids == 10
