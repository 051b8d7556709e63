"""The coupled sampler: golden tokens, the definition, the law of its draws, row by row."""

from __future__ import annotations

import math
import random
from collections.abc import Callable

import numpy as np
import pytest
import torch

from cluster.types import SamplingParams
from engine.noise import noise_bits, noise_states
from engine.processors import target_logits
from engine.sampling import NonFiniteLogitsError, SampleRow, sample

PLAIN = SamplingParams()


def reference_target(logits: torch.Tensor, params: SamplingParams) -> tuple[np.ndarray, np.ndarray]:
    """Ids and logits of all tokens that may be drawn, by sorting everything."""
    scaled = ((logits - logits.max()) / params.temperature).numpy()
    order = np.argsort(-scaled, kind="stable")
    if params.top_k:
        order = order[: params.top_k]
    if params.top_p < 1.0:
        mass = np.exp(scaled[order].astype(np.float64)).cumsum()
        order = order[: int((mass / mass[-1] < params.top_p).sum()) + 1]
    return order, scaled[order].astype(np.float64)


def reference_sample(logits: torch.Tensor, row: SampleRow) -> int:
    """The definition, in float64, over all tokens that may be drawn."""
    token_ids, target = reference_target(logits, row.sampling)
    states = noise_states([(row.request_key, row.position)])
    u = (noise_bits(states, token_ids) + 0.5) * 2.0**-52
    scores = target - np.log(-np.log1p(-u))
    return int(token_ids[scores == scores.max()].min())


def chi_square_z(counts: torch.Tensor, probs: torch.Tensor) -> float:
    """How many standard deviations the chi-square statistic is above its mean."""
    expected = probs.double() * counts.sum()
    statistic = float((((counts - expected) ** 2) / expected).sum())
    freedom = len(probs) - 1
    return (statistic - freedom) / math.sqrt(2 * freedom)


def test_golden_tokens() -> None:
    logits = torch.sin(torch.arange(1000.0) * 0.37).mul(4).expand(8, -1)
    rows = [SampleRow(SamplingParams(0.9, 0, 0.95), 12345, position) for position in range(8)]
    assert sample(logits, rows) == [395, 682, 821, 225, 360, 598, 902, 327]


@pytest.mark.parametrize(
    "params",
    [
        PLAIN,
        SamplingParams(temperature=0.6),
        SamplingParams(temperature=1.3, top_k=5),
        SamplingParams(temperature=1.1, top_p=0.8),
    ],
)
@pytest.mark.parametrize("over", ["positions", "keys"])
def test_draws_follow_the_target_law(params: SamplingParams, over: str) -> None:
    num_draws, logits = 6_000, torch.tensor([0.0, 1.0, 2.0, -1.0, 0.5, 1.5, -0.5, 1.0])
    rows = [
        SampleRow(params, i if over == "keys" else 9, 4 if over == "keys" else i)
        for i in range(num_draws)
    ]
    drawn = sample(logits.expand(num_draws, -1), rows)
    target = target_logits(logits, params)
    counts = torch.bincount(torch.tensor(drawn), minlength=len(logits))
    assert counts.sum() == counts[target.token_ids].sum()
    probs = torch.softmax(target.logits.double(), dim=-1)
    assert chi_square_z(counts[target.token_ids], probs) < 5


def test_draws_follow_the_target_law_over_a_large_vocabulary() -> None:
    """A sure token among 152k: coarse noise that rounds to infinity would lose it."""
    logits = torch.zeros(151_936)
    logits[70_000] = 40.0
    rows = [SampleRow(PLAIN, 1, position) for position in range(300)]
    assert set(sample(logits.expand(300, -1), rows)) == {70_000}
    logits[70_000] = math.log(151_935)  # as likely as all others together
    drawn = sample(logits.expand(300, -1), rows)
    assert abs(drawn.count(70_000) - 150) < 5 * math.sqrt(75)
    assert len(set(drawn)) > 100


def flat(vocab_size: int) -> torch.Tensor:
    return torch.randn(vocab_size) * 0.1


def gaussian(vocab_size: int) -> torch.Tensor:
    return torch.randn(vocab_size) * random.choice([1.0, 3.0])


def peaked(vocab_size: int) -> torch.Tensor:
    logits = torch.randn(vocab_size)
    logits[random.randrange(vocab_size)] += random.choice([5.0, 15.0, 60.0])
    return logits


def equal(vocab_size: int) -> torch.Tensor:
    return torch.full((vocab_size,), -7.0)


def tied(vocab_size: int) -> torch.Tensor:
    """As bfloat16 has them, and coarser."""
    return (torch.randn(vocab_size) * 2).mul(8).round().div(random.choice([8.0, 64.0]))


