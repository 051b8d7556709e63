"""From the logits of a step to tokens: each sequence's rows are adjusted, then drawn from.

The one way to a token, for the plain and the speculative path and for drafters alike.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from cluster.types import SamplingParams
from engine.adjustments import Adjustments
from engine.sampling import NonFiniteLogitsError, SampleRow, sample


@dataclass(frozen=True, slots=True)
class Block:
    """Consecutive rows of one sequence. The last is drawn after its committed tokens and all its
    drafts, the one before it after all drafts but the last, and so on."""

    sampling: SamplingParams
    request_key: int
    num_committed: int
    """Tokens of the sequence, prompt included."""
    draft_ids: Sequence[int]
    num_rows: int
    adjustments: Adjustments | None

    def rows(self) -> list[SampleRow]:
        end = self.num_committed + len(self.draft_ids) + 1
        positions = range(end - self.num_rows, end)
        return [SampleRow(self.sampling, self.request_key, position) for position in positions]


@torch.inference_mode()
def draw(logits: torch.Tensor, blocks: Sequence[Block]) -> list[list[int | None]]:
    """One token per row, by block; None where there is no distribution to draw from, because the
    logits are not finite or every token is banned. A block's tokens do not depend on the others.

    logits  # [sum of num_rows, vocab] float32; is changed
    """
    first = 0
    for block in blocks:
        if block.adjustments is not None:
            rows = logits[first : first + block.num_rows]
            block.adjustments.apply(rows, block.draft_ids)
        first += block.num_rows
    assert first == len(logits)
    drawn = iter(_sample_finite(logits, [row for block in blocks for row in block.rows()]))
    return [[next(drawn) for _ in range(block.num_rows)] for block in blocks]


def _sample_finite(logits: torch.Tensor, rows: Sequence[SampleRow]) -> list[int | None]:
    try:
        return list(sample(logits, rows))
    except NonFiniteLogitsError as error:
        finite = [index for index in range(len(rows)) if index not in error.rows]
        token_ids = sample(logits[finite], [rows[index] for index in finite])
        drawn = dict(zip(finite, token_ids, strict=True))
        return [drawn.get(index) for index in range(len(rows))]
