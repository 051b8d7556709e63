"""How many rows a kernel may take at once so that a row's bits do not depend on that number.

A matrix product may sum in another order for another number of rows; then the last bits of a row
depend on the batch, and with them, now and then, a token. Every product that rows of different
sequences, or drafts, may share is therefore computed in tiles of rows: within a tiling's bounds the
kernel agrees, and smaller tiles are filled up.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch


@dataclass(frozen=True, slots=True)
class Tiling:
    """Tiles of min_rows to max_rows rows agree in every row."""

    min_rows: int
    max_rows: int


FIXED_TILES = Tiling(8, 8)
"""Agrees by construction: every product has the same shape."""
ANY_TILES = Tiling(1, 1 << 30)
"""Of a kernel in which rows never meet."""
MAX_TILE_ROWS = 32
"""Of a variable tiling: beyond it oneDNN's blocking changes."""

_PROBED_ROWS = (1, 2, 3, 4, 5, 7, 8, 13, 16, 24, 31)


def choose_tiling(
    compute: Callable[[torch.Tensor], torch.Tensor], rows: torch.Tensor, min_rows: int
) -> Tiling:
    """Tiles of min_rows to 32 rows if this machine's kernel agrees within them, else FIXED_TILES.

    compute  # [n, ...] -> [n, ...], the kernel on one tile of n rows
    rows     # [num_rows, ...] random; tiles of many sizes are compared on them
    """

    def in_tiles(num_rows: int) -> torch.Tensor:
        tiles = torch.split(rows[: len(rows) // num_rows * num_rows], num_rows)
        return torch.cat([compute(tile) for tile in tiles])

    reference = in_tiles(MAX_TILE_ROWS)
    for num_rows in (n for n in _PROBED_ROWS if n >= min_rows):
        output = in_tiles(num_rows)
        num_common = min(len(output), len(reference))
        if not torch.equal(output[:num_common], reference[:num_common]):
            return FIXED_TILES
    return Tiling(min_rows, MAX_TILE_ROWS)
