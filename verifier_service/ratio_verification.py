"""One sequence's block of drafts under a ratio test: from the rows of a step to what is final.

All noise is a function of the request's key and of the tokens before it, so a step that is run
again on the same drafts comes to the same end. But which drafts there are decides too; a seed alone
does not tell the tokens, as it does under the coupled rule.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate

import torch

from cluster.draft_law import DraftLaw
from cluster.protocol.prefix_hash import extend_prefix_hash
from engine.noise import derived_key, uniforms
from engine.target import Block, Drawn, target_probs
from verifier_service.acceptance import Verification
from verifier_service.ratio_rules import (
    JudgedDraft,
    block_odds,
    draw_correction,
    num_accepted_by_block,
    num_accepted_by_token,
    token_odds,
)


def verify_by_ratio(
    block: Block,
    laws: Sequence[DraftLaw],  # [num_drafts], that the drafts were drawn from
    logits: torch.Tensor,  # [num_drafts + 1, vocab], as the draw left them
    drawn: Drawn,  # the target's own draws; fewer where a grammar ended the block
    prefix_hash: int,  # of the committed tokens
    *,
    by_block: bool,  # else token by token
) -> Verification:
    """Accept a prefix of the draft and draw the token behind it.

    A draft at which the grammar ends is judged still, since that it is forbidden must refuse it by
    the rule and not leave it out. It has no row behind it: where it is accepted all the same, it is
    the step's last token.
    """
    num_rows = len(drawn.token_ids)
    chain = list(zip(block.draft_ids, laws, strict=True))[:num_rows]
    drafts = [
        JudgedDraft(token_id, law, target_probs(row, block.sampling))
        for (token_id, law), row in zip(chain, logits, strict=False)
    ]
    odds = block_odds(drafts) if by_block else token_odds(drafts)
    token_ids = (draft.token_id for draft in drafts)
    prefixes = list(accumulate(token_ids, extend_prefix_hash, initial=prefix_hash))
    drawn_chances = uniforms(derived_key(block.request_key, b"accept"), prefixes[1:]).tolist()
    accept = num_accepted_by_block if by_block else num_accepted_by_token
    num_accepted = accept(odds, drawn_chances)
    if num_accepted < len(drafts):
        refused, share = drafts[num_accepted], odds.shares[num_accepted]
        position = block.num_committed + num_accepted
        correction = draw_correction(refused, share, block.request_key, position)
        return Verification(num_accepted, correction)
    if num_accepted == num_rows:
        return Verification(num_accepted - 1, drafts[-1].token_id)
    return Verification(num_accepted, drawn.token_ids[num_accepted])
