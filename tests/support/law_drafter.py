"""A scripted drafter that tells its laws, as the model drafter does, over any law of its own."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence

import torch

from cluster.draft_law import LAW_TOTAL, DraftLaw
from cluster.protocol.prefix_hash import extend_prefix_hash, prefix_hash
from cluster.types import DraftNode, GenerationRequest, SamplingParams
from engine.drafting.law import draft_key, draw_draft, law_of
from engine.sampling import race
from tests.support.engine_driver import ScriptedDrafter
from tests.support.scripted_target import Law

Draw = Callable[[DraftLaw, GenerationRequest, int, int], int]
"""(law, request, position, prefix hash) -> the token."""
Tell = Callable[[DraftLaw], DraftLaw]


def by_own_noise(law: DraftLaw, request: GenerationRequest, position: int, prefix: int) -> int:
    """As it shall be."""
    return draw_draft(law, draft_key(request.request_key), prefix)


def by_shared_noise(law: DraftLaw, request: GenerationRequest, position: int, prefix: int) -> int:
    """Wrong: the noise of the target's own draws."""
    token_ids = torch.tensor(law.token_ids).numpy()
    weights = torch.tensor(law.weights, dtype=torch.float64).numpy()
    return race(token_ids, weights, request.request_key, position)


def as_it_is(law: DraftLaw) -> DraftLaw:
    return law


def rounded(law: DraftLaw) -> DraftLaw:
    """Wrong: told in steps of a quarter, and drawn from as it was."""
    step = LAW_TOTAL // 4
    weights = [max(step, weight // step * step) for weight in law.weights]
    weights[0] += LAW_TOTAL - sum(weights)
    return DraftLaw(law.token_ids, tuple(weights))


def law_drafter(
    law: Law,
    *,
    lead: int = 0,
    draw: Draw = by_own_noise,
    tell: Tell = as_it_is,
    confidence: Callable[[int], float] = lambda token_id: 0.5,
) -> ScriptedDrafter:
    """`lead`: tokens ahead of what is wanted; `confidence`: of a drawn token."""

    @functools.cache
    def law_behind(tokens: tuple[int, ...], sampling: SamplingParams) -> DraftLaw:
        own = law_of(torch.tensor(law(tokens), dtype=torch.float32), sampling)
        assert own is not None
        return own

    def draft(committed: tuple[int, ...], request: GenerationRequest) -> Sequence[DraftNode]:
        tokens, prefix = list(committed), prefix_hash(committed)
        nodes: list[DraftNode] = []
        for index in range(request.num_speculative_tokens + lead):
            own = law_behind(tuple(tokens), request.sampling)
            token_id = draw(own, request, len(tokens), prefix)
            nodes.append(DraftNode(token_id, index - 1, confidence(token_id), tell(own)))
            tokens.append(token_id)
            prefix = extend_prefix_hash(prefix, token_id)
        return nodes

    return draft
