"""A model's vocabulary as grammars need it: which ids there are, and the bytes they stand for."""

from __future__ import annotations

import json
from collections.abc import Collection, Iterable, Mapping
from types import SimpleNamespace
from typing import Any

import numpy as np
import numpy.typing as npt
from llguidance import LLTokenizer, TokenizerWrapper
from tokenizers import Tokenizer, pre_tokenizers

Bitmask = npt.NDArray[np.uint8]
"""[ceil(vocab / 8)]; id i is bit i % 8 of byte i // 8."""


class GrammarVocabulary:
    """Immutable; shared by all grammars of a model."""

    def __init__(self, tokenizer_json: str, vocab_size: int, eos_token_ids: Iterable[int]) -> None:
        """Takes about a second and keeps the GIL for it.

        `vocab_size` is the model's: rows of logits may be longer than the vocabulary is, and then
        the ids at their end are never allowed.
        """
        self.vocab_size = vocab_size
        self.eos_ids = frozenset(eos_token_ids)
        if not self.eos_ids:
            raise ValueError("a model without an end-of-sequence token cannot end a grammar's text")
        tokenizer = Tokenizer.from_str(tokenizer_json)
        known_ids = tokenizer.get_vocab(with_added_tokens=True).values()
        self.eos = self.bits(self.eos_ids)
        self.tokens = self.bits(known_ids) & ~self.eos
        """The ids that stand for a token, those of the end of sequence excepted."""
        try:
            self.tokenizer = LLTokenizer(
                _with_added_text(tokenizer_json, self.eos_ids),
                n_vocab=max(vocab_size, 1 + max(known_ids)),
                eos_token=sorted(self.eos_ids),
            )
        except ValueError:  # of a kind that it does not know
            pieces = TokenizerWrapper(_pieces(tokenizer, vocab_size, min(self.eos_ids)))
            self.tokenizer = LLTokenizer(pieces, eos_token=sorted(self.eos_ids))

    def bits(self, token_ids: Iterable[int]) -> Bitmask:
        """Just these ids, as far as the model has them."""
        members = np.zeros(self.vocab_size, dtype=bool)
        members[[token_id for token_id in token_ids if token_id < self.vocab_size]] = True
        return np.packbits(members, bitorder="little")

    def text(self, token_id: int) -> bytes:
        """What a token adds to the text; nothing if it is special."""
        if token_id in self.eos_ids or self.tokenizer.is_special_token(token_id):
            return b""
        return self.tokenizer.decode_bytes([token_id])


def _with_added_text(tokenizer_json: str, eos_ids: Collection[int]) -> str:
    """The same tokenizer, whose added tokens that are not special are tokens like others.

    llguidance takes every added token for a special one, which no text in a grammar matches. But
    `</think>` or three spaces are text that a model writes, and others may be spelled with it.
    """
    described = json.loads(tokenizer_json)
    vocabulary = described["model"].get("vocab")
    if not isinstance(vocabulary, dict):
        return tokenizer_json
    kept = []
    for token in described.get("added_tokens", ()):
        name = _vocabulary_name(token["content"], described.get("decoder"))
        is_text = not token["special"] and token["id"] not in eos_ids
        if is_text and vocabulary.setdefault(name, token["id"]) == token["id"]:
            continue
        kept.append(token)
    return json.dumps(described | {"added_tokens": kept})


def _vocabulary_name(content: str, decoder: Mapping[str, Any] | None) -> str:
    """How a vocabulary writes a token with this text."""
    if decoder is None or decoder["type"] != "ByteLevel":
        return content.replace(" ", "\u2581")
    byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    return "".join(piece for piece, _ in byte_level.pre_tokenize_str(content))


class _Pieces(SimpleNamespace):
    """For tokenizers whose kind llguidance does not know: every token on its own, as the router
    decodes it. What the grammar forces is cut into the longest pieces."""

    tokens: list[bytes]
    ids: dict[bytes, int]
    longest: int

    def __call__(self, text: bytes) -> list[int]:
        token_ids, start = [], 0
        while start < len(text):
            ends = range(min(len(text), start + self.longest), start, -1)
            piece = next((text[start:end] for end in ends if text[start:end] in self.ids), None)
            if piece is None:
                break
            token_ids.append(self.ids[piece])
            start += len(piece)
        return token_ids


def _pieces(tokenizer: Tokenizer, vocab_size: int, eos_id: int) -> _Pieces:
    added = tokenizer.get_added_tokens_decoder()
    special_ids = [i for i, token in added.items() if token.special and i < vocab_size]
    tokens = [b""] * vocab_size
    for name, token_id in tokenizer.get_vocab(with_added_tokens=True).items():
        if token_id < vocab_size:
            tokens[token_id] = tokenizer.decode([token_id], skip_special_tokens=False).encode()
            if token_id in special_ids:
                tokens[token_id] = name.encode()
    ids = {tokens[i]: i for i in range(vocab_size) if tokens[i] and i not in special_ids}
    return _Pieces(
        eos_token_id=eos_id,
        bos_token_id=None,
        tokens=tokens,
        special_token_ids=special_ids,
        ids=ids,
        longest=max(map(len, ids), default=0),
    )
