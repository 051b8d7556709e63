"""Attention over the paged KV pool, for any transformers model that takes an attention function.

All tokens of a step arrive packed as one row. A query row is computed in a tile of rows of its own
sequence, over a context padded to a length that depends on the row's position alone. With tiles
within whose bounds the kernel agrees (engine/tiling.py), a row's bits depend on its sequence up to
itself and on nothing else: not on the batch, on the borders of prefill chunks, or on drafts.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from transformers import AttentionInterface

from engine.tiling import FIXED_TILES, Tiling, choose_tiling

ATTENTION_NAME = "paceline"

_SHORTEST_CONTEXT = 64


class AttentionStep(Protocol):
    """What a forward does with the queries, keys and values of its tokens in each layer."""

    def attend(
        self,
        layer: int,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        scaling: float,
        sliding_window: int | None,
    ) -> torch.Tensor:
        """Keep key and value, and attend.

        query    # [num_heads, n, head_dim]
        key      # [num_kv_heads, n, head_dim]
        value    # [num_kv_heads, n, value_dim]
        returns  # [n, num_heads, value_dim]
        """
        ...


def paceline_attention(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    *,
    attention_step: AttentionStep,
    scaling: float | None = None,
    sliding_window: int | None = None,
    **_: Any,
) -> tuple[torch.Tensor, None]:
    """The function that transformers calls in every layer. All tensors are [1, heads, n, dim]."""
    output = attention_step.attend(
        int(module.layer_idx),  # type: ignore[arg-type]
        query[0],
        key[0],
        value[0],
        query.shape[-1] ** -0.5 if scaling is None else scaling,
        sliding_window,
    )
    return output.unsqueeze(0), None


# Not registered with AttentionMaskInterface: then transformers builds no mask at all.
AttentionInterface.register(ATTENTION_NAME, paceline_attention)


# --- the shapes of a model's layers -----------------------------------------------------------


@dataclass(frozen=True, slots=True)
class LayerShape:
    """Attention of one layer."""

    num_heads: int
    num_kv_heads: int
    head_dim: int
    value_dim: int

    @property
    def num_elements(self) -> int:
        """Of one token's keys and values."""
        return self.num_kv_heads * (self.head_dim + self.value_dim)


