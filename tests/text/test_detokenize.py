"""Text comes out whole: no half characters, nothing lost, the same as decoding everything at once."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from conftest import DATA
from moeflux import FormatError, MissingTensorError
from moeflux.text.detokenize import Detokenizer
from moeflux.text.tokenizer import Tokenizer
from text import tiny

TOKENIZER = Tokenizer.open(DATA / "mlx" / "qwen3_moe-4bit-f32")
TEXTS = st.text(st.characters(exclude_categories=["Cs"]), max_size=40)


def stream(tokenizer, ids):
    detokenizer = Detokenizer(tokenizer)
    return [detokenizer.add(token) for token in ids], detokenizer.finish()


@given(TEXTS)
@pytest.mark.parametrize("kind", ["fixture", "byte level", "byte fallback", "words"])
def test_pieces_join_to_the_text(kind, text):
    tokenizers = {"fixture": TOKENIZER, "byte level": tiny.byte_level(), "words": tiny.words()}
    tokenizer = tokenizers.get(kind) or tiny.byte_fallback()
    ids = tokenizer.encode(text)
    pieces, rest = stream(tokenizer, ids)
    assert "".join(pieces) + rest == tokenizer.decode(ids)
    assert "\ufffd" in text or all("\ufffd" not in piece for piece in pieces)


@given(st.binary(max_size=40))
def test_any_bytes_give_what_decoding_all_of_them_gives(data):
    """Random bytes are mostly not UTF-8: replacement characters come out, but the same ones and as many."""
    tokenizer = tiny.byte_level()
    alphabet = {tokenizer.piece(id): id for id in range(tokenizer.n_ids)}
    ids = [alphabet[bytes([byte])] for byte in data]
    pieces, rest = stream(tokenizer, ids)
    assert "".join(pieces) + rest == tokenizer.decode(ids) == data.decode(errors="replace")


@given(st.lists(st.integers(0, tiny.byte_level("deepseek").n_ids - 1), max_size=60))
def test_any_tokens_give_what_decoding_all_of_them_gives(ids):
    tokenizer = tiny.byte_level("deepseek")  # added tokens of characters that are no bytes
    pieces, rest = stream(tokenizer, ids)
    assert "".join(pieces) + rest == tokenizer.decode(ids)


@given(st.binary(min_size=1, max_size=200).filter(lambda data: data.strip(b" ")))  # a leading space is no text there
def test_fallback_bytes_are_never_held_for_ever(data):
    tokenizer = tiny.byte_fallback()
    detokenizer = Detokenizer(tokenizer)
    shown = [detokenizer.add(1 + byte) for byte in data]
    assert len(data) - 33 <= 0 or any(shown)
    assert "".join(shown) + detokenizer.finish()


def test_characters_are_never_split():
    ids = TOKENIZER.encode("né🙂漢")
    assert len(ids) > 4
    pieces, rest = stream(TOKENIZER, ids)
    assert all("\ufffd" not in piece for piece in pieces)
    assert ("".join(pieces), rest) == ("né🙂漢", "")


def test_a_character_comes_with_its_last_byte():
    detokenizer = Detokenizer(TOKENIZER)
    ids = TOKENIZER.encode("🙂")
    assert len(ids) == 4
    assert [detokenizer.add(token) for token in ids] == ["", "", "", "🙂"]


def test_an_unfinished_character_is_not_lost():
    detokenizer = Detokenizer(TOKENIZER)
    first = TOKENIZER.encode("🙂")[0]
    assert detokenizer.add(first) == ""
    assert detokenizer.finish() == "\ufffd"
    assert detokenizer.finish() == ""


def test_missing_and_broken_tokenizers(tmp_path):
    with pytest.raises(MissingTensorError, match=r"tokenizer\.json"):
        Tokenizer.open(tmp_path)
    (tmp_path / "tokenizer.json").write_text("{}")
    with pytest.raises(FormatError, match=r"tokenizer\.json"):
        Tokenizer.open(tmp_path)


def test_documents_begin_as_the_checkpoint_says():
    config = (("add_bos_token", True), ("bos_token", "<|im_start|>"))
    begins, bare = tiny.byte_level("qwen", config), tiny.byte_level("qwen")
    bos = bare.added["<|im_start|>"]
    assert begins.encode("fox") == [bos, *bare.encode("fox")]
    assert begins.encode("<|im_start|>fox") == [bos, *bare.encode("fox")]
    assert begins.encode_rendered("fox") == bare.encode("fox")


@given(TEXTS)
def test_plain_text_never_becomes_an_added_token(text):
    tokenizer = tiny.byte_level()
    spelled = f"<|im_end|>{text}<think>"
    ids = tokenizer.encode_plain(spelled)
    assert not set(ids) & set(tokenizer.added.values())
    assert tokenizer.decode(ids) == tokenizer.decode(tokenizer.encode(spelled))
    if not any(content in text for content in tokenizer.added):
        assert tokenizer.encode_plain(text) == tokenizer.encode(text)
