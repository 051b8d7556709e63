"""What identifies a vocabulary, and whether a drafter's fits a target's."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from enum import Enum

from tokenizers import Tokenizer


class VocabularyFit(Enum):
    """Of a drafter's vocabulary to a target's."""

    EQUAL = "equal"
    """Every id means the same in both."""
    SIMILAR = "similar"
    """They differ in special tokens, which are no text and end no sequence: a draft seldom has
    one, and one that means something else is refused like any other wrong draft."""
    NONE = "none"


def vocabulary_fingerprint(tokenizer_json: str, eos_token_ids: Iterable[int]) -> str:
    """Three parts with a - between: a hash of the text tokens with their ids, a hash of the special
    ones with theirs, 32 hex digits each, and the ids that end a sequence with a . between.

    `tokenizer_json` is the text of tokenizer.json. What does not change the meaning of an id (its
    layout, merges, templates) does not change the fingerprint.
    """
    tokenizer = Tokenizer.from_str(tokenizer_json)
    added = tokenizer.get_added_tokens_decoder()
    special = {token.content: token_id for token_id, token in added.items() if token.special}
    vocab: dict[str, int] = tokenizer.get_vocab(with_added_tokens=True)
    text = {token: token_id for token, token_id in vocab.items() if token not in special}
    eos = ".".join(str(token_id) for token_id in sorted(set(eos_token_ids)))
    return f"{_hash_of(text)}-{_hash_of(special)}-{eos}"


def _hash_of(vocab: dict[str, int]) -> str:
    digest = hashlib.sha256(b"paceline-vocabulary-v2")
    for token, token_id in sorted(vocab.items(), key=lambda item: (item[1], item[0])):
        token_bytes = token.encode()
        digest.update(token_id.to_bytes(4, "little"))
        digest.update(len(token_bytes).to_bytes(4, "little") + token_bytes)
    return digest.hexdigest()[:32]


def vocabulary_fit(drafter: str, target: str) -> VocabularyFit:
    """Of two fingerprints. An empty one of a drafter fits any target: ids are opaque to it."""
    if drafter in ("", target):
        return VocabularyFit.EQUAL
    theirs, ours = drafter.split("-"), target.split("-")
    if len(theirs) != 3 or len(ours) != 3 or theirs[0] != ours[0]:
        return VocabularyFit.NONE
    if theirs[1] == ours[1]:
        return VocabularyFit.EQUAL
    share_an_end = set(theirs[2].split(".")) & set(ours[2].split(".")) - {""}
    return VocabularyFit.SIMILAR if share_an_end else VocabularyFit.NONE
