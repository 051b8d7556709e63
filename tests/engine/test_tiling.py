"""Linear layers in tiles: the same numbers as the layer they replace, the same bits per row."""

from __future__ import annotations

import logging

import pytest
import torch
from torch import nn
from transformers.pytorch_utils import Conv1D

from engine import linear
from engine.linear import (
    ProductKernel,
    TiledLinear,
    product_kernel,
    replace_linears,
)
from engine.native.build import NativeUnavailableError
from engine.tiling import FIXED_TILES, Tiling, choose_tiling

CPU = torch.device("cpu")


def tiled(layer: nn.Module, dtype: torch.dtype) -> TiledLinear:
    model = nn.Sequential(layer.to(dtype))
    replace_linears(model, CPU)
    assert isinstance(model[0], TiledLinear)
    return model[0]


KERNELS = [ProductKernel.NATIVE, ProductKernel.PLAIN]
if torch.cpu._is_avx512_bf16_supported():  # where oneDNN packs bfloat16
    KERNELS.append(ProductKernel.PACKED)


@pytest.fixture(params=KERNELS)
def kernel(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> ProductKernel:
    """Each kernel of this machine in turn, whatever would be chosen."""
    monkeypatch.setattr(linear, "product_kernel", lambda dtype: request.param)
    return request.param


@pytest.fixture(autouse=True)
def no_gradients() -> object:
    with torch.inference_mode():
        yield


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("num_rows", [0, 1, 7, 8, 33, 100])
@pytest.mark.usefixtures("kernel")
def test_equals_the_layer_it_replaces(dtype: torch.dtype, bias: bool, num_rows: int) -> None:
    torch.manual_seed(0)
    layer = nn.Linear(96, 80, bias=bias).to(dtype)
    x = torch.randn(1, num_rows, 96).to(dtype)
    expected = layer(x)
    torch.testing.assert_close(tiled(layer, dtype)(x), expected, rtol=1.6e-2, atol=1e-5)


@pytest.mark.usefixtures("kernel")
def test_equals_gpt2s_transposed_layer() -> None:
    torch.manual_seed(0)
    layer, x = Conv1D(24, 16), torch.randn(1, 5, 16)
    nn.init.normal_(layer.bias)
    expected = layer(x)
    torch.testing.assert_close(tiled(layer, torch.float32)(x), expected)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("in_features", "out_features"), [(576, 1536), (1536, 576), (100, 7)])
def test_a_row_has_the_same_bits_in_any_batch(
    dtype: torch.dtype, in_features: int, out_features: int, kernel: ProductKernel
) -> None:
    if kernel is ProductKernel.PACKED and dtype == torch.float32:
        return  # It packs bfloat16 alone.
    torch.manual_seed(0)
    layer = tiled(nn.Linear(in_features, out_features), dtype)
    x = torch.randn(300, in_features).to(dtype)
    expected = layer(x)
    for num_rows in (1, 2, 3, 8, 13, 31, 32, 33, 64, 256):
        assert torch.equal(torch.cat([layer(part) for part in x.split(num_rows)]), expected)


def test_a_kernel_that_disagrees_gets_fixed_tiles() -> None:
    rows = torch.randn(256, 4)
    assert choose_tiling(lambda tile: tile * 2, rows, 3) == Tiling(3, 32)
    assert choose_tiling(lambda tile: tile + (len(tile) < 4), rows, 4) == Tiling(4, 32)
    for odd in (4, 5, 8, 16, 31, 32):
        assert (
            choose_tiling(lambda tile, odd=odd: tile + (len(tile) == odd), rows, 4) is FIXED_TILES
        )


def test_a_torch_without_the_private_operators_packs_nothing(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def unavailable(*_: object) -> None:
        raise RuntimeError("no such operator")

    monkeypatch.setattr(linear, "_packed_product", unavailable)
    monkeypatch.setattr(linear, "has_matrix_units", lambda: True)
    product_kernel.cache_clear()
    assert product_kernel(torch.bfloat16) is ProductKernel.NATIVE
    product_kernel.cache_clear()
    assert "oneDNN packing is not available" in caplog.text


def test_without_our_kernels_layers_run_plain_and_say_so(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def unavailable() -> None:
        raise NativeUnavailableError("no compiler")

    monkeypatch.setattr(linear, "check_kernels", unavailable)
    product_kernel.cache_clear()
    assert product_kernel(torch.float32) is ProductKernel.PLAIN
    product_kernel.cache_clear()
    assert "no compiler" in caplog.text


def test_packing_drops_the_weight_and_keeps_a_tied_embedding() -> None:
    model = nn.ModuleDict({"embed": nn.Embedding(40, 16), "head": nn.Linear(16, 40, bias=False)})
    model["head"].weight = model["embed"].weight
    replace_linears(model, CPU)
    assert [name for name, _ in model.named_parameters()] == ["embed.weight"]


def test_a_product_that_is_not_tiled_is_named(caplog: pytest.LogCaptureFixture) -> None:
    model = nn.Module()
    model.experts = nn.Parameter(torch.zeros(2, 4, 4))
    with caplog.at_level(logging.WARNING):
        replace_linears(model, CPU)
    assert "experts" in caplog.text
