"""The coupled sampler: golden vectors, the law of its draws, independence of rows."""

from __future__ import annotations

import math
import random

import pytest
import torch

from cluster.types import SamplingParams
from engine.processors import target_logits
from engine.sampling import (
    NonFiniteLogitsError,
    SampleRow,
    exponential,
    noise_bits,
    noise_state,
    sample,
)

MASK = (1 << 64) - 1
PLAIN = SamplingParams()


def reference_mix(z: int) -> int:
    z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & MASK
    z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & MASK
    return z ^ (z >> 31)


def reference_bits(request_key: int, position: int, token_id: int) -> int:
    """Element token_id of splitmix64 seeded with the hash of key and position, top 52 bits."""
    gamma = 0x9E3779B97F4A7C15
    state = reference_mix((request_key + gamma) & MASK)
    state = reference_mix((state + position * gamma) & MASK)
    return reference_mix((state + (token_id + 1) * gamma) & MASK) >> 12


def reference_sample(logits: torch.Tensor, row: SampleRow) -> int:
    """The definition, in float64, over all tokens that may be drawn."""
    target = target_logits(logits, row.sampling)
    scores = {
        token_id: logit
        - math.log(exponential(reference_bits(row.request_key, row.position, token_id)))
        for token_id, logit in zip(target.token_ids.tolist(), target.logits.tolist(), strict=True)
    }
    return max(scores, key=lambda token_id: (scores[token_id], -token_id))


def chi_square_z(counts: torch.Tensor, probs: torch.Tensor) -> float:
    """How many standard deviations the chi-square statistic is above its mean."""
    expected = probs.double() * counts.sum()
    statistic = float((((counts - expected) ** 2) / expected).sum())
    freedom = len(probs) - 1
    return (statistic - freedom) / math.sqrt(2 * freedom)


# Changing any of these changes what every client receives: NOISE_VERSION must go up with it.
GOLDEN_BITS = [
    (0, 0, 0, 0x568A9B0B1A2C0),
    (0, 0, 1, 0x44E5B8B147EF7),
    (1, 0, 0, 0x6EC85F1F8547B),
    (MASK, 2**31, 151_935, 0x9C11FF216D37B),
    (0x9E3779B97F4A7C15, 17, 49_151, 0x9F86D92C9419D),
]


@pytest.mark.parametrize(("request_key", "position", "token_id", "bits"), GOLDEN_BITS)
def test_golden_noise(request_key: int, position: int, token_id: int, bits: int) -> None:
    state = noise_state(request_key, position)
    assert noise_bits(state, torch.tensor([token_id])).tolist() == [bits]


def test_golden_tokens() -> None:
    logits = torch.sin(torch.arange(1000.0) * 0.37).mul(4).expand(8, -1)
    rows = [SampleRow(SamplingParams(0.9, 0, 0.95), 12345, position) for position in range(8)]
    assert sample(logits, rows) == [395, 682, 821, 225, 360, 598, 902, 327]


def test_noise_is_splitmix64_by_key_position_and_token() -> None:
    rng = random.Random(0)
    for _ in range(50):
        key, position = rng.getrandbits(64), rng.getrandbits(20)
        ids = [rng.randrange(1 << 18) for _ in range(20)]
        expected = [reference_bits(key, position, token_id) for token_id in ids]
        assert noise_bits(noise_state(key, position), torch.tensor(ids)).tolist() == expected


def test_noise_is_never_zero_or_infinite() -> None:
    for bits in (0, 1, (1 << 52) - 2, (1 << 52) - 1):
        assert 0 < exponential(bits) < math.inf
    assert exponential(0) == pytest.approx(2.0**-53)
    assert exponential((1 << 52) - 1) == pytest.approx(53 * math.log(2))


def test_every_noise_bit_is_fair() -> None:
    """Over tokens of one position, and over positions of one token."""
    over_tokens = noise_bits(noise_state(7, 3), torch.arange(100_000))
    over_positions = torch.cat(
        [noise_bits(noise_state(7, position), torch.tensor([5])) for position in range(20_000)]
    )
    for bits in (over_tokens, over_positions):
        for shift in range(52):
            share = ((bits >> shift) & 1).double().mean()
            assert abs(share - 0.5) < 5 * 0.5 / math.sqrt(len(bits))


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


@pytest.mark.parametrize("vocab_size", [3, 50, 1000])
def test_equals_the_definition(vocab_size: int) -> None:
    torch.manual_seed(0)
    rng = random.Random(1)
    for _ in range(30):
        logits = torch.randn(vocab_size) * 3
        params = SamplingParams(
            rng.choice([0.5, 1.0, 2.0]), rng.choice([0, 2, 20]), rng.choice([0.9, 1.0])
        )
        row = SampleRow(params, rng.getrandbits(64), rng.randrange(5000))
        assert sample(logits[None], [row]) == [reference_sample(logits, row)]


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
    logits[1, [48_000, 49_151]] = 1.0
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
