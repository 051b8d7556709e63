"""Steps on a GPU whose rows have the same bits whatever the batch.

Every forward takes exactly ROWS rows: a step is cut into so many and the last piece is filled up.
Attention is computed in tiles of 8 rows of one sequence over a context padded by position, always
TILES_PER_CALL tiles at once. So every kernel sees one shape, or one per padded context, and a row
goes the same way through it wherever it stands.

What it costs: a step reads all weights once per ROWS rows, so a prompt takes two to three times as
long; nothing is captured or fused, so that a step of few rows waits for the launches of some
hundreds of kernels; and each context is copied for its rows.
"""

from __future__ import annotations

from functools import partial

import torch

from engine.attention import KVPool, plan_step
from engine.models.layers import DecoderLayers, plain_product
from engine.models.rows import PackedRows, cut_rows
from engine.models.spec import DecoderSpec, DecoderWeights
from engine.models.steps import MakeSteps
from engine.models.tiled_steps import layer_shapes
from engine.tiling import FIXED_TILES

ROWS = 64
"""The rows of one tile of the usual product kernels: all of them go the same way. A GPU reads its
weights in the time that 64 rows take to compute, or more."""
TILES_PER_CALL = 8


def fixed_row_steps(spec: DecoderSpec, weights: DecoderWeights) -> MakeSteps:
    """Steps in pieces of ROWS rows."""
    return partial(FixedRowSteps, DecoderLayers(spec, weights, plain_product))


class FixedRowSteps:
    """Steps whose rows have the same bits whatever the batch."""

    def __init__(self, layers: DecoderLayers, num_blocks: int, block_size: int) -> None:
        self._layers = layers
        shapes = layer_shapes(layers.spec)
        self._pool = KVPool(shapes, num_blocks, block_size, layers.dtype, layers.device)

    def run(self, rows: PackedRows) -> torch.Tensor:
        pieces = [self._hidden(piece) for piece in cut_rows(rows, ROWS)]
        hidden = torch.cat(pieces)
        logits = [self._logits(part) for part in torch.split(hidden, ROWS)]
        return torch.cat(logits)

    def copy_block(self, source: int, target: int) -> None:
        self._pool.copy_block(source, target)

    def _hidden(self, rows: PackedRows) -> torch.Tensor:
        """Of the wanted rows among at most ROWS."""
        device, num_fillers = self._layers.device, ROWS - len(rows.token_ids)
        step = plan_step(self._pool, rows.spans, num_fillers, FIXED_TILES, device, TILES_PER_CALL)
        hidden = self._layers.hidden(
            torch.tensor(rows.token_ids + rows.token_ids[-1:] * num_fillers, device=device),
            torch.tensor(rows.positions + rows.positions[-1:] * num_fillers, device=device),
            step,
        )
        wanted = torch.tensor(rows.wanted, dtype=torch.long, device=device)
        return hidden.index_select(0, wanted)

    def _logits(self, hidden: torch.Tensor) -> torch.Tensor:
        filled = hidden.new_zeros(ROWS, hidden.shape[1])
        filled[: len(hidden)] = hidden
        return self._layers.logits(filled)[: len(hidden)]
