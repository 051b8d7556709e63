"""The fingerprint of a vocabulary, and which ones fit together."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest
from tokenizers import AddedToken, Tokenizer, models

from cluster.fingerprint import VocabularyFit, vocabulary_fingerprint, vocabulary_fit


def tokenizer_json(vocab: dict[str, int], *special_tokens: str) -> str:
    tokenizer = Tokenizer(models.WordLevel(vocab, unk_token="a"))
    tokenizer.add_special_tokens([AddedToken(token) for token in special_tokens])
    return str(tokenizer.to_str())


def fingerprint(vocab: dict[str, int], *special_tokens: str, eos: tuple[int, ...] = (2,)) -> str:
    return vocabulary_fingerprint(tokenizer_json(vocab, *special_tokens), eos)


def test_depends_on_what_ids_mean_alone() -> None:
    text = tokenizer_json({"a": 0, "b": 1}, "<eos>")
    one = vocabulary_fingerprint(text, [2, 1])
    assert len(one) == 32 + 1 + 32 + 1 + len("1.2")
    assert vocabulary_fingerprint(json.dumps(json.loads(text), indent=4), [1, 2]) == one
    assert fingerprint({"b": 1, "a": 0}, "<eos>", eos=(1, 2)) == one


def test_sees_every_difference() -> None:
    fingerprints = {
        fingerprint({"a": 0, "b": 1}, "<eos>"),
        fingerprint({"a": 1, "b": 0}, "<eos>"),
        fingerprint({"a": 0, "c": 1}, "<eos>"),
        fingerprint({"a": 0, "b": 1}),
        fingerprint({"a": 0, "b": 1}, "<end>"),
        fingerprint({"a": 0, "b": 1, "c": 2}, "<eos>"),
        fingerprint({"a": 0, "b": 1}, "<eos>", eos=(1,)),
    }
    assert len(fingerprints) == 7


TEXT = {"a": 0, "b": 1}
TARGET = fingerprint(TEXT, "<eos>", "<unused>")


@pytest.mark.parametrize(
    ("drafter", "fit"),
    [
        (TARGET, VocabularyFit.EQUAL),
        ("", VocabularyFit.EQUAL),
        # A base model and one that was taught to end otherwise, with one tokenizer.
        (fingerprint(TEXT, "<eos>", "<unused>", eos=(3,)), VocabularyFit.EQUAL),
        (fingerprint(TEXT, "<eos>", "<renamed>"), VocabularyFit.SIMILAR),
        (fingerprint(TEXT, "<eos>"), VocabularyFit.SIMILAR),
        (fingerprint(TEXT, "<eos>", "<unused>", "<more>"), VocabularyFit.SIMILAR),
        (fingerprint(TEXT, "<eos>", "<end of turn>", eos=(2, 3)), VocabularyFit.SIMILAR),
        (fingerprint(TEXT, "<unused>", "<eos>", eos=(3,)), VocabularyFit.NONE),
        (fingerprint(TEXT, "<eos>", eos=()), VocabularyFit.NONE),
        (fingerprint({"b": 0, "a": 1}, "<eos>", "<unused>"), VocabularyFit.NONE),
        (fingerprint(TEXT | {"c": 4}, "<eos>", "<unused>"), VocabularyFit.NONE),
        ("of another release", VocabularyFit.NONE),
    ],
)
def test_special_tokens_may_differ_but_not_the_end_nor_the_text(
    drafter: str, fit: VocabularyFit
) -> None:
    """K4."""
    assert vocabulary_fit(drafter, TARGET) is fit


def test_an_unknown_target_fits_opaque_drafters_alone() -> None:
    assert vocabulary_fit("", "") is VocabularyFit.EQUAL
    assert vocabulary_fit(TARGET, "") is VocabularyFit.NONE


def test_needs_no_torch() -> None:
    code = "import cluster.fingerprint, sys; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
