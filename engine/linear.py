"""Linear layers whose rows do not depend on how many rows a step has.

Rows are computed in tiles within which the kernel agrees (engine/tiling.py); of our own kernels
that is any number of rows.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from enum import StrEnum
from functools import lru_cache
from typing import Any

import torch
from torch import nn
from torch.nn import functional
from transformers.pytorch_utils import Conv1D

from engine.native.build import NativeUnavailableError, native_library
from engine.native.native_linear import DTYPES, NativeLinear, check_kernels
from engine.tiling import ANY_TILES, FIXED_TILES, MAX_TILE_ROWS, Tiling, choose_tiling

logger = logging.getLogger(__name__)

Product = Callable[[torch.Tensor], torch.Tensor]
"""[..., in_features] -> [..., out_features]"""
Tilings = dict[tuple[int, int], Tiling]
"""By (in_features, out_features)."""

_MIN_ROWS = 4
"""One row is another kernel on some CPUs, and two cost more than four on some."""
_MAX_PROBED_OUTPUTS = 1 << 19


class TiledLinear(nn.Module):
    """A linear layer in tiles of rows."""

    def __init__(self, product: Product, in_features: int, out_features: int) -> None:
        super().__init__()
        self.product = product
        self.in_features = in_features
        self.out_features = out_features
        self.tiling = FIXED_TILES

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """[..., in_features] -> [..., out_features]"""
        num_rows = x.numel() // self.in_features
        if self.tiling.min_rows <= num_rows <= self.tiling.max_rows:
            return self.product(x)
        rows = x.reshape(num_rows, self.in_features)
        tiles = [self._tile(tile) for tile in torch.split(rows, self.tiling.max_rows)]
        return torch.cat(tiles).view(*x.shape[:-1], self.out_features)

    def _tile(self, rows: torch.Tensor) -> torch.Tensor:
        """The product of at most max_rows rows; fewer than min_rows are repeated to fill it."""
        num_rows = len(rows)
        if 0 < num_rows < self.tiling.min_rows:
            num_copies = -(-self.tiling.min_rows // num_rows)
            rows = torch.cat([rows] * num_copies)[: self.tiling.min_rows]
        return self.product(rows)[:num_rows]


def replace_linears(model: nn.Module, device: torch.device) -> int:
    """Put a TiledLinear in the place of every linear layer of a model on a CPU.

    The layer's own weight goes when it is packed; one that is tied to the embedding stays there.
    Returns the number of rows below which layers fill their tiles up: a step that is filled up
    once, before its first layer, costs less.
    """
    if device.type != "cpu":
        return 1
    tilings: Tilings = {}
    for module in list(model.modules()):
        for name, child in module.named_children():
            if type(child) in (nn.Linear, Conv1D):
                setattr(module, name, tiled_linear(*_weight_and_bias(child), tilings))
    _warn_of_other_products(model)
    return max((tiling.min_rows for tiling in tilings.values()), default=1)


def tiled_linear(weight: torch.Tensor, bias: torch.Tensor | None, tilings: Tilings) -> TiledLinear:
    """A linear layer of these weights, on a CPU.

    weight  # [out_features, in_features]
    bias    # [out_features]

    `tilings` keeps what was found for each shape, so that a model tries each one once.
    """
    kernel = product_kernel(weight.dtype)
    tiled = TiledLinear(_PRODUCTS[kernel](weight, bias), weight.shape[1], weight.shape[0])
    shape = (tiled.in_features, tiled.out_features)
    if shape not in tilings:
        native = kernel is ProductKernel.NATIVE
        tilings[shape] = ANY_TILES if native else _choose_tiling(tiled, weight.dtype)
    tiled.tiling = tilings[shape]
    return tiled


class ProductKernel(StrEnum):
    """What multiplies on a CPU."""

    PACKED = "packed"
    """oneDNN in bfloat16, weights packed once, where the CPU has matrix units for it."""
    NATIVE = "native"
    """Our kernels; a row's bits never depend on the others."""
    PLAIN = "plain"
    """Whatever torch does."""