def mostly_impossible(vocab_size: int) -> torch.Tensor:
    logits = torch.full((vocab_size,), -torch.inf)
    possible = torch.randint(vocab_size, (random.choice([1, 5, 100]),))
    logits[possible] = torch.randn(len(possible))
    return logits


def extreme(vocab_size: int) -> torch.Tensor:
    return (torch.randn(vocab_size) * random.choice([1e4, 1e30, 1e38])).clamp(-3e38, 3e38)


KINDS = [flat, gaussian, peaked, equal, tied, mostly_impossible, extreme]
TEMPERATURES = [1.0, 1.0, 0.7, 2.0, 0.05, 1e-6, 1e-30, 1e30]
TRUNCATIONS = [
    *[(0, 1.0)] * 4,
    *[(1, 1.0), (2, 1.0), (20, 1.0), (50, 1.0), (300, 1.0), (100_000, 1.0)],
    *[(0, 0.0137), (0, 0.3137), (0, 0.9137), (0, 0.99137), (20, 0.8137), (300, 0.9137)],
]


def any_row() -> SampleRow:
    params = SamplingParams(random.choice(TEMPERATURES), *random.choice(TRUNCATIONS))
    return SampleRow(params, random.getrandbits(64), random.randrange(5_000))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    ("vocab_size", "num_rows"),
    [(3, 60), (50, 60), (64, 60), (1_000, 100), (5_003, 60), (49_152, 16), (151_936, 6)],
)
def test_equals_the_definition(
    vocab_size: int, num_rows: int, kind: Callable[[int], torch.Tensor]
) -> None:
    torch.manual_seed(vocab_size)
    random.seed(vocab_size)
    logits = torch.stack([kind(vocab_size) for _ in range(num_rows)])
    rows = [any_row() for _ in range(num_rows)]
    expected = [reference_sample(*pair) for pair in zip(logits, rows, strict=True)]
    assert sample(logits, rows) == expected


def test_a_token_of_the_tail_wins_now_and_then() -> None:
    """Else the tests above would not notice if the search for small noise found nothing."""
    logits = torch.zeros(40, 5_003)
    logits[:, :2_000] = 1.0
    rows = [SampleRow(PLAIN, 5, position) for position in range(40)]
    drawn = sample(logits, rows)
    assert sum(token_id >= 2_000 for token_id in drawn) > 5
    assert drawn == [reference_sample(*pair) for pair in zip(logits, rows, strict=True)]


def test_a_row_does_not_depend_on_the_others() -> None:
    torch.manual_seed(0)
    logits = torch.randn(24, 5003) * 2
    choices = [
        PLAIN,
        SamplingParams(0.0),
        SamplingParams(0.7, 40, 0.9),
        SamplingParams(1.2, 0, 0.5),
    ]
    rows = [SampleRow(choices[i % 4], 1000 + i, 10 * i) for i in range(24)]
    together = sample(logits, rows)
    assert together == [sample(logits[i : i + 1], [rows[i]])[0] for i in range(24)]
    order = torch.randperm(24).tolist()
    assert sample(logits[order], [rows[i] for i in order]) == [together[i] for i in order]


def test_the_same_noise_couples_similar_distributions() -> None:
    """Two close distributions mostly draw the same token: what makes drafts acceptable."""
    torch.manual_seed(0)
    logits = torch.randn(2000, 64) * 2
    close = logits + torch.randn_like(logits) * 0.1
    rows = [SampleRow(PLAIN, 3, position) for position in range(2000)]
    drawn = zip(sample(logits, rows), sample(close, rows), strict=True)
    same = sum(a == b for a, b in drawn) / 2000
    overlap = torch.minimum(logits.softmax(-1), close.softmax(-1)).sum(-1).mean()
    assert overlap - 0.03 < same <= 1


def test_greedy_takes_the_lowest_id_of_a_tie() -> None:
    logits = torch.zeros(3, 49_152)
    logits[0, [5, 70, 40_000]] = 1.0
    logits[1, [48_000, 48_001, 49_151]] = 1.0
    assert sample(logits, [SampleRow(SamplingParams(0.0), 0, 0)] * 3) == [5, 48_000, 0]


def test_bad_rows_are_named_and_the_rest_can_be_drawn() -> None:
    logits = torch.zeros(4, 10)
    logits[1, 3] = torch.nan
    logits[2, 4] = torch.inf
    logits[3, 5] = -torch.inf
    rows = [SampleRow(PLAIN, 1, i) for i in range(4)]
    with pytest.raises(NonFiniteLogitsError) as caught:
        sample(logits, rows)
    assert caught.value.rows == (1, 2)
    good = [0, 3]
    assert len(sample(logits[good], [rows[i] for i in good])) == 2


def test_nothing_to_draw() -> None:
    assert sample(torch.zeros(0, 10), []) == []
