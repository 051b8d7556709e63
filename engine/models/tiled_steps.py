"""Steps on a CPU: rows in tiles within which the kernels agree (engine/tiling.py)."""

from __future__ import annotations

from functools import partial

import torch

from engine.attention import KVPool, LayerShape, choose_attention_tiling, plan_step
from engine.linear import Tilings, tiled_linear
from engine.models.layers import DecoderLayers
from engine.models.rows import PackedRows
from engine.models.spec import DecoderSpec, DecoderWeights
from engine.models.steps import MakeSteps


def tiled_steps(spec: DecoderSpec, weights: DecoderWeights) -> MakeSteps:
    """Weights that are packed for the CPU are held twice until `weights` goes."""
    tilings: Tilings = {}
    layers = DecoderLayers(spec, weights, partial(tiled_linear, tilings=tilings))
    min_rows = max(tiling.min_rows for tiling in tilings.values())
    return partial(TiledSteps, layers, min_rows)


class TiledSteps:
    """Steps whose rows have the same bits whatever the batch."""

    def __init__(
        self, layers: DecoderLayers, min_rows: int, num_blocks: int, block_size: int
    ) -> None:
        """`min_rows`: a step of fewer is filled up once rather than in every product."""
        self._layers = layers
        self._min_rows = min_rows
        shapes = layer_shapes(layers.spec)
        self._pool = KVPool(shapes, num_blocks, block_size, layers.dtype, layers.device)
        self._tiling = choose_attention_tiling(shapes, layers.dtype, layers.device)

    def run(self, rows: PackedRows) -> torch.Tensor:
        num_fillers = max(0, self._min_rows - len(rows.token_ids))
        device = self._layers.device
        hidden = self._layers.hidden(
            torch.tensor(rows.token_ids + rows.token_ids[-1:] * num_fillers),
            torch.tensor(rows.positions + rows.positions[-1:] * num_fillers),
            plan_step(self._pool, rows.spans, num_fillers, self._tiling, device),
        )
        wanted = torch.tensor(rows.wanted, dtype=torch.long)
        return self._layers.logits(hidden.index_select(0, wanted))

    def copy_block(self, source: int, target: int) -> None:
        self._pool.copy_block(source, target)


def layer_shapes(spec: DecoderSpec) -> list[LayerShape]:
    """Of every layer's attention."""
    shape = LayerShape(spec.num_heads, spec.num_kv_heads, spec.head_dim, spec.head_dim)
    return [shape] * len(spec.layers)