@lru_cache
def product_kernel(dtype: torch.dtype) -> ProductKernel:
    """The fastest that can be had here for weights of this dtype."""
    if dtype == torch.bfloat16 and has_matrix_units() and _packs():
        return ProductKernel.PACKED
    try:
        check_kernels()
    except NativeUnavailableError as error:
        logger.warning("linear layers run in torch's own products: %s", error)
        return ProductKernel.PLAIN
    return ProductKernel.NATIVE if dtype in DTYPES else ProductKernel.PLAIN


def has_matrix_units() -> bool:
    """Whether this CPU multiplies whole tiles of bfloat16 (AMX), which our kernels do not use."""
    return torch.cpu._is_amx_tile_supported()


def kernel_class(dtype: torch.dtype, device: torch.device) -> str:
    """Names the arithmetic: members of one class give the same bits."""
    if device.type != "cpu":
        return f"{torch.cuda.get_device_name(device)}/torch-{torch.__version__}"
    kernel = product_kernel(dtype)
    parts = (
        f"cpu-{torch.backends.cpu.get_cpu_capability()}",
        f"bf16-{torch.cpu._is_avx512_bf16_supported()}",
        f"amx-{torch.cpu._is_amx_tile_supported()}",
        f"native-{native_library()[1]}" if kernel is ProductKernel.NATIVE else kernel,
        f"threads-{torch.get_num_threads()}",
        f"torch-{torch.__version__}",
    )
    return "/".join(parts)


def _warn_of_other_products(model: nn.Module) -> None:
    """A matrix of no linear layer and no embedding is multiplied in the model's own way."""
    embeddings = {id(m.weight) for m in model.modules() if isinstance(m, nn.Embedding)}
    others = [
        name for name, p in model.named_parameters() if p.ndim > 1 and id(p) not in embeddings
    ]
    if others:
        logger.warning(
            "products with %s are not computed in tiles of rows (experts of a mixture?): outputs "
            "may depend on the batch, up to floating-point near-ties",
            ", ".join(others[:3]) + (", ..." if len(others) > 3 else ""),
        )


def _weight_and_bias(layer: Any) -> tuple[torch.Tensor, torch.Tensor | None]:
    weight, bias = layer.weight.detach(), layer.bias
    if isinstance(layer, Conv1D):  # GPT-2's linear layer, [in_features, out_features]
        weight = weight.t().contiguous()
    return weight, None if bias is None else bias.detach()


def _plain_product(weight: torch.Tensor, bias: torch.Tensor | None) -> Product:
    return lambda rows: functional.linear(rows, weight, bias)


def _packed_product(weight: torch.Tensor, bias: torch.Tensor | None) -> Product:
    packed = torch.ops.mkldnn._reorder_linear_weight(weight, MAX_TILE_ROWS)
    linear = torch.ops.mkldnn._linear_pointwise.default
    return lambda rows: linear(rows, packed, bias, "none", [], "")


_PRODUCTS: dict[ProductKernel, Callable[[torch.Tensor, torch.Tensor | None], Product]] = {
    ProductKernel.PACKED: _packed_product,
    ProductKernel.NATIVE: NativeLinear,
    ProductKernel.PLAIN: _plain_product,
}


def _packs() -> bool:
    """Whether torch still has the private operators that pack."""
    try:
        product = _packed_product(torch.ones(16, 16, dtype=torch.bfloat16), None)
        return bool((product(torch.ones(2, 16, dtype=torch.bfloat16)) == 16).all())
    except (AttributeError, RuntimeError) as error:
        logger.warning("oneDNN packing is not available: %s", error)
        return False


def _choose_tiling(layer: TiledLinear, dtype: torch.dtype) -> Tiling:
    """The tiling within which this layer's kernel agrees on this machine.

    Few of bfloat16's roundings show a difference (about 1 in 6,000 outputs where there is one), so
    at least 48,000 outputs are compared for any layer of a real model.
    """
    if dtype == torch.float32:
        return FIXED_TILES
    num_rows = max(32, min(256, _MAX_PROBED_OUTPUTS // layer.out_features))
    generator = torch.Generator().manual_seed(0)
    rows = torch.randn(num_rows, layer.in_features, generator=generator).to(dtype)
    tiling = choose_tiling(layer.product, rows, _MIN_ROWS)
    if tiling is FIXED_TILES:
        logger.warning("rows differ with the size of a product here; tiles of 8 rows are slower")
    return tiling
