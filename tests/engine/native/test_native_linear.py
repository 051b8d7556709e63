"""Linear layers in the native kernels."""

from __future__ import annotations

import pytest
import torch

from engine.native.native_linear import NativeLinear


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
    for n in (1, 2, 3, 5, 6, 7, 13, 48, 49):
        tiles = torch.cat([linear(tile) for tile in torch.split(rows, n)])
        assert torch.equal(tiles, got)
