"""A lesson: a text, and what the target held likely at each of its tokens."""

from __future__ import annotations

from dataclasses import dataclass

import torch


@dataclass(frozen=True, slots=True)
class Lesson:
    """The distributions are the target's own, at temperature 1 and before any truncation."""

    token_ids: torch.Tensor
    """[n] int32."""
    num_context: int
    """The first tokens, which are read and not learned; from 1."""
    top_ids: torch.Tensor
    """[n - num_context, num_candidates] int32: of each token after the context, what the target
    held likeliest in its place, the likeliest first."""
    top_log_probs: torch.Tensor
    """[n - num_context, num_candidates] float16, natural logarithms."""

    @property
    def num_learned(self) -> int:
        return len(self.token_ids) - self.num_context
