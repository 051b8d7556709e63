"""From a model's logits to the target distribution: temperature, then top-k, top-p and min-p.

Tokens rank by (logit descending, id ascending), so what is kept never depends on how a sort treats
ties. What is kept of a row does not depend on the other rows.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from cluster.types import SamplingParams
from engine.scaled_logits import ScaledLogits, in_range

Array = Any
"""A tensor, or an array of numpy."""

_NUM_RANKED = 32
"""Top-p mostly keeps fewer of a language model's tokens."""
_NUM_RANKED_NEXT = 4_096
"""Where it keeps more, so many are ranked, then all."""
_MAX_TOP_K = 256
"""A larger top-k is ranked apart, where sorting is the quicker way."""
_ROWS_AT_ONCE = 8
"""When many of their tokens are ranked; bounds the memory."""


@dataclass(frozen=True, slots=True)
class TargetLogits:
    """The tokens that may be drawn. Their probabilities are the softmax of the logits."""

    token_ids: torch.Tensor
    """[num_kept] int64, ascending."""
    logits: torch.Tensor
    """[num_kept] float32."""


@dataclass(frozen=True, slots=True)
class Cuts:
    """Where m rows are cut off in rank order. What is above the lowest logit is kept, and what is
    equal to it up to the last id."""

    lowest: torch.Tensor
    """[m] float32, scaled."""
    last_ids: torch.Tensor
    """[m] int64."""

    def put(self, rows: torch.Tensor, cuts: Cuts) -> None:
        self.lowest[rows], self.last_ids[rows] = cuts.lowest, cuts.last_ids


def is_kept(token_ids: Array, logits: Array, lowest: Array, last_ids: Array) -> Array:
    """Which tokens the cut beside each of them keeps; shapes broadcast."""
    return (logits > lowest) | ((logits == lowest) & (token_ids <= last_ids))


def target_logits(logits: torch.Tensor, params: SamplingParams) -> TargetLogits:
    """The distribution that is sampled; of greedy parameters, the one at temperature 1.

    logits  # [vocab] float32; -inf is probability 0, the largest is finite
    """
    temperature = 1.0 if params.greedy else in_range(params.temperature)
    if not _truncates(params, len(logits)):
        token_ids = torch.arange(len(logits), device=logits.device)
        return TargetLogits(token_ids, (logits - logits.max()).div_(temperature))
    scaled = ScaledLogits(logits[None], [temperature])
    only = torch.zeros(1, dtype=torch.int64, device=logits.device)
    ranked, token_ids = scaled.top(only, num_ranked([params]))
    cuts = cut(scaled, only, ranked, [params])
    if ranked[0, -1] < cuts.lowest[0]:
        token_ids, order = token_ids[0].sort()
        values = ranked[0, order]
    else:
        token_ids = torch.nonzero(scaled.row(0) >= cuts.lowest).flatten()
        values = scaled.tokens(only, token_ids)
    kept = is_kept(token_ids, values, cuts.lowest, cuts.last_ids)
    return TargetLogits(token_ids[kept], values[kept])


def token_probs(
    logits: torch.Tensor, params: Sequence[SamplingParams], token_ids: Sequence[int]
) -> list[float]:
    """The probability of one token of each row in the distribution that is sampled, all rows at
    once; of greedy parameters, in the one at temperature 1.

    logits     # [n, vocab] float32; -inf is probability 0, the largest of a row is finite
    params     # n
    token_ids  # n
    """
    scaled = ScaledLogits(logits, [1.0 if p.greedy else p.temperature for p in params])
    rows = torch.arange(len(params), device=logits.device)
    values = scaled.rows(rows)
    if any(_truncates(p, scaled.vocab_size) for p in params):
        ranked, _ = scaled.top(rows, num_ranked(params))
        cuts = cut(scaled, rows, ranked, params)
        all_ids = torch.arange(scaled.vocab_size, device=logits.device)
        kept = is_kept(all_ids, values, cuts.lowest[:, None], cuts.last_ids[:, None])
        values.masked_fill_(~kept, -torch.inf)
    own_ids = torch.tensor(token_ids, device=logits.device)
    probs: list[float] = values.softmax(-1)[rows, own_ids].tolist()
    return probs


def num_ranked(params: Sequence[SamplingParams]) -> int:
    """How many of the highest logits to rank before these rows are cut."""
    return max([_NUM_RANKED, *(p.top_k + 1 for p in params if p.top_k < _MAX_TOP_K)])


def cut(
    scaled: ScaledLogits,
    rows: torch.Tensor,
    ranked: torch.Tensor,
    params: Sequence[SamplingParams],
) -> Cuts:
    """Apply top-k, top-p and min-p.

    rows    # [m] int64
    ranked  # [m, num_ranked] float32, their highest logits, descending
    params  # m
    """
    cuts = _cut_by_rank_and_mass(scaled, rows, ranked, params)
    # The most likely token's scaled logit is 0, so this is its share.
    shares = [math.log(p.min_p) if p.min_p else -math.inf for p in params]
    if max(shares) > -math.inf:
        lowest = torch.tensor(shares, dtype=torch.float32, device=cuts.lowest.device)
        higher = lowest > cuts.lowest
        cuts.lowest[higher], cuts.last_ids[higher] = lowest[higher], scaled.vocab_size - 1
    return cuts


