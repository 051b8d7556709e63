"""Attention over the paged KV pool, for any transformers model that takes an attention function.

All tokens of a step arrive packed as one row. Each query row is computed on its own (a batch entry
with the query heads of one KV head as its queries), over a context padded to a length that depends
on the row's position alone. So a row's result does not depend on what else is in the step: the
kernel sees the same shapes whether the row is a prompt token, a decode token or a draft.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from torch.nn import functional
from transformers import AttentionInterface

ATTENTION_NAME = "paceline"

_PADDING = 64
_MAX_ROWS_PER_CALL = 64


class AttentionStep(Protocol):
    """What a forward does with the keys and values of its tokens."""

    def attend(
        self,
        layer: int,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        scaling: float | None,
        sliding_window: int | None,
    ) -> torch.Tensor:
        """Keep key and value, and attend.

        query  # [n, num_heads, head_dim]
        key    # [n, num_kv_heads, head_dim]
        value  # [n, num_kv_heads, value_dim]
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
        query[0].transpose(0, 1),
        key[0].transpose(0, 1),
        value[0].transpose(0, 1),
        scaling,
        sliding_window,
    )
    return output.unsqueeze(0), None


# Not registered with AttentionMaskInterface: then transformers builds no mask at all.
AttentionInterface.register(ATTENTION_NAME, paceline_attention)


