"""Log probabilities of prompt tokens, from the rows of logits that a step gave.

Row p of a prompt tells of the token behind it, p + 1. So a prompt is scored by the prefill that is
done anyway, if it keeps the logits of all its rows; they are let go at once, a few at a time.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from cluster.types import TokenLogprobs
from engine.target import token_logprobs
from verifier_service.scheduler import ScheduledSequence

_ROWS_AT_ONCE = 32
"""Bounds what the arithmetic takes besides the logits themselves."""


@dataclass(frozen=True, slots=True)
class StepRows:
    """The rows of a step, sorted by what they are for."""

    drawn_from: torch.Tensor
    """[rows of all sequences that draw, vocab], in the order of the step."""
    scores: dict[int, tuple[TokenLogprobs, ...]]
    """By seq, of the prompt tokens from `num_scored_tokens` on."""


def num_logits(scheduled: ScheduledSequence) -> int:
    """Rows of logits that a sequence's part of a step is to give, counted from its end."""
    return scheduled.num_tokens if scheduled.sequence.scores else scheduled.num_drawn_rows


def sort_rows(logits: torch.Tensor, step: Sequence[ScheduledSequence]) -> StepRows:
    """logits  # [sum of num_logits, vocab], the model's own"""
    if not any(scheduled.sequence.scores for scheduled in step):
        return StepRows(logits, {})
    parts = torch.split(logits, [num_logits(scheduled) for scheduled in step])
    drawn_from = torch.cat(
        [rows[len(rows) - s.num_drawn_rows :] for s, rows in zip(step, parts, strict=True)]
    )
    scores = {
        s.sequence.seq: _scores(s, rows)
        for s, rows in zip(step, parts, strict=True)
        if s.sequence.scores
    }
    return StepRows(drawn_from, scores)


def _scores(scheduled: ScheduledSequence, rows: torch.Tensor) -> tuple[TokenLogprobs, ...]:
    """Those that are not told yet; a preempted prompt is computed from further ahead again."""
    sequence = scheduled.sequence
    num_top = sequence.request.num_prompt_logprobs
    assert num_top is not None
    start = sequence.num_computed_tokens
    end = min(start + len(rows), sequence.num_prompt_tokens - 1)
    scores: tuple[TokenLogprobs, ...] = ()
    for first in range(sequence.num_scored_tokens - 1, end, _ROWS_AT_ONCE):
        last = min(first + _ROWS_AT_ONCE, end)
        told_ids = sequence.token_ids[first + 1 : last + 1]
        scores += token_logprobs(rows[first - start : last - start], told_ids, num_top)
    return scores
