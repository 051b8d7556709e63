"""What a decoder is: a loaded model that runs steps over a paged KV pool of its own.

There are three. `native` runs Llama-like models on a CPU in kernels of ours, `torch` runs the same
models in few torch operations, on a GPU above all, and `transformers` runs every other model
through transformers' own modules; that one is also the oracle of the other two.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch


@dataclass(frozen=True, slots=True)
class SequenceSlice:
    """Tokens of one sequence that one forward takes."""

    block_table: Sequence[int]
    """Of the sequence; the slots of these tokens are reserved."""
    start: int
    """Absolute position of the first token."""
    token_ids: Sequence[int]
    num_logits: int
    """Logits are wanted after this many of the last tokens; 0 for a prompt's earlier chunks."""


class UnsupportedModelError(ValueError):
    """This model, or the form it comes in, cannot be served; the message says why."""


class Decoder(Protocol):
    """Not thread safe: one compute thread owns it."""

    @property
    def name(self) -> str:
        """native, torch or transformers."""

    @property
    def kernel_class(self) -> str:
        """Names the arithmetic: members of one class give the same bits."""

    @property
    def device(self) -> torch.device: ...

    def block_bytes(self, block_size: int) -> int:
        """Memory of one block of the pool, over all layers."""

    def allocate(self, num_blocks: int, block_size: int) -> None:
        """Make the pool: once, before the first forward."""

    def copy_block(self, source: int, target: int) -> None:
        """The keys and values of all its slots into another block."""

    def forward(self, slices: Sequence[SequenceSlice]) -> torch.Tensor:
        """One step over prefill chunks, decode tokens and drafts of many sequences.

        Writes the keys and values of all tokens into their slots. A sequence may be in one slice
        only. Returns [sum of num_logits, vocab_size] float32 in the order of the slices.
        """
