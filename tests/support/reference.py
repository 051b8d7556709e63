"""The law, spelled out: decode token after token with nothing but the target and the noise."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from cluster.types import SamplingParams
from engine.adjustments import adjustments_of
from engine.sampling import SampleRow, sample
from tests.support.scripted_target import EOS, Law


def decode(
    law: Law,
    prompt: Sequence[int],
    *,
    max_tokens: int,
    sampling: SamplingParams,
    request_key: int,
    stop_ids: frozenset[int] = frozenset({EOS}),
    max_len: int = 200,
) -> list[int]:
    """The only right answer to a request."""
    tokens = list(prompt)
    while len(tokens) < min(max_len, len(prompt) + max_tokens):
        logits = torch.tensor([law(tuple(tokens))], dtype=torch.float32)
        adjustments = adjustments_of(sampling, prompt, stop_ids, logits.shape[1])
        if adjustments is not None:
            for token_id in tokens[len(prompt) :]:
                adjustments.commit([token_id])
            adjustments.apply(logits, [])
        tokens += sample(logits, [SampleRow(sampling, request_key, len(tokens))])
        if tokens[-1] in stop_ids:
            break
    return tokens[len(prompt) :]
