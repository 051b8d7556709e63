"""The target distribution against a plain reference."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from cluster.types import SamplingParams
from engine.processors import target_logits, token_probs
from engine.sampling import SampleRow, sample
from engine.scaled_logits import ScaledLogits


def reference_ids(logits: list[float], params: SamplingParams) -> list[int]:
    """Kept ids by sorting everything on (logit descending, id ascending), in float64."""
    ranked = sorted(range(len(logits)), key=lambda token_id: (-logits[token_id], token_id))
    if params.top_k:
        ranked = ranked[: params.top_k]
    weights = [math.exp((logits[i] - logits[ranked[0]]) / params.temperature) for i in ranked]
    kept, mass = [], 0.0
    for token_id, weight in zip(ranked, weights, strict=True):
        kept.append(token_id)
        mass += weight / sum(weights)
        if mass >= params.top_p:
            break
    return sorted(kept)


# Few distinct values: most examples have ties at the cut.
tied_logits = st.lists(st.integers(-4, 4).map(lambda x: x / 2), min_size=1, max_size=24)


@settings(max_examples=300, deadline=None)
@given(
    tied_logits,
    st.sampled_from([0.3, 1.0, 1.7]),
    st.integers(0, 26),
    st.sampled_from([0.013, 0.31, 0.777, 0.97, 1.0]),
)
def test_keeps_what_a_full_sort_keeps(
    values: list[float], temperature: float, top_k: int, top_p: float
) -> None:
    params = SamplingParams(temperature, top_k, top_p)
    target = target_logits(torch.tensor(values), params)
    assert target.token_ids.tolist() == reference_ids(values, params)


def test_probabilities_are_the_softmax_at_that_temperature() -> None:
    logits = torch.tensor([1.0, 3.0, 2.0, -1.0])
    target = target_logits(logits, SamplingParams(temperature=0.7))
    expected = torch.softmax(logits.double() / 0.7, dim=-1)
    torch.testing.assert_close(
        torch.softmax(target.logits.double(), -1), expected, rtol=1e-6, atol=0
    )


@pytest.mark.parametrize("num_flat", [10, 300, 3_000, 40_000])
def test_top_p_reaches_beyond_the_first_guess(num_flat: int) -> None:
    """A flat top of any width: exactly the share of it that top_p asks for, lowest ids first."""
    logits = torch.full((49_152,), -40.0)
    logits[1_000 : 1_000 + num_flat] = 0.0
    target = target_logits(logits, SamplingParams(top_p=0.49999))
    assert target.token_ids.tolist() == list(range(1_000, 1_000 + num_flat // 2))


@pytest.mark.parametrize("temperature", [0.0, 1.0, 0.7, 1e-30])
def test_every_kept_token_has_its_scaled_logit(temperature: float) -> None:
    logits = torch.randn(1_000, generator=torch.Generator().manual_seed(0)) * 5
    scaled = ScaledLogits(logits[None], [temperature or 1.0]).row(0)
    for top_k, top_p in ((0, 1.0), (20, 1.0), (500, 1.0), (0, 0.9), (50, 0.9)):
        target = target_logits(logits, SamplingParams(temperature, top_k, top_p))
        assert target.logits.equal(scaled[target.token_ids])


@pytest.mark.parametrize("num_equal", [2, 4, 12, 96, 8_192])
def test_top_p_that_is_reached_exactly_keeps_no_more(num_equal: int) -> None:
    logits = torch.full((10_000,), -200.0)
    logits[:num_equal] = 3.0
    for top_k in (0, num_equal):
        target = target_logits(logits, SamplingParams(top_k=top_k, top_p=0.5))
        assert target.token_ids.tolist() == list(range(num_equal // 2))


def test_top_p_applies_to_what_top_k_left() -> None:
    logits = torch.log(torch.tensor([0.4, 0.3, 0.2, 0.1]))
    target = target_logits(logits, SamplingParams(top_k=2, top_p=0.55))
    assert target.token_ids.tolist() == [0]  # 0.4 / 0.7 = 0.57


def test_extreme_temperatures_and_impossible_tokens_stay_finite() -> None:
    logits = torch.tensor([5.0, 4.0, -torch.inf])
    for temperature in (1e-300, 1e-30, 1e30, 1e300):
        target = target_logits(logits, SamplingParams(temperature))
        assert not target.logits.isnan().any()
        assert torch.softmax(target.logits, -1)[2] == 0


@pytest.mark.parametrize("min_p", [0.01, 0.3, 1.0])
@pytest.mark.parametrize(("top_k", "top_p"), [(0, 1.0), (3, 1.0), (0, 0.6)])
def test_min_p_keeps_what_is_likely_beside_the_most_likely(
    min_p: float, top_k: int, top_p: float
) -> None:
    """After the other two, whose renormalising does not change shares."""
    torch.manual_seed(0)
    for _ in range(20):
        logits = 3 * torch.randn(100)
        without = target_logits(logits, SamplingParams(0.8, top_k, top_p))
        target = target_logits(logits, SamplingParams(0.8, top_k, top_p, min_p))
        probs = torch.softmax(without.logits, -1)
        kept = probs >= min_p * probs.max() * (1 - 1e-6)
        assert target.token_ids.tolist() == without.token_ids[kept].tolist()
        assert torch.equal(target.logits, without.logits[kept])


def test_token_probs_are_those_of_the_distribution_of_each_row() -> None:
    torch.manual_seed(0)
    params = [
        SamplingParams(0.0),
        SamplingParams(1.0),
        SamplingParams(0.7, top_k=3),
        SamplingParams(1.3, top_p=0.8),
        SamplingParams(0.6, 40, 0.9, 0.05),
    ]
    for rows in (params, params[:2], params[3:]):
        logits = 3 * torch.randn(len(rows), 300)
        logits[:, 200:] = -torch.inf
        for token_id in (*logits.argmax(-1).tolist(), 7, 250):
            probs = token_probs(logits.clone(), rows, [token_id] * len(rows))
            for row, p, prob in zip(logits, rows, probs, strict=True):
                target = target_logits(row, p)
                kept = torch.softmax(target.logits, -1)[target.token_ids == token_id]
                assert prob == pytest.approx(float(kept.sum()), rel=1e-4)


def test_min_p_of_one_row_is_not_that_of_another() -> None:
    logits = torch.tensor([[0.0, -1.0, -2.0]] * 3)
    params = [SamplingParams(min_p=0.5), SamplingParams(), SamplingParams(min_p=0.2)]
    draws = {row: set() for row in range(3)}
    for position in range(400):
        rows = [SampleRow(p, 1, position) for p in params]
        for row, token_id in enumerate(sample(logits, rows)):
            draws[row].add(token_id)
    assert draws == {0: {0}, 1: {0, 1, 2}, 2: {0, 1}}
