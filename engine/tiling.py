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
ONEDNN_TILES = Tiling(4, 32)
"""For bfloat16. One row is another kernel on some CPUs, two are slower than four on some, and
beyond 32 the blocking changes."""

PROBED_ROWS = (4, 5, 7, 8, 13, 16, 24, 31, 32)
"""Tile sizes compared when a kernel is tried."""


def choose_tiling(compute: Callable[[torch.Tensor], torch.Tensor], rows: torch.Tensor) -> Tiling:
    """ONEDNN_TILES if this machine's kernel agrees within them, else FIXED_TILES.

    compute  # [n, ...] -> [n, ...], the kernel on one tile of n rows
    rows     # [num_rows, ...] random; all tile sizes are compared on them
    """

    def in_tiles(num_rows: int) -> torch.Tensor:
        tiles = torch.split(rows[: len(rows) // num_rows * num_rows], num_rows)
        return torch.cat([compute(tile) for tile in tiles])

    reference = in_tiles(ONEDNN_TILES.max_rows)
    for num_rows in PROBED_ROWS:
        output = in_tiles(num_rows)
        num_common = min(len(output), len(reference))
        if not torch.equal(output[:num_common], reference[:num_common]):
            return FIXED_TILES
    return ONEDNN_TILES
