"""The tokens of a step as one row of rows, whatever sequences they belong to."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from engine.attention import Span
from engine.decoder import SequenceSlice


@dataclass(frozen=True, slots=True)
class PackedRows:
    """One row per token, slice after slice."""

    token_ids: list[int]
    positions: list[int]
    """Of the rows in their own sequences."""
    wanted: list[int]
    """Rows whose logits are wanted."""
    spans: list[Span]
    """Each slice's place."""


def pack_rows(slices: Sequence[SequenceSlice]) -> PackedRows:
    """The rows of a step in the order of its slices."""
    packed = PackedRows([], [], [], [])
    for piece in slices:
        assert 0 <= piece.num_logits <= len(piece.token_ids)
        first_row, num_tokens = len(packed.token_ids), len(piece.token_ids)
        end = first_row + num_tokens
        packed.token_ids.extend(piece.token_ids)
        packed.positions.extend(range(piece.start, piece.start + num_tokens))
        packed.wanted.extend(range(end - piece.num_logits, end))
        packed.spans.append(Span(first_row, piece.start, num_tokens, piece.block_table))
    return packed


def cut_rows(rows: PackedRows, num_rows: int) -> Iterator[PackedRows]:
    """The same rows in pieces of at most `num_rows`, in their order."""
    for first in range(0, len(rows.token_ids), num_rows):
        end = first + num_rows
        yield PackedRows(
            token_ids=rows.token_ids[first:end],
            positions=rows.positions[first:end],
            wanted=[row - first for row in rows.wanted if first <= row < end],
            spans=[part for span in rows.spans for part in _span_within(span, first, end)],
        )


def _span_within(span: Span, first: int, end: int) -> Iterator[Span]:
    """What of a span lies in the rows from `first` to `end`, counted from `first`."""
    start = max(span.first_row, first)
    num_tokens = min(span.first_row + span.num_tokens, end) - start
    if num_tokens > 0:
        position = span.start + start - span.first_row
        yield Span(start - first, position, num_tokens, span.block_table)