@dataclass(frozen=True, slots=True)
class LayerShape:
    """Keys and values of one token in one layer."""

    num_kv_heads: int
    head_dim: int
    value_dim: int

    @property
    def num_elements(self) -> int:
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
        scaling: float | None,
        sliding_window: int | None,
    ) -> torch.Tensor:
        self.shapes[layer] = LayerShape(key.shape[1], key.shape[2], value.shape[2])
        return value.repeat_interleave(query.shape[1] // value.shape[1], dim=1)


class KVPool:
    """Keys and values of all slots, per layer. Never holds anything that is not finite, so that a
    masked slot adds exactly nothing."""

    def __init__(
        self,
        shapes: Sequence[LayerShape],
        num_slots: int,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        def zeros(num_heads: int, dim: int) -> torch.Tensor:
            return torch.zeros(num_slots, num_heads, dim, dtype=dtype, device=device)

        self.keys = [zeros(shape.num_kv_heads, shape.head_dim) for shape in shapes]
        self.values = [zeros(shape.num_kv_heads, shape.value_dim) for shape in shapes]

    def write(
        self, layer: int, slots: torch.Tensor, key: torch.Tensor, value: torch.Tensor
    ) -> None:
        """Put [n, num_kv_heads, dim] into n slots."""
        self.keys[layer].index_copy_(0, slots, torch.nan_to_num(key, 0.0, 0.0, 0.0))
        self.values[layer].index_copy_(0, slots, torch.nan_to_num(value, 0.0, 0.0, 0.0))


@dataclass(frozen=True, slots=True)
class RowGroup:
    """Rows with the same padded context length, computed by one call."""

    rows: torch.Tensor
    """[num_rows] indices in the packed row."""
    positions: torch.Tensor
    """[num_rows] in the rows' own sequences."""
    slots: torch.Tensor
    """[num_rows or 1, context_len]; one row of slots is shared by all rows of the group."""


class PagedStep:
    """One forward over the paged pool."""

    def __init__(self, pool: KVPool, slots: torch.Tensor, groups: Sequence[RowGroup]) -> None:
        """
        slots   # [n] where each packed token's keys and values go
        groups  # together they hold every packed row once
        """
        self._pool = pool
        self._slots = slots
        self._groups = groups
        self._masks: dict[tuple[int | None, int], torch.Tensor] = {}

    def attend(
        self,
        layer: int,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        scaling: float | None,
        sliding_window: int | None,
    ) -> torch.Tensor:
        self._pool.write(layer, self._slots, key, value)
        output = query.new_empty(query.shape[0], query.shape[1], value.shape[2])
        for index, group in enumerate(self._groups):
            mask = self._mask(index, sliding_window, query.dtype)
            output[group.rows] = self._attend_group(
                layer, query[group.rows], group.slots, mask, scaling
            )
        return output

    def _attend_group(
        self,
        layer: int,
        query: torch.Tensor,
        slots: torch.Tensor,
        mask: torch.Tensor,
        scaling: float | None,
    ) -> torch.Tensor:
        num_rows, num_heads, head_dim = query.shape
        keys = self._gather(self._pool.keys[layer], slots, num_rows)
        values = self._gather(self._pool.values[layer], slots, num_rows)
        queries = query.view(num_rows, keys.shape[1], -1, head_dim)
        output = functional.scaled_dot_product_attention(
            queries, keys, values, attn_mask=mask, scale=scaling
        )
        return output.reshape(num_rows, num_heads, -1)

    @staticmethod
    def _gather(pool: torch.Tensor, slots: torch.Tensor, num_rows: int) -> torch.Tensor:
        """[num_rows, num_kv_heads, context_len, dim]"""
        context = pool.index_select(0, slots.flatten()).view(*slots.shape, *pool.shape[1:])
        return context.transpose(1, 2).expand(num_rows, -1, -1, -1)

    def _mask(self, index: int, window: int | None, dtype: torch.dtype) -> torch.Tensor:
        """[num_rows, 1, 1, context_len]: 0 where a row may look, -inf elsewhere."""
        if (window, index) not in self._masks:
            group = self._groups[index]
            places = torch.arange(group.slots.shape[1], device=group.slots.device)
            distance = group.positions[:, None] - places[None, :]
            hidden = distance < 0 if window is None else (distance < 0) | (distance >= window)
            mask = torch.zeros(hidden.shape, dtype=dtype, device=hidden.device)
            mask.masked_fill_(hidden, -torch.inf)
            self._masks[window, index] = mask[:, None, None, :]
        return self._masks[window, index]


def padded_context_len(position: int) -> int:
    """Context that the row at this position is computed over: a function of the position alone."""
    return -(-(position + 1) // _PADDING) * _PADDING


@dataclass(frozen=True, slots=True)
class Span:
    """Consecutive tokens of one sequence in a packed row."""

    first_row: int
    start: int
    """Position of the first token in its sequence."""
    num_tokens: int
    block_table: Sequence[int]


def plan_step(
    pool: KVPool, spans: Sequence[Span], block_size: int, device: torch.device
) -> PagedStep:
    """Lay out one forward: where each token goes, and which rows are computed together.

    Single rows of many sequences share a call per context length; longer spans get calls of their
    own, in which all rows share the gathered context.
    """
    singles: dict[int, list[Span]] = {}
    groups: list[RowGroup] = []
    for piece in (piece for span in spans for piece in _pieces(span)):
        if piece.num_tokens == 1:
            singles.setdefault(padded_context_len(piece.start), []).append(piece)
        else:
            groups.append(_shared_group(piece, block_size, device))
    groups += [_single_rows_group(singles[n], n, block_size, device) for n in sorted(singles)]
    write_slots = [
        span.block_table[position // block_size] * block_size + position % block_size
        for span in spans
        for position in range(span.start, span.start + span.num_tokens)
    ]
    return PagedStep(pool, torch.tensor(write_slots, device=device), groups)


def _pieces(span: Span) -> list[Span]:
    """Cut a span where the padded context length changes, and to a bounded number of rows."""
    pieces = []
    row, position, end = span.first_row, span.start, span.start + span.num_tokens
    while position < end:
        stop = min(end, padded_context_len(position), position + _MAX_ROWS_PER_CALL)
        pieces.append(Span(row, position, stop - position, span.block_table))
        row += stop - position
        position = stop
    return pieces


def _shared_group(piece: Span, block_size: int, device: torch.device) -> RowGroup:
    context_len = padded_context_len(piece.start)
    return RowGroup(
        rows=torch.arange(piece.first_row, piece.first_row + piece.num_tokens, device=device),
        positions=torch.arange(piece.start, piece.start + piece.num_tokens, device=device),
        slots=_context_slots([piece.block_table], context_len, block_size, device),
    )


def _single_rows_group(
    pieces: Sequence[Span], context_len: int, block_size: int, device: torch.device
) -> RowGroup:
    return RowGroup(
        rows=torch.tensor([piece.first_row for piece in pieces], device=device),
        positions=torch.tensor([piece.start for piece in pieces], device=device),
        slots=_context_slots(
            [piece.block_table for piece in pieces], context_len, block_size, device
        ),
    )


def _context_slots(
    block_tables: Sequence[Sequence[int]],
    context_len: int,
    block_size: int,
    device: torch.device,
) -> torch.Tensor:
    """[num_tables, context_len] slots. Beyond a table's end stands block 0: it is masked."""
    num_blocks = -(-context_len // block_size)
    padded = [
        [*table[:num_blocks], *([0] * (num_blocks - len(table)))] for table in block_tables
    ]
    first_slots = torch.tensor(padded, device=device)[:, :, None] * block_size
    slots = first_slots + torch.arange(block_size, device=device)
    return slots.flatten(1)[:, :context_len]
