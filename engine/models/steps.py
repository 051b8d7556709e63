"""What runs the steps of a TorchDecoder; each device has its own way."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

import torch

from engine.models.rows import PackedRows


class Steps(Protocol):
    """Runs steps over a KV pool of its own."""

    def run(self, rows: PackedRows) -> torch.Tensor:
        """Logits [num wanted rows, vocab_size] float32."""

    def copy_block(self, source: int, target: int) -> None:
        """As a decoder does."""


MakeSteps = Callable[[int, int], Steps]
"""From the number of blocks of the pool and their size."""
