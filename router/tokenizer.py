"""Text to token ids and back, from the text of a tokenizer.json.

What a client writes never yields a special token: `<|im_start|>` in a prompt is encoded as the
characters it is made of. Only a chat template makes special tokens, see chat.py.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import tokenizers

from cluster.types import ModelCard
from router.detokenizer import Detokenizer

SHOWN_SPECIAL = frozenset({"<think>", "</think>", "<tool_call>", "</tool_call>"})
"""Texts that have a meaning within an answer, so they are not skipped where they are special."""


_CONTEXT_TOKENS = 32
"""Of a prompt that decide how the text behind it is cut into tokens."""


class Tokenizer:
    """The target's tokenizer. Immutable after its construction and safe to share with threads."""

    def __init__(self, card: ModelCard) -> None:
        self._trusted = _load(card.tokenizer_json)
        self._untrusted = _load(card.tokenizer_json)
        self._untrusted.encode_special_tokens = True
        self.vocab_size = card.vocab_size
        self.special_ids = _special_ids(self._trusted)
        """Special tokens by their text."""
        self._special_id_set = frozenset(self.special_ids.values())
        self._special_pattern = _any_of(self.special_ids)
        # Parts of one character are no sign: every Markdown quote begins with ">". When two texts
        # make a special token together, one of them holds two characters of it or more.
        self._heads = {s[:k] for s in self.special_ids for k in range(2, len(s))}
        self._tails = {s[-k:] for s in self.special_ids for k in range(2, len(s))}
        self._longest_special = max(map(len, self.special_ids), default=0)
        decoder = json.loads(card.tokenizer_json).get("decoder")
        self._token_bytes = _token_bytes(self._trusted, decoder, card.vocab_size)
        self._text_bytes = list(self._token_bytes)
        for text, token_id in self.special_ids.items():
            if token_id < len(self._text_bytes) and text not in SHOWN_SPECIAL:
                self._text_bytes[token_id] = b""

    def encode(self, text: str, *, add_special_tokens: bool) -> tuple[int, ...]:
        """Ids of a client's text. `add_special_tokens` adds what the model wants around a text
        (a beginning-of-sequence token, say)."""
        return tuple(self._untrusted.encode(text, add_special_tokens=add_special_tokens).ids)

    def encode_continuation(self, prompt_ids: Sequence[int], text: str) -> tuple[int, ...]:
        """Ids of a client's text as the model would write it behind a prompt: what is a word's
        first token depends on what stands before it."""
        tail_ids = tuple(prompt_ids[-_CONTEXT_TOKENS:])
        for index, token_id in enumerate(reversed(tail_ids)):
            if token_id in self._special_id_set:
                tail_ids = tail_ids[len(tail_ids) - index :]
                break
        tail = self.decode(tail_ids)
        together = self.encode(tail + text, add_special_tokens=False)
        if together[: len(tail_ids)] == tail_ids:
            return together[len(tail_ids) :]
        return self.encode(text, add_special_tokens=False)

    def encode_rendered(self, text: str) -> tuple[int, ...]:
        """Ids of a rendered template, whose special tokens count."""
        return tuple(self._trusted.encode(text, add_special_tokens=False).ids)

    def encode_guarded(self, text: str, guard: str) -> tuple[int, ...]:
        """Ids of a rendered template in which `guard` interrupts the special tokens that a client
        wrote; those become plain text, the others count."""
        ids: list[int] = []
        for piece in self._special_pattern.split(text):
            special_id = self.special_ids.get(piece)
            if special_id is not None:
                ids.append(special_id)
            elif piece:
                ids += self.encode(piece.replace(guard, ""), add_special_tokens=False)
        return tuple(ids)

    def decode(self, token_ids: Iterable[int], *, skip_special_tokens: bool = True) -> str:
        """Text of a whole sequence; an id outside the vocabulary has none."""
        table = self._text_bytes if skip_special_tokens else self._token_bytes
        return b"".join(table[i] for i in token_ids if 0 <= i < len(table)).decode(
            "utf-8", "replace"
        )

    def token_id(self, text: str) -> int | None:
        """Of the token that is this text, if there is one."""
        token_id: int | None = self._trusted.token_to_id(text)
        return token_id

    def token_text(self, token_id: int) -> tuple[str, bytes]:
        """One token for a reader: its text, special tokens included, and its bytes. Bytes that are
        no text by themselves are written as OpenAI writes them, bytes:\\xe2\\x80."""
        table = self._token_bytes
        raw = table[token_id] if 0 <= token_id < len(table) else b""
        try:
            return raw.decode(), raw
        except UnicodeDecodeError:
            return "bytes:" + "".join(f"\\x{byte:02x}" for byte in raw), raw

    def detokenizer(self) -> Detokenizer:
        """A fresh incremental decoder; it skips special tokens."""
        return Detokenizer(self._text_bytes)

    def token_strings(self, token_ids: Iterable[int]) -> list[str]:
        """The vocabulary's own name of each id."""
        return [self._trusted.id_to_token(i) or "" for i in token_ids]

    def guard_text(self, text: str, guard: str) -> str:
        """`text` with `guard` inside every special token, and inside any that would arise if
        another text were put before or after it."""
        text = self._special_pattern.sub(lambda match: _interrupt(match[0], guard), text)
        if any(text[-size:] in self._heads for size in range(2, self._longest_special)):
            text += guard
        if any(text[:size] in self._tails for size in range(2, self._longest_special)):
            text = guard + text
        return text


