"""From a model's logits to the logits of the target distribution: temperature, top-k, top-p.

Pure functions of one row of logits. Ranks order tokens by (logit descending, id ascending), so ties
never depend on a sort.
"""

from __future__ import annotations

import torch

from cluster.types import SamplingParams

_TOP_P_GUESS = 256


def target_logits(logits: torch.Tensor, params: SamplingParams) -> torch.Tensor:
    """Logits of the distribution that is sampled; dropped tokens are -inf.

    logits  # [vocab] float32, finite
    returns # [vocab] float32, largest value 0
    """
    logits = logits - logits.max()
    if not params.greedy:
        logits = logits / params.temperature
    if 0 < params.top_k < len(logits):
        logits = _keep_top(logits, torch.topk(logits, params.top_k).values)
    if params.top_p < 1.0:
        logits = _keep_mass(logits, params.top_p)
    return logits


def _keep_mass(logits: torch.Tensor, top_p: float) -> torch.Tensor:
    """Keep the first tokens in rank order whose mass reaches top_p; at least one."""
    log_total = torch.logsumexp(logits, dim=-1)
    num_ranked = min(_TOP_P_GUESS, len(logits))
    while True:
        ranked = torch.topk(logits, num_ranked).values
        mass = torch.exp(ranked - log_total).double().cumsum(dim=-1)
        num_kept = int((mass < top_p).sum()) + 1
        if num_kept <= num_ranked:
            return _keep_top(logits, ranked[:num_kept])
        if num_ranked == len(logits):
            return logits
        num_ranked = min(8 * num_ranked, len(logits))


def _keep_top(logits: torch.Tensor, ranked: torch.Tensor) -> torch.Tensor:
    """Keep as many tokens as `ranked` has.

    ranked  # [num_kept] the largest logits, descending
    """
    lowest = ranked[-1]
    kept = logits >= lowest
    num_surplus = int(kept.sum()) - len(ranked)
    if num_surplus > 0:
        tied_ids = (logits == lowest).nonzero().flatten()
        kept[tied_ids[len(tied_ids) - num_surplus :]] = False
    return logits.masked_fill(~kept, -torch.inf)
