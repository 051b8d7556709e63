"""Attention of packed rows over a BlockPool, whatever kernel computes it.

A kernel attends in two ways: to rows, each with a table and a context of its own, and to a span,
the consecutive rows of one sequence. Short spans (decode tokens, drafts) go as rows: their shapes
depend on the number of rows and the width of the tables alone, so a CUDA graph can hold them. The
gathering kernel here is plain torch and runs anywhere; engine/models/flash_attention.py has others.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch.nn import functional

from engine.models.block_pool import BlockPool

Attend = Callable[[torch.Tensor, torch.Tensor, torch.Tensor, float, "int | None"], torch.Tensor]
"""One layer of a step: (query, keys, values, scaling, sliding window) -> output.

query, output  # [n, num_heads, head_dim]
keys, values   # [num_blocks, block_size, num_kv_heads, head_dim]
"""


class PagedKernel(Protocol):
    """A way to compute attention over blocks."""

    @property
    def name(self) -> str: ...

    def rows(self, tables: torch.Tensor, context_lens: torch.Tensor) -> Attend:
        """For rows of any sequences.

        tables        # [n, width] int32, blocks of each row's sequence; beyond its end any block
        context_lens  # [n] int32, tokens that each row sees, its own included
        """
        ...

    def span(self, table: torch.Tensor, start: int, num_rows: int) -> Attend:
        """For the rows of one sequence at start, start + 1, ...

        table  # [width] int32
        """
        ...


@dataclass(frozen=True, slots=True)
class StepPart:
    """Rows of a step that are attended together."""

    rows: slice | torch.Tensor
    attend: Attend


class BlockStep:
    """One forward over a BlockPool; an AttentionStep of engine/attention.py."""

    def __init__(self, pool: BlockPool, slots: torch.Tensor, parts: Sequence[StepPart]) -> None:
        """
        slots  # [n] where each row's keys and values go
        parts  # cover every row once
        """
        self._pool = pool
        self._slots = slots
        self._parts = parts

    def attend(
        self,
        layer: int,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        scaling: float,
        sliding_window: int | None,
    ) -> torch.Tensor:
        self._pool.write(layer, self._slots, key.transpose(0, 1), value.transpose(0, 1))
        keys, values = self._pool.layer(layer)
        rows = query.transpose(0, 1)
        if len(self._parts) == 1:
            return self._parts[0].attend(rows, keys, values, scaling, sliding_window)
        output = torch.empty_like(rows)
        for part in self._parts:
            output[part.rows] = part.attend(rows[part.rows], keys, values, scaling, sliding_window)
        return output


class GatherKernel:
    """Copies each context out of its blocks, then torch's own attention under a mask.

    Reads a context once more than a paged kernel does and writes it once, per row.
    """

    @property
    def name(self) -> str:
        return "gather"

    def rows(self, tables: torch.Tensor, context_lens: torch.Tensor) -> Attend:
        return _Gathered(tables, context_lens[:, None] - 1)

    def span(self, table: torch.Tensor, start: int, num_rows: int) -> Attend:
        positions = torch.arange(start, start + num_rows, device=table.device)
        return _Gathered(table[None], positions[None])


class _Gathered:
    """Attention of tiles of rows, each tile over one context."""

    def __init__(self, tables: torch.Tensor, positions: torch.Tensor) -> None:
        """
        tables     # [num_tiles, width]
        positions  # [num_tiles, tile_rows]
        """
        self._tables = tables
        self._positions = positions
        self._masks: dict[int | None, torch.Tensor] = {}

    def __call__(
        self,
        query: torch.Tensor,
        keys: torch.Tensor,
        values: torch.Tensor,
        scaling: float,
        window: int | None,
    ) -> torch.Tensor:
        num_heads, head_dim = query.shape[1:]
        num_tiles, tile_rows = self._positions.shape
        num_kv_heads = keys.shape[2]
        shape = (num_tiles, tile_rows, num_kv_heads, num_heads // num_kv_heads, head_dim)
        # Heads that share keys are rows of one product, so nothing is repeated for them.
        by_kv_head = query.reshape(shape).transpose(1, 2).flatten(2, 3)
        contexts, mask = self._contexts(keys), self._mask(window, keys.shape[1], shape[3])
        output = functional.scaled_dot_product_attention(
            by_kv_head, contexts, self._contexts(values), attn_mask=mask, scale=scaling
        )
        output = output.view(num_tiles, num_kv_heads, tile_rows, shape[3], head_dim)
        return output.transpose(1, 2).reshape(query.shape)

    def _contexts(self, pool: torch.Tensor) -> torch.Tensor:
        """[num_tiles, num_kv_heads, context_len, head_dim]"""
        blocks = pool.index_select(0, self._tables.flatten())
        return blocks.view(len(self._tables), -1, *pool.shape[2:]).transpose(1, 2)

    def _mask(self, window: int | None, block_size: int, num_copies: int) -> torch.Tensor:
        """[num_tiles, 1, tile_rows * num_copies, context_len]: True where a row may look."""
        if window not in self._masks:
            places = torch.arange(self._tables.shape[1] * block_size, device=self._tables.device)
            distance = self._positions.repeat_interleave(num_copies, dim=1)[..., None] - places
            seen = distance >= 0 if window is None else (distance >= 0) & (distance < window)
            self._masks[window] = seen.unsqueeze(1)
        return self._masks[window]
