"""The law of a model drafter, and the token drawn from it.

Its noise is not the request's. A ratio test compares the drafter's law with the target's, and is
biased if what drew the draft also draws the correction. So this noise has a key of its own, and
hangs on the whole prefix: under block verification what becomes of a token depends on those behind
it, so noise that a refused chain has used up must not be met again behind another one.
"""

from __future__ import annotations

import numpy as np
import torch

from cluster.draft_law import LAW_TOTAL, DraftLaw
from cluster.types import SamplingParams
from engine.noise import derived_key
from engine.sampling import race
from engine.scaled_logits import in_range

_LAW_LEN = 32
"""Tokens of a law. More would be 5 bytes each on the wire, and are hardly ever drawn."""


def draft_key(request_key: int) -> int:
    """Key of the noise that draws a request's drafts."""
    return derived_key(request_key, b"draft")


def law_of(logits: torch.Tensor, params: SamplingParams) -> DraftLaw | None:
    """The likeliest tokens, in whole weights of at least 1. None where no token can be drawn.

    Top-p and min-p cut within these, which is a little less than they cut of all: a law may be any,
    and so no more than these are looked at.

    logits  # [vocab] float32; -inf is probability 0
    """
    ranked = logits.topk(min(params.top_k or _LAW_LEN, _LAW_LEN, len(logits)))
    values = ranked.values.double().cpu().numpy()
    if not np.isfinite(values[0]):
        return None
    weights = np.exp((values - values[0]) / in_range(params.temperature))
    mass = weights.cumsum()
    kept = (mass - weights < params.top_p * mass[-1]) & (weights >= params.min_p) & (weights > 0)
    shares = np.maximum(1.0, np.floor(weights[kept] * (LAW_TOTAL / weights[kept].sum())))
    shares[0] += LAW_TOTAL - shares.sum()
    token_ids = ranked.indices.cpu().numpy()[kept]
    return DraftLaw(tuple(token_ids.tolist()), tuple(shares.astype(int).tolist()))


def draw_draft(law: DraftLaw, key: int, prefix_hash: int) -> int:
    """The token that this noise draws behind a prefix.

    `key`: see draft_key; `prefix_hash`: of all tokens before it.
    """
    token_ids, weights = np.array(law.token_ids), np.array(law.weights, np.float64)
    return race(token_ids, weights, key, prefix_hash)
