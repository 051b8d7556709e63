"""The ratio tests: drafts are accepted by their probability under both laws.

Two rules, each lossless in distribution. Token by token (Leviathan et al., "Fast inference from
transformers via speculative decoding", 2023): a draft is accepted with the chance
min(1, target_prob / draft_prob), and where one is refused the token is drawn from what the target
gives beyond the draft, max(target_probs - draft_probs, 0). By blocks (Sun et al., "Block
verification accelerates speculative decoding", 2025): chains are accepted as a whole, so that what
one draft has too little of another may make up for; never fewer are accepted, in expectation.

Three conditions, or the output is biased:

- A draft was drawn from the very law that is told, so after it was cut and rounded.
- The noise that drew it takes no part in judging it or in what comes instead.
- Whether a draft is submitted hangs on nothing that was known only after it was drawn: neither its
  token nor those behind it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from cluster.draft_law import LAW_TOTAL, DraftLaw
from engine.noise import Floats
from engine.sampling import race
from engine.target import TargetProbs


@dataclass(frozen=True, slots=True)
class JudgedDraft:
    """A draft of a chain, and both laws at its position."""

    token_id: int
    law: DraftLaw
    """That it was drawn from."""
    target: TargetProbs
    """Behind the drafts before it, after all processors."""

    @property
    def ratio(self) -> float:
        """Of its probabilities; above 0 only where the target may draw it."""
        [prob] = self.target.probs(np.array([self.token_id]))
        return float(prob) / self.law.prob(self.token_id)

    def excess(self, share: float) -> float:
        """Mass of what the target's share gives beyond the law: all but what both give."""
        target_probs = self.target.probs(np.array(self.law.token_ids))
        common = np.minimum(share * target_probs, np.array(self.law.weights) / LAW_TOTAL)
        return max(0.0, share - float(common.sum()))

    def residual(self, share: float) -> Floats:
        """What the target's share gives beyond the law, for each token of the target.

        returns  # [num_kept]
        """
        law_ids = np.array(self.law.token_ids)
        weights: Floats = self.target.weights * np.float64(share / self.target.total)
        places = np.minimum(np.searchsorted(self.target.token_ids, law_ids), len(weights) - 1)
        known = self.target.token_ids[places] == law_ids
        weights[places[known]] -= np.array(self.law.weights)[known] / LAW_TOTAL
        weights[weights < 0.0] = 0.0
        return weights


@dataclass(frozen=True, slots=True)
class Odds:
    """How a chain of n drafts is judged."""

    chances: tuple[float, ...]
    """Index i, from 0 to n - 1: of an accepted chain that ends with draft i. Token by token: of
    draft i, if all before it were accepted."""
    shares: tuple[float, ...]
    """Index i: what the target's probabilities count at the position of draft i, if it is the first
    that is refused."""


def token_odds(drafts: Sequence[JudgedDraft]) -> Odds:
    """Each draft by itself."""
    return Odds(tuple(min(1.0, draft.ratio) for draft in drafts), (1.0,) * len(drafts))


def block_odds(drafts: Sequence[JudgedDraft]) -> Odds:
    """All prefixes of the chain together; the longest that is accepted counts."""
    shares = [1.0]
    for draft in drafts:
        shares.append(min(1.0, shares[-1] * draft.ratio))
    chances = [
        _block_chance(share, draft.excess(share))
        for share, draft in zip(shares[1:-1], drafts[1:], strict=True)
    ]
    return Odds((*chances, shares[-1]), tuple(shares[:-1]))


def _block_chance(share: float, excess: float) -> float:
    """`excess`: mass of the residual behind the prefix. Where the denominator is 0 both laws are
    one, and the next draft will be accepted anyway."""
    denominator = excess + 1.0 - share
    return excess / denominator if denominator > 0.0 else 1.0


def num_accepted_by_token(odds: Odds, uniforms: Sequence[float]) -> int:
    """Up to the first refusal. `uniforms`: one per draft, in (0, 1), independent of the drafts."""
    for index, (chance, uniform) in enumerate(zip(odds.chances, uniforms, strict=True)):
        if uniform >= chance:
            return index
    return len(odds.chances)


def num_accepted_by_block(odds: Odds, uniforms: Sequence[float]) -> int:
    """Up to the last acceptance, whatever was refused before it. `uniforms`: as above."""
    for index in reversed(range(len(odds.chances))):
        if uniforms[index] < odds.chances[index]:
            return index + 1
    return 0


def draw_correction(draft: JudgedDraft, share: float, key: int, position: int) -> int:
    """The token in place of a draft that was refused first, by the noise of (key, position).

    Where rounding leaves nothing of the residual, the laws are one to the last bits, and a token of
    the target's is as good.
    """
    weights = draft.residual(share)
    weights = weights if weights.any() else draft.target.weights.astype(np.float64)
    return race(draft.target.token_ids, weights, key, position)
