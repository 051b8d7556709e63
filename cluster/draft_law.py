"""The law that a draft token was drawn from, as a drafter tells it.

The ratio tests need it exactly. So it is cut to the likeliest tokens and rounded to whole weights
first, and the token is drawn from that: what is told is the very law, and nothing is lost on the
wire.
"""

from __future__ import annotations

from typing import NamedTuple

LAW_TOTAL = 1 << 16
"""What the weights of a law add up to."""
MAX_LAW_LEN = 64
"""Most tokens in a law."""


class DraftLaw(NamedTuple):
    """A token's probability is its weight over LAW_TOTAL; that of any other token is 0."""

    token_ids: tuple[int, ...]
    """Each once."""
    weights: tuple[int, ...]
    """One per token, above 0."""

    def prob(self, token_id: int) -> float:
        """Of one token."""
        if token_id not in self.token_ids:
            return 0.0
        return self.weights[self.token_ids.index(token_id)] / LAW_TOTAL


def could_have_drawn(law: DraftLaw, token_id: int, vocab_size: int) -> bool:
    """Whether this is a law over the vocabulary that gives the token a probability. More cannot be
    seen from outside: a drafter that lies about its law is believed."""
    token_ids, weights = law
    return (
        0 < len(token_ids) == len(weights) <= MAX_LAW_LEN
        and len(set(token_ids)) == len(token_ids)
        and min(token_ids) >= 0
        and max(token_ids) < vocab_size
        and min(weights) > 0
        and sum(weights) == LAW_TOTAL
        and token_id in token_ids
    )