def _cut_by_rank_and_mass(
    scaled: ScaledLogits,
    rows: torch.Tensor,
    ranked: torch.Tensor,
    params: Sequence[SamplingParams],
) -> Cuts:
    """Apply top-k and top-p; rows with the same parameters together."""
    vocab_size = scaled.vocab_size
    alike: defaultdict[tuple[int, float], list[int]] = defaultdict(list)
    for index, p in enumerate(params):
        if 0 < p.top_k < vocab_size or p.top_p < 1.0:
            alike[min(p.top_k or vocab_size, vocab_size), p.top_p].append(index)
    cuts = Cuts(torch.full_like(ranked[:, 0], -torch.inf), torch.full_like(rows, vocab_size - 1))
    for (top_k, top_p), members in alike.items():
        if len(members) == len(params):
            return _cut_alike(scaled, rows, ranked, top_k, top_p)
        group = torch.tensor(members, device=rows.device)
        cuts.put(group, _cut_alike(scaled, rows[group], ranked[group], top_k, top_p))
    return cuts


def _truncates(params: SamplingParams, vocab_size: int) -> bool:
    return 0 < params.top_k < vocab_size or params.top_p < 1.0 or params.min_p > 0.0


def _cut_alike(
    scaled: ScaledLogits, rows: torch.Tensor, ranked: torch.Tensor, top_k: int, top_p: float
) -> Cuts:
    """Keep the first top_k tokens in rank order, of those the first whose mass reaches top_p."""
    if top_k == scaled.vocab_size:
        # Row by row: threads share the sum of one row in another way than the sums of many, and
        # the order of adding decides bits.
        totals = torch.stack([scaled.row(row).exp_().sum() for row in rows.tolist()])
        return _cut_at_weight(scaled, rows, ranked, top_p * totals.double())
    if ranked.shape[1] <= top_k:
        ranked = scaled.descending(rows, top_k + 1)
    num_kept = torch.full_like(rows, top_k)
    if top_p < 1.0:
        weights = _running_weights(ranked[:, :top_k])
        num_kept = _num_until(weights, top_p * weights[:, -1]).clamp_(max=top_k)
    return _cuts_after(scaled, rows, ranked, num_kept)


def _cut_at_weight(
    scaled: ScaledLogits, rows: torch.Tensor, ranked: torch.Tensor, weights: torch.Tensor
) -> Cuts:
    """weights  # [m] float64"""
    num_ranked = ranked.shape[1]
    num_kept = _num_until(_running_weights(ranked), weights).clamp_(max=scaled.vocab_size)
    cuts = _cuts_after(scaled, rows, ranked, num_kept)
    if num_ranked < scaled.vocab_size:
        num_more = _NUM_RANKED_NEXT if num_ranked < _NUM_RANKED_NEXT else scaled.vocab_size
        unknown = torch.nonzero(num_kept >= num_ranked).flatten()
        for start in range(0, len(unknown), _ROWS_AT_ONCE):
            some = unknown[start : start + _ROWS_AT_ONCE]
            more = scaled.descending(rows[some], num_more)
            cuts.put(some, _cut_at_weight(scaled, rows[some], more, weights[some]))
    return cuts


def _running_weights(ranked: torch.Tensor) -> torch.Tensor:
    """exp(logit) of each token and all before it, float64; the largest logit is 0."""
    return ranked.exp().cumsum(-1, dtype=torch.float64)


def _num_until(running_weights: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
    """How many tokens it takes to reach the weight of the row, [m]; one more than there are if they
    do not."""
    return (running_weights < weights[:, None]).sum(-1).add_(1)


def _cuts_after(
    scaled: ScaledLogits, rows: torch.Tensor, ranked: torch.Tensor, num_kept: torch.Tensor
) -> Cuts:
    """Cuts after the first num_kept tokens; not right where no more are ranked, unless that is all.

    num_kept  # [m] int64, from 1
    """
    num_ranked = ranked.shape[1]
    lowest = ranked.gather(1, num_kept.clamp(max=num_ranked)[:, None] - 1).flatten()
    following = ranked.gather(1, num_kept.clamp(max=num_ranked - 1)[:, None]).flatten()
    last_ids = torch.full_like(rows, scaled.vocab_size - 1)
    splits_tie = (following == lowest) & (num_kept < num_ranked)
    for index in torch.nonzero(splits_tie).flatten().tolist():
        tied = torch.nonzero(scaled.row(int(rows[index])) == lowest[index]).flatten()
        num_above = (ranked[index] > lowest[index]).sum()
        last_ids[index] = tied[num_kept[index] - num_above - 1]
    return Cuts(lowest, last_ids)