def _load(tokenizer_json: str) -> tokenizers.Tokenizer:
    tokenizer = tokenizers.Tokenizer.from_str(tokenizer_json)
    tokenizer.no_truncation()
    tokenizer.no_padding()
    return tokenizer


def _special_ids(tokenizer: tokenizers.Tokenizer) -> dict[str, int]:
    added = tokenizer.get_added_tokens_decoder()
    return {token.content: token_id for token_id, token in added.items() if token.special}


def _any_of(texts: Iterable[str]) -> re.Pattern[str]:
    """Matches any of the texts, the longest first; its split keeps what matched."""
    longest_first = sorted(texts, key=len, reverse=True)
    return re.compile("(" + ("|".join(map(re.escape, longest_first)) or r"(?!)") + ")")


def _interrupt(special: str, guard: str) -> str:
    return special[:1] + guard + special[1:]


# --- the bytes of each token ------------------------------------------------------------------


def _token_bytes(
    tokenizer: tokenizers.Tokenizer, decoder: Mapping[str, Any] | None, vocab_size: int
) -> list[bytes]:
    """Per id the bytes it stands for; ids without a token stand for none."""
    vocabulary = tokenizer.get_vocab(with_added_tokens=True)
    table = [b""] * max(vocab_size, 1 + max(vocabulary.values(), default=-1))
    kinds = _decoder_kinds(decoder)
    for token, token_id in vocabulary.items():
        if "ByteLevel" in kinds:
            table[token_id] = _byte_level(token)
        elif kinds & {"Metaspace", "ByteFallback"}:
            table[token_id] = _sentencepiece(token)
        else:
            table[token_id] = tokenizer.decode([token_id], skip_special_tokens=False).encode()
    return table


def _decoder_kinds(decoder: Mapping[str, Any] | None) -> set[str]:
    if decoder is None:
        return set()
    parts: Sequence[Mapping[str, Any]] = decoder.get("decoders", ())
    return {str(decoder["type"])}.union(*map(_decoder_kinds, parts))


def _byte_level(token: str) -> bytes:
    try:
        return bytes(_BYTE_OF_CHAR[char] for char in token)
    except KeyError:  # an added token, written as it is
        return token.encode()


_BYTE_TOKEN = re.compile(r"<0x([0-9A-Fa-f]{2})>")


def _sentencepiece(token: str) -> bytes:
    byte = _BYTE_TOKEN.fullmatch(token)
    return bytes.fromhex(byte[1]) if byte else token.replace("\u2581", " ").encode()


def _byte_alphabet() -> dict[str, int]:
    """GPT-2's printable stand-in for each byte, inverted."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in set(printable)]
    chars = printable + [256 + index for index in range(len(others))]
    return {chr(char): byte for char, byte in zip(chars, printable + others, strict=True)}


_BYTE_OF_CHAR = _byte_alphabet()