@dataclass(slots=True)
class ShapeProbe:
    """A step that keeps nothing and learns the shapes of a model's layers from one token."""

    shapes: dict[int, LayerShape] = field(default_factory=dict)

    def attend(
        self,
        layer: int,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        scaling: float,
        sliding_window: int | None,
    ) -> torch.Tensor:
        num_heads, num_kv_heads = len(query), len(key)
        self.shapes[layer] = LayerShape(num_heads, num_kv_heads, key.shape[2], value.shape[2])
        return value.repeat_interleave(num_heads // num_kv_heads, dim=0).transpose(0, 1)


# --- the pool ---------------------------------------------------------------------------------


class KVPool:
    """Keys and values of all slots, per layer, each [num_kv_heads, num_slots, dim].

    Never holds anything that is not finite, so that a masked slot adds exactly nothing.
    """

    def __init__(
        self,
        shapes: Sequence[LayerShape],
        num_blocks: int,
        block_size: int,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        self.block_size = block_size
        self.unit_len = math.gcd(block_size, _SHORTEST_CONTEXT)
        """Slots that are gathered together: divides the block and every padded context."""
        num_slots = num_blocks * block_size
        self._keys = [
            torch.zeros(shape.num_kv_heads, num_slots, shape.head_dim, dtype=dtype, device=device)
            for shape in shapes
        ]
        self._values = [
            torch.zeros(shape.num_kv_heads, num_slots, shape.value_dim, dtype=dtype, device=device)
            for shape in shapes
        ]

    def write(
        self, layer: int, slots: torch.Tensor, key: torch.Tensor, value: torch.Tensor
    ) -> None:
        """Put [num_kv_heads, n, dim] into n slots."""
        self._keys[layer].index_copy_(1, slots, torch.nan_to_num(key, 0.0, 0.0, 0.0))
        self._values[layer].index_copy_(1, slots, torch.nan_to_num(value, 0.0, 0.0, 0.0))

    def copy_block(self, source: int, target: int) -> None:
        for pool in (*self._keys, *self._values):
            blocks = pool.view(len(pool), -1, self.block_size, pool.shape[2])
            blocks[:, target] = blocks[:, source]

    def gather(self, layer: int, units: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Keys and values of contexts.

        units    # [num_tiles, context_len / unit_len] indices of units
        returns  # two of [num_kv_heads * num_tiles, context_len, dim]
        """
        return self._gather(self._keys[layer], units), self._gather(self._values[layer], units)

    def _gather(self, pool: torch.Tensor, units: torch.Tensor) -> torch.Tensor:
        num_heads, _, dim = pool.shape
        by_unit = pool.view(num_heads, -1, self.unit_len * dim)
        num_tiles, num_units = units.shape
        context = by_unit.index_select(1, units.flatten())
        return context.view(num_heads * num_tiles, num_units * self.unit_len, dim)


# --- one forward ------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Span:
    """Consecutive tokens of one sequence in a packed row."""

    first_row: int
    start: int
    """Position of the first token in its sequence."""
    num_tokens: int
    block_table: Sequence[int]


@dataclass(frozen=True, slots=True)
class TileGroup:
    """Tiles of equal shape, computed by one call."""

    rows: torch.Tensor
    """[num_tiles, tile_rows] indices in the packed row."""
    positions: torch.Tensor
    """[num_tiles, tile_rows] in the rows' own sequences."""
    units: torch.Tensor
    """[num_tiles, num_units] of the context; see KVPool.gather."""


class PagedStep:
    """One forward over the paged pool."""

    def __init__(
        self,
        pool: KVPool,
        slots: torch.Tensor,
        groups: Sequence[TileGroup],
        places: torch.Tensor,
    ) -> None:
        """
        slots   # [num_tokens] where each packed token's keys and values go
        places  # [n] where each packed row is among the rows of all groups' tiles; rows beyond
                # num_tokens fill the step up, and are not kept
        """
        self._pool = pool
        self._slots = slots
        self._groups = groups
        self._places = places
        self._masks: dict[tuple[int, int | None], torch.Tensor] = {}

    def attend(
        self,
        layer: int,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        scaling: float,
        sliding_window: int | None,
    ) -> torch.Tensor:
        num_tokens = len(self._slots)
        self._pool.write(layer, self._slots, key[:, :num_tokens], value[:, :num_tokens])
        outputs = []
        for index, group in enumerate(self._groups):
            keys, values = self._pool.gather(layer, group.units)
            mask = self._mask(index, sliding_window)
            tiles = tile_attention(query[:, group.rows], keys, values, mask, scaling)
            outputs.append(tiles.flatten(0, 1))
        return torch.cat(outputs).index_select(0, self._places)

    def _mask(self, index: int, window: int | None) -> torch.Tensor:
        """[num_tiles, tile_rows, 1, context_len]: 0 where a row may look, -inf elsewhere."""
        if (index, window) not in self._masks:
            group = self._groups[index]
            context_len = group.units.shape[1] * self._pool.unit_len
            self._masks[index, window] = _build_mask(group.positions, context_len, window)
        return self._masks[index, window]


def tile_attention(
    query: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    mask: torch.Tensor,
    scaling: float,
) -> torch.Tensor:
    """Attention of tiles of rows, each over its own context. Softmax in float32.

    query    # [num_heads, num_tiles, tile_rows, head_dim]
    keys     # [num_kv_heads * num_tiles, context_len, head_dim]
    values   # [num_kv_heads * num_tiles, context_len, value_dim]
    mask     # [num_tiles, tile_rows, 1, context_len] float32
    returns  # [num_tiles, tile_rows, num_heads, value_dim]
    """
    num_heads, num_tiles, tile_rows, head_dim = query.shape
    context_len, value_dim = values.shape[1:]
    num_kv_heads = len(keys) // num_tiles
    shape = (num_kv_heads, num_tiles, tile_rows, num_heads // num_kv_heads)
    by_kv_head = query.view(num_kv_heads, -1, num_tiles, tile_rows, head_dim)
    queries = by_kv_head.permute(0, 2, 3, 1, 4).reshape(len(keys), -1, head_dim)
    scores = torch.bmm(queries, keys.transpose(1, 2)).view(*shape, context_len)
    weights = torch.softmax(torch.add(mask, scores, alpha=scaling), dim=-1).to(values.dtype)
    output = torch.bmm(weights.view(len(keys), -1, context_len), values)
    return output.view(*shape, value_dim).permute(1, 2, 0, 3, 4).flatten(2, 3)


def _build_mask(positions: torch.Tensor, context_len: int, window: int | None) -> torch.Tensor:
    places = torch.arange(context_len, device=positions.device)
    distance = positions[:, :, None, None] - places
    hidden = distance < 0 if window is None else (distance < 0) | (distance >= window)
    mask = torch.zeros(hidden.shape, dtype=torch.float32, device=positions.device)
    return mask.masked_fill_(hidden, -torch.inf)


def choose_attention_tiling(
    shapes: Sequence[LayerShape], dtype: torch.dtype, device: torch.device
) -> Tiling:
    """The tiling within which attention of all these layers agrees on this machine."""
    if dtype == torch.float32:
        return FIXED_TILES
    tilings = {_choose_layer_tiling(shape, dtype, device) for shape in set(shapes)}
    return tilings.pop() if len(tilings) == 1 else FIXED_TILES


def _choose_layer_tiling(shape: LayerShape, dtype: torch.dtype, device: torch.device) -> Tiling:
    generator = torch.Generator().manual_seed(0)

    def draw(*sizes: int) -> torch.Tensor:
        return torch.randn(*sizes, generator=generator).to(device, dtype)

    context_len = 4 * _SHORTEST_CONTEXT
    keys = draw(shape.num_kv_heads, context_len, shape.head_dim)
    values = draw(shape.num_kv_heads, context_len, shape.value_dim)

    def compute(rows: torch.Tensor) -> torch.Tensor:
        positions = torch.full((1, len(rows)), context_len, device=device)
        mask = _build_mask(positions, context_len, None)
        query = rows.transpose(0, 1).unsqueeze(1)
        return tile_attention(query, keys, values, mask, shape.head_dim**-0.5)[0]

    # A tile of one row is still a product of two or more where KV heads are shared.
    min_rows = 1 if shape.num_heads > shape.num_kv_heads else 2
    return choose_tiling(compute, draw(256, shape.num_heads, shape.head_dim), min_rows)


# --- planning a forward -----------------------------------------------------------------------


def padded_context_len(position: int) -> int:
    """Context over which the row at this position is computed: a function of its position alone.

    64, 128, then two lengths per power of two (192, 256, 384, 512, 768, ...): few different
    lengths, so that rows of many sequences share a call, and at most a third of it padding.
    """
    num_tokens = position + 1
    granule = max(_SHORTEST_CONTEXT, (1 << position.bit_length()) // 4)
    return -(-num_tokens // granule) * granule


def plan_step(
    pool: KVPool,
    spans: Sequence[Span],
    num_fillers: int,
    tiling: Tiling,
    device: torch.device,
    tiles_per_call: int | None = None,
) -> PagedStep:
    """Lay out one forward: where each token goes, and which rows are computed together.

    `num_fillers` rows at the end copy the last token and are not kept. With `tiles_per_call` every
    call computes that many tiles, copies of the last one among them, so that its shape depends on
    the padded context alone; without, it computes all tiles of one shape at once.
    """
    tiles_by_shape: dict[tuple[int, int], list[Span]] = {}
    for tile in (tile for span in spans for tile in _tiles(span, tiling)):
        shape = (padded_context_len(tile.start), _filled_rows(tile.num_tokens, tiling))
        tiles_by_shape.setdefault(shape, []).append(tile)
    calls = [
        (shape, call)
        for shape, tiles in sorted(tiles_by_shape.items())
        for call in _calls(tiles, tiles_per_call)
    ]
    groups = [_group(pool, tiles, *shape, device) for shape, tiles in calls]
    slots = [
        span.block_table[position // pool.block_size] * pool.block_size + position % pool.block_size
        for span in spans
        for position in range(span.start, span.start + span.num_tokens)
    ]
    places = _places(calls, len(slots))
    places += places[-1:] * num_fillers
    return PagedStep(
        pool,
        torch.tensor(slots, device=device),
        groups,
        torch.tensor(places, device=device),
    )


def _tiles(span: Span, tiling: Tiling) -> list[Span]:
    """Cut a span where the padded context length changes, and into tiles."""
    tiles = []
    row, position, end = span.first_row, span.start, span.start + span.num_tokens
    while position < end:
        stop = min(end, padded_context_len(position), position + tiling.max_rows)
        tiles.append(Span(row, position, stop - position, span.block_table))
        row += stop - position
        position = stop
    return tiles


def _filled_rows(num_rows: int, tiling: Tiling) -> int:
    """Rows of a tile, filled up to a power of two so that tiles of few shapes occur."""
    return min(max(1 << (num_rows - 1).bit_length(), tiling.min_rows), tiling.max_rows)


def _calls(tiles: list[Span], tiles_per_call: int | None) -> list[list[Span]]:
    """Tiles of one shape by the call that computes them."""
    if tiles_per_call is None:
        return [tiles]
    calls = [tiles[i : i + tiles_per_call] for i in range(0, len(tiles), tiles_per_call)]
    calls[-1] += calls[-1][-1:] * (tiles_per_call - len(calls[-1]))
    return calls


def _group(
    pool: KVPool,
    tiles: Sequence[Span],
    context_len: int,
    tile_rows: int,
    device: torch.device,
) -> TileGroup:
    """Tiles with fewer rows repeat their last row."""
    offsets = [[min(i, tile.num_tokens - 1) for i in range(tile_rows)] for tile in tiles]
    first_rows = torch.tensor([[tile.first_row] for tile in tiles])
    starts = torch.tensor([[tile.start] for tile in tiles])
    return TileGroup(
        rows=(first_rows + torch.tensor(offsets)).to(device),
        positions=(starts + torch.tensor(offsets)).to(device),
        units=_context_units(pool, [tile.block_table for tile in tiles], context_len).to(device),
    )


def _context_units(
    pool: KVPool, block_tables: Sequence[Sequence[int]], context_len: int
) -> torch.Tensor:
    """[num_tables, context_len / unit_len]. Beyond a table's end stands block 0: it is masked."""
    num_blocks = -(-context_len // pool.block_size)
    tables = [[*table[:num_blocks], *([0] * (num_blocks - len(table)))] for table in block_tables]
    units_per_block = pool.block_size // pool.unit_len
    first_units = torch.tensor(tables)[:, :, None] * units_per_block
    units = (first_units + torch.arange(units_per_block)).flatten(1)
    return units[:, : context_len // pool.unit_len]


def _places(calls: Sequence[tuple[tuple[int, int], list[Span]]], num_rows: int) -> list[int]:
    """Where each packed row is among the rows of all calls' tiles.

    calls  # ((context_len, tile_rows), tiles)
    """
    places = [0] * num_rows
    first_place = 0
    for (_, tile_rows), tiles in calls:
        for tile in tiles:
            rows = slice(tile.first_row, tile.first_row + tile.num_tokens)
            places[rows] = range(first_place, first_place + tile.num_tokens)
            first_place += tile_rows
    return places
