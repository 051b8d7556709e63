"""Laws of the tokenizer and of the incremental detokenizer."""

from __future__ import annotations

import dataclasses
import time

import pytest
import tokenizers
from hypothesis import given, settings
from hypothesis import strategies as st

from router.tokenizer import Tokenizer
from tests.support.scripted_verifier import make_card, sentencepiece_tokenizer_json

CARD = make_card()
TOKENIZER = Tokenizer(CARD)
REFERENCE = tokenizers.Tokenizer.from_str(CARD.tokenizer_json)
SPECIALS = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
SPECIAL_IDS = set(TOKENIZER.special_ids.values())

anything = st.lists(
    st.one_of(st.sampled_from([*SPECIALS, "<|", "|>", "<", "im_", "start", " "]), st.text()),
    max_size=6,
).map("".join)


def cut(items: list[int], cuts: list[int]) -> list[list[int]]:
    """`items` in pieces whose sizes come from `cuts`, the rest at the end."""
    pieces, start = [], 0
    for size in cuts:
        pieces.append(items[start : start + size])
        start += size
    return [*pieces, items[start:]]


def test_special_tokens_are_known() -> None:
    assert sorted(TOKENIZER.special_ids) == sorted(SPECIALS)


@given(text=anything)
def test_client_text_yields_no_special_id(text: str) -> None:
    assert SPECIAL_IDS.isdisjoint(TOKENIZER.encode(text, add_special_tokens=False))


@given(text=anything)
def test_encoding_loses_nothing(text: str) -> None:
    assert TOKENIZER.decode(TOKENIZER.encode(text, add_special_tokens=False)) == text


@given(text=anything)
def test_rendered_text_is_encoded_as_the_reference_does(text: str) -> None:
    assert list(TOKENIZER.encode_rendered(text)) == REFERENCE.encode(text).ids


@given(
    ids=st.lists(st.integers(0, CARD.vocab_size - 1), max_size=60),
    cuts=st.lists(st.integers(0, 5), max_size=30),
)
def test_pieces_add_up_to_the_whole(ids: list[int], cuts: list[int]) -> None:
    detokenizer = TOKENIZER.detokenizer()
    text = "".join(map(detokenizer.push, cut(ids, cuts))) + detokenizer.finish()
    assert text == REFERENCE.decode(ids, skip_special_tokens=True)
    assert text == TOKENIZER.decode(ids)


@given(text=st.text(), cuts=st.lists(st.integers(0, 4), max_size=30))
def test_valid_text_never_shows_a_broken_character(text: str, cuts: list[int]) -> None:
    ids = list(TOKENIZER.encode(text, add_special_tokens=False))
    detokenizer = TOKENIZER.detokenizer()
    pieces = [*map(detokenizer.push, cut(ids, cuts)), detokenizer.finish()]
    assert "".join(pieces) == text
    assert text.count("\ufffd") == sum(piece.count("\ufffd") for piece in pieces)


@pytest.mark.parametrize("border", [1, 2, 3])
def test_an_emoji_over_a_block_border(border: int) -> None:
    ids = list(TOKENIZER.encode("🙂", add_special_tokens=False))
    assert len(ids) == 4
    detokenizer = TOKENIZER.detokenizer()
    assert detokenizer.push(ids[:border]) == ""
    assert detokenizer.push(ids[border:]) == "🙂"
    assert detokenizer.finish() == ""


def test_an_unfinished_character_shows_at_the_end_only() -> None:
    ids = TOKENIZER.encode("a🙂", add_special_tokens=False)
    detokenizer = TOKENIZER.detokenizer()
    assert detokenizer.push(ids[:-1]) == "a"
    assert detokenizer.finish() == "\ufffd"


def test_ids_outside_the_vocabulary_have_no_text() -> None:
    assert TOKENIZER.detokenizer().push([CARD.vocab_size, 10**9, -1]) == ""
    assert TOKENIZER.decode([10**9, -1]) == ""


def test_a_token_costs_the_same_however_many_came_before() -> None:
    broken = TOKENIZER.encode("🙂", add_special_tokens=False)[0]  # a character that never ends
    detokenizer = TOKENIZER.detokenizer()
    started = time.thread_time()
    for _ in range(50_000):
        detokenizer.push([broken])
    assert time.thread_time() - started < 5.0


def test_added_tokens_that_are_not_special_keep_their_text() -> None:
    think = REFERENCE.token_to_id("<think>")
    assert TOKENIZER.decode([think]) == "<think>"
    assert TOKENIZER.encode("<think>", add_special_tokens=False) == (think,)


SENTENCEPIECE = dataclasses.replace(
    CARD, tokenizer_json=sentencepiece_tokenizer_json(), vocab_size=264
)


@settings(max_examples=50)
@given(ids=st.lists(st.integers(0, 263), max_size=30), cuts=st.lists(st.integers(0, 4)))
def test_sentencepiece_pieces_add_up_to_the_whole(ids: list[int], cuts: list[int]) -> None:
    tokenizer = Tokenizer(SENTENCEPIECE)
    reference = tokenizers.Tokenizer.from_str(SENTENCEPIECE.tokenizer_json)
    ids = [i for i in ids if not 0x80 <= i - 3 < 0x100]  # invalid bytes are written differently
    detokenizer = tokenizer.detokenizer()
    text = "".join(map(detokenizer.push, cut(ids, cuts))) + detokenizer.finish()
    assert text == reference.decode(ids, skip_special_tokens=True)


def test_sentencepiece_bytes_make_characters() -> None:
    tokenizer = Tokenizer(SENTENCEPIECE)
    ids = [3 + byte for byte in " é".encode()]
    assert tokenizer.decode(ids) == " é"
