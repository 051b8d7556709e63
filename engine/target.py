"""From the logits of a step to tokens: each sequence's rows are adjusted, then drawn from.

The one way to a token, for the plain and the speculative path and for drafters alike.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

from cluster.types import SamplingParams, TokenLogprobs
from engine.adjustments import Adjustments
from engine.grammar import apply_mask
from engine.noise import Floats, Ids
from engine.processors import target_logits
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
    masks: torch.Tensor | None = None
    """What a grammar allows in the first rows, see GrammarState.masks; no row behind them is
    drawn."""
    keeps_logits: bool = False
    """Whether the model's own logits are wanted beside the tokens."""

    def rows(self) -> list[SampleRow]:
        end = self.num_committed + len(self.draft_ids) + 1
        positions = range(end - self.num_rows, end)
        return [SampleRow(self.sampling, self.request_key, position) for position in positions]


@dataclass(frozen=True, slots=True)
class Drawn:
    """What a block's rows gave."""

    token_ids: list[int | None]
    """One per row that is drawn; None where there is no distribution to draw from, because the
    logits are not finite or every token is banned."""
    logits: torch.Tensor | None
    """[num_rows, vocab], the model's own, where they were wanted."""


@torch.inference_mode()
def draw(logits: torch.Tensor, blocks: Sequence[Block]) -> list[Drawn]:
    """What each block draws. It does not depend on the other blocks.

    logits  # [sum of num_rows, vocab] float32; afterwards adjusted and masked
    """
    first = 0
    kept: list[torch.Tensor | None] = []
    for block in blocks:
        rows = logits[first : first + block.num_rows]
        first += block.num_rows
        changes = block.adjustments is not None or block.masks is not None
        kept.append((rows.clone() if changes else rows) if block.keeps_logits else None)
        if block.adjustments is not None:
            block.adjustments.apply(rows, block.draft_ids)
        if block.masks is not None:
            apply_mask(rows[: len(block.masks)], block.masks)
    assert first == len(logits)
    drawn = iter(_sample_finite(logits, [row for block in blocks for row in block.rows()]))
    token_ids = [[next(drawn) for _ in range(block.num_rows)] for block in blocks]
    return [
        Drawn(ids if block.masks is None else ids[: len(block.masks)], own)
        for block, ids, own in zip(blocks, token_ids, kept, strict=True)
    ]


@dataclass(frozen=True, slots=True)
class TargetProbs:
    """The distribution that a token is drawn from. A token's probability is its weight over the
    total."""

    token_ids: Ids
    """[num_kept], ascending: those that may be drawn."""
    weights: npt.NDArray[np.float32]
    """[num_kept]"""
    total: float

    def probs(self, token_ids: Ids) -> Floats:
        """token_ids, returns  # [n]"""
        places = np.minimum(np.searchsorted(self.token_ids, token_ids), len(self.token_ids) - 1)
        weights = np.where(self.token_ids[places] == token_ids, self.weights[places], 0.0)
        return weights / self.total


@torch.inference_mode()
def target_probs(logits: torch.Tensor, sampling: SamplingParams) -> TargetProbs:
    """The distribution of one row as `draw` left it.

    logits  # [vocab]; its largest is finite
    """
    target = target_logits(logits, sampling)
    weights = target.logits.exp_()
    total = float(weights.sum(dtype=torch.float64))
    return TargetProbs(target.token_ids.cpu().numpy(), weights.cpu().numpy(), total)


@torch.inference_mode()
def token_logprobs(
    logits: torch.Tensor, token_ids: Sequence[int], num_top: int
) -> tuple[TokenLogprobs, ...]:
    """Log probabilities of tokens under the model's own distribution.

    logits     # [n or more, vocab] float32
    token_ids  # n
    """
    log_probs = torch.log_softmax(logits[: len(token_ids)], dim=-1)
    own = log_probs.gather(1, torch.tensor(token_ids, device=logits.device)[:, None])
    top = log_probs.topk(min(num_top, log_probs.shape[1]), dim=-1)
    columns = (own.flatten().tolist(), top.indices.tolist(), top.values.tolist())
    return tuple(
        TokenLogprobs(logprob, tuple(ids), tuple(values))
        for logprob, ids, values in zip(*columns, strict=True)
    )


def _sample_finite(logits: torch.Tensor, rows: Sequence[SampleRow]) -> list[int | None]:
    try:
        return list(sample(logits, rows))
    except NonFiniteLogitsError as error:
        finite = [index for index in range(len(rows)) if index not in error.rows]
        token_ids = sample(logits[finite], [rows[index] for index in finite])
        drawn = dict(zip(finite, token_ids, strict=True))
        return [drawn.get(index) for index in range(len(rows))]
