"""The state of a training on disk: it goes on from there as if it had not been interrupted."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file

_PARAMETER, _MOMENT = "parameter.", "moment."


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """Everything that the next step depends on, the corpus excepted."""

    num_steps: int
    num_learned: int
    """Tokens."""
    num_uses: torch.Tensor
    """[lessons so far] int64."""
    parameters: Mapping[str, torch.Tensor]
    moments: Mapping[str, torch.Tensor]
    """The optimiser's, by parameter and name: `layers.0.qkv/exp_avg`."""

    def write(self, file: Path) -> None:
        """Whole or not at all."""
        tensors = {
            "counts": torch.tensor([self.num_steps, self.num_learned]),
            "num_uses": self.num_uses,
            **{_PARAMETER + name: tensor.detach() for name, tensor in self.parameters.items()},
            **{_MOMENT + name: tensor for name, tensor in self.moments.items()},
        }
        unfinished = file.with_suffix(".tmp")
        save_file({name: tensor.contiguous().cpu() for name, tensor in tensors.items()}, unfinished)
        os.replace(unfinished, file)

    @classmethod
    def read(cls, file: Path) -> Checkpoint:
        tensors = load_file(file)
        num_steps, num_learned = tensors["counts"].tolist()
        return cls(
            num_steps=num_steps,
            num_learned=num_learned,
            num_uses=tensors["num_uses"],
            parameters=_named(tensors, _PARAMETER),
            moments=_named(tensors, _MOMENT),
        )


def _named(tensors: Mapping[str, torch.Tensor], prefix: str) -> dict[str, torch.Tensor]:
    return {
        name.removeprefix(prefix): tensor
        for name, tensor in tensors.items()
        if name.startswith(prefix)
    }
