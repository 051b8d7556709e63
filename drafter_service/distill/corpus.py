"""Lessons on disk, in parts that appear whole or not at all."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file

from drafter_service.distill.lesson import Lesson


class Corpus:
    """The parts in one folder."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        folder.mkdir(parents=True, exist_ok=True)

    def has(self, part: int) -> bool:
        return self._file(part).is_file()

    def write(self, part: int, lessons: Sequence[Lesson]) -> None:
        unfinished = self._file(part).with_suffix(f".{os.getpid()}.tmp")
        save_file(
            {
                "token_ids": torch.cat([lesson.token_ids for lesson in lessons]),
                "lengths": torch.tensor([len(lesson.token_ids) for lesson in lessons]),
                "num_context": torch.tensor([lesson.num_context for lesson in lessons]),
                "top_ids": torch.cat([lesson.top_ids for lesson in lessons]),
                "top_log_probs": torch.cat([lesson.top_log_probs for lesson in lessons]),
            },
            unfinished,
        )
        unfinished.rename(self._file(part))

    def read(self, part: int) -> list[Lesson]:
        tensors = load_file(self._file(part))
        lengths, contexts = tensors["lengths"], tensors["num_context"]
        learned = (lengths - contexts).tolist()
        columns = (
            tensors["token_ids"].split(lengths.tolist()),
            contexts.tolist(),
            tensors["top_ids"].split(learned),
            tensors["top_log_probs"].split(learned),
        )
        return [Lesson(*fields) for fields in zip(*columns, strict=True)]

    def _file(self, part: int) -> Path:
        return self._folder / f"part-{part:05}.safetensors"
