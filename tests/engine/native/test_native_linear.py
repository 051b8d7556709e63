"""Linear layers in the native kernels."""

from __future__ import annotations

import pytest
import torch

from engine.int8 import quantized
from engine.native.native_linear import NativeLinear, has_int8

needs_int8 = pytest.mark.skipif(not has_int8(), reason="this CPU has no products with int8")


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("in_features", [1, 31, 100])
@pytest.mark.parametrize("out_features", [1, 16, 33, 200])
def test_products_are_right_and_a_row_s_bits_its_own(
    dtype: torch.dtype, out_features: int, in_features: int
) -> None:
    torch.manual_seed(0)
    weight = torch.randn(out_features, in_features).to(dtype)
    bias = torch.randn(out_features).to(dtype)
    rows = torch.randn(100, in_features).to(dtype)
    linear = NativeLinear(weight, bias)
    expected = rows.double() @ weight.double().T + bias.double()
    got = linear(rows)
    assert (got.dtype, got.shape) == (dtype, expected.shape)
    tolerance = 1e-2 if dtype == torch.bfloat16 else 1e-5
    torch.testing.assert_close(got.double(), expected, rtol=tolerance, atol=tolerance)
    assert_rows_are_their_own(linear, rows)


@needs_int8
@pytest.mark.parametrize("in_features", [2, 31, 100, 1536])
@pytest.mark.parametrize("out_features", [1, 16, 33, 200])
def test_products_with_int8_are_right_and_a_row_s_bits_its_own(
    out_features: int, in_features: int
) -> None:
    """Rows of very different sizes: each is rounded by itself, to parts of its largest element."""
    torch.manual_seed(0)
    whole, scale = quantized(torch.randn(out_features, in_features))
    bias = torch.randn(out_features)
    rows = torch.randn(100, in_features) * torch.logspace(-6, 6, 100)[:, None]
    linear = NativeLinear(whole, bias, scale)
    matrix = whole.double() * scale.double()[:, None]
    expected = rows.double() @ matrix.T + bias.double()
    got = linear(rows)
    assert (got.dtype, got.shape) == (torch.float32, expected.shape)
    error = (got.double() - expected).norm(dim=1)
    assert (error <= 2e-4 * rows.norm(dim=1) * matrix.norm() + 1e-6 * bias.norm()).all()
    assert_rows_are_their_own(linear, rows)


@needs_int8
@pytest.mark.parametrize("in_features", [512, 20_000])
def test_the_largest_sums_fit(in_features: int) -> None:
    whole = torch.full((3, in_features), 127, dtype=torch.int8)
    linear = NativeLinear(whole, None, torch.ones(3))
    rows = torch.full((2, in_features), 2.0)
    rows[1] *= -1
    expected = torch.tensor([[254.0 * in_features] * 3, [-254.0 * in_features] * 3])
    torch.testing.assert_close(linear(rows), expected, rtol=1e-5, atol=0.0)


@needs_int8
def test_a_row_that_is_not_finite_shows_and_one_of_zeros_is_zero() -> None:
    whole, scale = quantized(torch.randn(5, 40))
    rows = torch.randn(4, 40)
    rows[0, 3], rows[1, 4], rows[2] = torch.inf, torch.nan, 0.0
    got = NativeLinear(whole, None, scale)(rows)
    assert not torch.isfinite(got[:2]).any()
    assert not got[2].any()
    assert torch.isfinite(got[3]).all()


def assert_rows_are_their_own(linear: NativeLinear, rows: torch.Tensor) -> None:
    expected = linear(rows)
    for n in (1, 2, 3, 5, 6, 7, 13, 48, 49):
        tiles = torch.cat([linear(tile) for tile in torch.split(rows, n)])
        assert torch.equal(tiles, expected)
