"""What identifies a vocabulary: two members that agree on it mean the same by a token id."""

from __future__ import annotations

import hashlib

from tokenizers import Tokenizer


def vocabulary_fingerprint(tokenizer_json: str) -> str:
    """Hash of the map from token to id, added tokens included; 32 hex digits.

    `tokenizer_json` is the text of tokenizer.json. What does not change the meaning of an id (its
    layout, merges, templates) does not change the fingerprint.
    """
    vocab: dict[str, int] = Tokenizer.from_str(tokenizer_json).get_vocab(with_added_tokens=True)
    digest = hashlib.sha256(b"paceline-vocabulary-v1")
    for token, token_id in sorted(vocab.items(), key=lambda item: (item[1], item[0])):
        token_bytes = token.encode()
        digest.update(token_id.to_bytes(4, "little"))
        digest.update(len(token_bytes).to_bytes(4, "little") + token_bytes)
    return digest.hexdigest()[:32]
