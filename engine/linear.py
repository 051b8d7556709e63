"""Linear layers whose rows do not depend on how many rows a step has.

A matrix product may sum in another order for another number of rows, and then the last bits of a
row depend on the batch. So rows are computed in tiles within which the kernel is known to agree.
On a CPU in bfloat16 the weights are also packed once for oneDNN, which makes a step faster.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import nn
from torch.nn import functional
from transformers.pytorch_utils import Conv1D

logger = logging.getLogger(__name__)

Product = Callable[[torch.Tensor], torch.Tensor]
"""[n, in_features] -> [n, out_features]"""


@dataclass(frozen=True, slots=True)
class Tiling:
    """Products of min_rows to max_rows rows agree in every row."""

    min_rows: int
    max_rows: int


FIXED_TILES = Tiling(8, 8)
"""Agrees by construction: every product has the same shape."""
BFLOAT16_TILES = Tiling(2, 32)
"""oneDNN: one row is another kernel on some CPUs, and beyond 32 the blocking changes."""

_PROBED_ROWS = (2, 3, 5, 8, 13, 16, 24, 31, 32)
_MAX_PROBED_OUTPUTS = 1 << 19


class TiledLinear(nn.Module):
    """A linear layer in tiles of rows."""

    def __init__(self, product: Product, in_features: int, out_features: int) -> None:
        super().__init__()
        self._product = product
        self.in_features = in_features
        self.out_features = out_features
        self.tiling = FIXED_TILES

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """[..., in_features] -> [..., out_features]"""
        rows = x.reshape(-1, self.in_features)
        tiles = [self._tile(tile) for tile in rows.split(self.tiling.max_rows)]
        output = tiles[0] if len(tiles) == 1 else torch.cat(tiles)
        return output.view(*x.shape[:-1], self.out_features)

    def _tile(self, rows: torch.Tensor) -> torch.Tensor:
        num_missing = self.tiling.min_rows - len(rows)
        if num_missing <= 0:
            return self._product(rows)
        return self._product(functional.pad(rows, (0, 0, 0, num_missing)))[: len(rows)]


def replace_linears(model: nn.Module, dtype: torch.dtype, device: torch.device) -> None:
    """Put a TiledLinear in the place of every linear layer of a model on a CPU."""
    if device.type != "cpu":
        return
    tilings: dict[tuple[int, int], Tiling] = {}
    for module in list(model.modules()):
        for name, child in module.named_children():
            if type(child) in (nn.Linear, Conv1D):
                tiled = _tiled(child, dtype)
                shape = (tiled.in_features, tiled.out_features)
                if shape not in tilings:
                    tilings[shape] = _choose_tiling(tiled, dtype)
                tiled.tiling = tilings[shape]
                setattr(module, name, tiled)


def kernel_class(dtype: torch.dtype, device: torch.device) -> str:
    """Names the arithmetic: two members with the same class give the same bits."""
    if device.type != "cpu":
        return f"{torch.cuda.get_device_name(device)}/torch-{torch.__version__}"
    packing = "onednn" if _packs(dtype) else "plain"
    capability = torch.backends.cpu.get_cpu_capability()
    return f"cpu-{capability}/{packing}/torch-{torch.__version__}"


def _tiled(layer: nn.Module, dtype: torch.dtype) -> TiledLinear:
    weight, bias = layer.weight.detach(), layer.bias  # type: ignore[operator]
    if isinstance(layer, Conv1D):  # GPT-2's linear layer, [in_features, out_features]
        weight = weight.t().contiguous()
    bias = None if bias is None else bias.detach()
    product = _packed_product(weight, bias) if _packs(dtype) else _plain_product(weight, bias)
    return TiledLinear(product, weight.shape[1], weight.shape[0])


def _plain_product(weight: torch.Tensor, bias: torch.Tensor | None) -> Product:
    return lambda rows: functional.linear(rows, weight, bias)


def _packed_product(weight: torch.Tensor, bias: torch.Tensor | None) -> Product:
    packed = torch.ops.mkldnn._reorder_linear_weight(weight, BFLOAT16_TILES.max_rows)
    linear = torch.ops.mkldnn._linear_pointwise.default
    return lambda rows: linear(rows, packed, bias, "none", [], "")


def _packs(dtype: torch.dtype) -> bool:
    """Whether weights of this dtype are packed on this machine."""
    if dtype != torch.bfloat16:
        return False
    try:
        product = _packed_product(torch.ones(16, 16, dtype=dtype), None)
        return bool((product(torch.ones(2, 16, dtype=dtype)) == 16).all())
    except (AttributeError, RuntimeError) as error:
        logger.warning("oneDNN packing is not available, linear layers run plain: %s", error)
        return False


def _choose_tiling(layer: TiledLinear, dtype: torch.dtype) -> Tiling:
    """The widest tiling within which this layer's kernel agrees here, by trying."""
    if dtype != torch.bfloat16:
        return FIXED_TILES
    num_rows = max(32, min(256, _MAX_PROBED_OUTPUTS // layer.out_features))
    generator = torch.Generator().manual_seed(0)
    rows = torch.randn(num_rows, layer.in_features, generator=generator).to(dtype)
    reference = _in_tiles(layer, rows, BFLOAT16_TILES.max_rows)
    for tile_rows in _PROBED_ROWS:
        if not torch.equal(_in_tiles(layer, rows, tile_rows), reference):
            logger.warning("%s: products of %d rows differ, using tiles of 8", layer, tile_rows)
            return FIXED_TILES
    return BFLOAT16_TILES


def _in_tiles(layer: TiledLinear, rows: torch.Tensor, tile_rows: int) -> torch.Tensor:
    layer.tiling = Tiling(min(tile_rows, BFLOAT16_TILES.min_rows), tile_rows)
    return layer(rows)  # type: ignore[no-any-return]
