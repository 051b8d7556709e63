"""Writes a trained student as the folder that the loader reads (engine/models/distilled.py)."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from pathlib import Path

import torch
from safetensors.torch import save_file

from engine.int8 import quantized
from engine.models.distilled import SCALE_SUFFIX, WEIGHTS_FILE, DrafterDescription


def write_drafter(
    folder: Path,
    description: DrafterDescription,
    parameters: Mapping[str, torch.Tensor],
    vocabulary: torch.Tensor | None,
) -> None:
    """Matrices as int8 with a scale a row, all else as it is. config.json comes last: without it a
    folder is no drafter.

    parameters  # Student.parameters()
    vocabulary  # [draft vocabulary] int64, ascending; None where that is the target's
    """
    tensors: dict[str, torch.Tensor] = {}
    for name, parameter in parameters.items():
        values = parameter.detach().cpu().float()
        if values.dim() == 2:
            tensors[name], tensors[name + SCALE_SUFFIX] = quantized(values)
        else:
            tensors[name] = values
    if vocabulary is not None:
        tensors["vocabulary"] = vocabulary.cpu().int()
    folder.mkdir(parents=True, exist_ok=True)
    _replace(folder / WEIGHTS_FILE, lambda file: save_file(tensors, file))
    text = description.model_dump_json(indent=2, exclude_none=True) + "\n"
    _replace(folder / "config.json", lambda file: file.write_text(text, encoding="utf-8"))


def _replace(file: Path, write: Callable[[Path], object]) -> None:
    """Whole or not at all."""
    unfinished = file.with_name(f".{file.name}.tmp")
    write(unfinished)
    unfinished.chmod(0o644)  # safetensors writes for its owner only.
    os.replace(unfinished, file)
