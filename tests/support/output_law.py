"""Chi-square of what was emitted against what the target's law says, and that law spelled out.

The law is written here a second time, in float64 and without the engine, so that a mistake in the
engine's processors is a mistake against this one.
"""

from __future__ import annotations

import itertools
import math
from collections import Counter
from collections.abc import Iterable, Sequence

import torch

from cluster.types import SamplingParams
from tests.support.scripted_target import Law

REJECT_BELOW = 1e-3
"""A law is rejected when so small a p-value comes out."""
_MIN_EXPECTED = 5.0
"""Rarer outcomes are pooled, as the test's approximation asks for."""


def target_probs(logits: Sequence[float], sampling: SamplingParams) -> list[float]:
    """Temperature, then top-k, then top-p, ties to the lowest id."""
    scaled = [value / sampling.temperature for value in logits]
    order = sorted(range(len(scaled)), key=lambda token_id: (-scaled[token_id], token_id))
    kept = order[: sampling.top_k or len(order)]
    weights = {token_id: math.exp(scaled[token_id] - scaled[kept[0]]) for token_id in kept}
    total = sum(weights.values())
    nucleus, mass = [], 0.0
    for token_id in kept:
        nucleus.append(token_id)
        mass += weights[token_id] / total
        if mass >= sampling.top_p:
            break
    total = sum(weights[token_id] for token_id in nucleus)
    return [weights[t] / total if t in nucleus else 0.0 for t in range(len(logits))]


def sequence_law(
    law: Law, prompt: tuple[int, ...], length: int, vocab_size: int, sampling: SamplingParams
) -> dict[tuple[int, ...], float]:
    """Probability of every continuation of this length."""
    probs: dict[tuple[int, ...], float] = {}
    for tokens in itertools.product(range(vocab_size), repeat=length):
        prob = 1.0
        for index, token_id in enumerate(tokens):
            prefix = prompt + tokens[:index]
            prob *= target_probs(law(prefix), sampling)[token_id]
        probs[tokens] = prob
    return probs


def p_value(
    emitted: Iterable[tuple[int, ...]], expected_probs: dict[tuple[int, ...], float]
) -> float:
    """Chance of a sample at least this far from the law, were the law true; 0 if the sample holds
    what the law forbids."""
    counts = Counter(emitted)
    total = sum(counts.values())
    if any(expected_probs.get(outcome, 0.0) == 0.0 for outcome in counts):
        return 0.0
    cells = [(counts[outcome], total * prob) for outcome, prob in expected_probs.items() if prob]
    common = [cell for cell in cells if cell[1] >= _MIN_EXPECTED]
    rare = [cell for cell in cells if cell[1] < _MIN_EXPECTED]
    if rare:
        common.append((sum(cell[0] for cell in rare), sum(cell[1] for cell in rare)))
    statistic = sum((seen - expected) ** 2 / expected for seen, expected in common)
    half = torch.tensor([(len(common) - 1) / 2, statistic / 2], dtype=torch.float64)
    return float(torch.special.gammaincc(half[0], half[1]))
