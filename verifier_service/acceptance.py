"""The acceptance rule: coupled verification.

The verifier draws its own token at every position with noise that is a function of (request key,
position); a draft is accepted while it equals that draw. So what is emitted never depends on the
draft, and a draft may be late, cut or wrong at no risk.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Verification:
    """What one forward over a block of drafts makes final."""

    num_accepted_tokens: int
    next_token_id: int | None
    """The correction at the first position that differs, or the bonus after the last draft; None
    where the target has no distribution."""


def verify(
    draft_ids: Sequence[int],  # [num_drafts]
    target_ids: Sequence[int | None],  # [num_drafts + 1], the target's draw at each position
) -> Verification:
    """Accept the longest prefix of the draft that the target would have drawn itself."""
    assert len(target_ids) == len(draft_ids) + 1
    num_accepted = 0
    while num_accepted < len(draft_ids) and draft_ids[num_accepted] == target_ids[num_accepted]:
        num_accepted += 1
    return Verification(num_accepted, target_ids[num_accepted])
