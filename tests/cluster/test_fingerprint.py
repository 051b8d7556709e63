"""The fingerprint of a vocabulary."""

from __future__ import annotations

import json
import subprocess
import sys

from tokenizers import AddedToken, Tokenizer, models

from cluster.fingerprint import vocabulary_fingerprint


def tokenizer_json(vocab: dict[str, int], *special_tokens: str) -> str:
    tokenizer = Tokenizer(models.WordLevel(vocab, unk_token="a"))
    tokenizer.add_special_tokens([AddedToken(token) for token in special_tokens])
    return str(tokenizer.to_str())


def test_depends_on_the_map_from_token_to_id_alone() -> None:
    text = tokenizer_json({"a": 0, "b": 1}, "<eos>")
    fingerprint = vocabulary_fingerprint(text)
    assert len(fingerprint) == 32
    assert vocabulary_fingerprint(json.dumps(json.loads(text), indent=4)) == fingerprint
    assert vocabulary_fingerprint(tokenizer_json({"b": 1, "a": 0}, "<eos>")) == fingerprint


def test_sees_every_difference() -> None:
    fingerprints = {
        vocabulary_fingerprint(tokenizer_json({"a": 0, "b": 1}, "<eos>")),
        vocabulary_fingerprint(tokenizer_json({"a": 1, "b": 0}, "<eos>")),
        vocabulary_fingerprint(tokenizer_json({"a": 0, "c": 1}, "<eos>")),
        vocabulary_fingerprint(tokenizer_json({"a": 0, "b": 1})),
        vocabulary_fingerprint(tokenizer_json({"a": 0, "b": 1}, "<end>")),
        vocabulary_fingerprint(tokenizer_json({"a": 0, "b": 1, "c": 2}, "<eos>")),
    }
    assert len(fingerprints) == 6


def test_needs_no_torch() -> None:
    code = "import cluster.fingerprint, sys; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
