"""From a model's logits to the target distribution: temperature, then top-k, then top-p.

Pure functions of one row of logits. Tokens rank by (logit descending, id ascending), so what is
kept never depends on how a sort treats ties.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from cluster.types import SamplingParams

_FIRST_GUESS = 256


@dataclass(frozen=True, slots=True)
class TargetLogits:
    """The tokens that may be drawn. Their probabilities are the softmax of the logits."""

    token_ids: torch.Tensor
    """[num_kept] int64, ascending."""
    logits: torch.Tensor
    """[num_kept] float32."""


def target_logits(logits: torch.Tensor, params: SamplingParams) -> TargetLogits:
    """The distribution that is sampled.

    logits  # [vocab] float32; -inf is probability 0, the largest is finite
    """
    scaled = logits - logits.max()
    if not params.greedy:
        scaled = scaled / params.temperature
    target = TargetLogits(torch.arange(len(logits), device=logits.device), scaled)
    if 0 < params.top_k < len(logits):
        target = _keep_first(target, *_rank(target, params.top_k + 1), params.top_k)
    if params.top_p < 1.0:
        target = _keep_mass(target, params.top_p)
    return target


def _keep_mass(target: TargetLogits, top_p: float) -> TargetLogits:
    """The first tokens in rank order whose mass reaches top_p; at least one."""
    log_total = torch.logsumexp(target.logits, dim=-1)
    num_ranked = _FIRST_GUESS
    while True:
        ranked, indices = _rank(target, num_ranked)
        mass = torch.exp(ranked - log_total).double().cumsum(dim=-1)
        num_kept = int((mass < top_p).sum()) + 1
        if num_kept <= len(ranked):
            return _keep_first(target, ranked, indices, num_kept)
        if len(ranked) == len(target.logits):
            return target
        num_ranked *= 8


def _rank(target: TargetLogits, num_ranked: int) -> tuple[torch.Tensor, torch.Tensor]:
    """The highest logits, descending, and where they are; the order among ties is arbitrary."""
    ranked, indices = torch.topk(target.logits, min(num_ranked, len(target.logits)))
    return ranked, indices


def _keep_first(
    target: TargetLogits, ranked: torch.Tensor, indices: torch.Tensor, num_kept: int
) -> TargetLogits:
    """The first num_kept tokens in rank order, of which `_rank` gave at least the logits."""
    lowest = ranked[num_kept - 1]
    if num_kept < len(ranked) and ranked[num_kept] < lowest:
        kept = indices[:num_kept].sort().values
    else:  # equal logits on both sides of the cut: the lower ids stay
        above = torch.nonzero(target.logits > lowest).flatten()
        tied = torch.nonzero(target.logits == lowest).flatten()
        kept = torch.cat([above, tied[: num_kept - len(above)]]).sort().values
    return TargetLogits(target.token_ids[kept], target.logits[kept])
