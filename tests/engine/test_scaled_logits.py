"""What is computed here and there equals what would be computed for all."""

from __future__ import annotations

import pytest
import torch

from engine.scaled_logits import ScaledLogits

SIZES = [1, 40, 64, 65, 1_000, 49_152]
TEMPERATURES = [1.0, 0.7, 1e-30, 1e30, 0.0]


def rows_of(vocab_size: int) -> torch.Tensor:
    """With ties, and with impossible tokens in some rows."""
    torch.manual_seed(vocab_size)
    logits = (torch.randn(len(TEMPERATURES), vocab_size) * 3).mul(4).round().div(4)
    logits[1, 1 : vocab_size // 2] = -torch.inf
    logits[2, 1:] = -torch.inf
    return logits


def scaled(logits: torch.Tensor) -> torch.Tensor:
    divisors = torch.tensor(TEMPERATURES)[:, None].clamp(min=torch.finfo(torch.float32).tiny)
    return (logits - logits.amax(-1, keepdim=True)) / divisors


@pytest.mark.parametrize("vocab_size", SIZES)
def test_every_view_is_of_the_same_scaled_logits(vocab_size: int) -> None:
    logits = rows_of(vocab_size)
    expected, views = scaled(logits), ScaledLogits(logits, TEMPERATURES)
    some = torch.tensor([3, 0, 1])
    for row in range(len(logits)):
        assert views.row(row).equal(expected[row])
    for num_ranked in {1, vocab_size // 2 + 1, vocab_size, vocab_size + 1}:
        highest = expected[some].sort(-1, descending=True).values[:, :num_ranked]
        assert views.descending(some, num_ranked).equal(highest)
    rows, token_ids = torch.tensor([4, 0, 2, 0]), torch.tensor([0, 0, vocab_size - 1, 0])
    assert views.tokens(rows, token_ids).equal(expected[rows, token_ids])


@pytest.mark.parametrize("num_tokens", [1, 33, 257])
@pytest.mark.parametrize("vocab_size", SIZES)
def test_the_top_is_the_highest_logits_and_their_tokens(vocab_size: int, num_tokens: int) -> None:
    logits = rows_of(vocab_size)
    rows = torch.tensor([3, 0, 1, 2])
    top, token_ids = ScaledLogits(logits, TEMPERATURES).top(rows, num_tokens)
    num_known = min(num_tokens, vocab_size)
    expected = scaled(logits)[rows]
    assert top[:, :num_known].equal(expected.topk(num_known).values)
    assert (top[:, num_known:] == -torch.inf).all()
    for row, values, ids in zip(expected, top, token_ids, strict=True):
        assert len(ids.unique()) == len(ids)
        within = ids < vocab_size
        assert row[ids[within]].equal(values[within])
        assert (values[~within] == -torch.inf).all()


@pytest.mark.parametrize("vocab_size", SIZES)
def test_argmax_is_the_first_of_the_highest(vocab_size: int) -> None:
    logits = rows_of(vocab_size)
    expected = [row.tolist().index(row.max()) for row in logits]
    assert ScaledLogits(logits, TEMPERATURES).argmax().tolist() == expected


def test_not_a_number_anywhere_shows_in_the_largest() -> None:
    logits = torch.zeros(3, 1_000)
    logits[0, 999] = logits[2, 63] = torch.nan
    assert ScaledLogits(logits, [1.0] * 3).largest.isnan().tolist() == [True, False, True]
