"""What a step's rows bring to a device: one array of integers, copied at once."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from engine.models.rows import PackedRows


@dataclass(frozen=True, slots=True)
class StepShape:
    """Steps of one shape run the same kernels."""

    num_rows: int
    num_tables: int
    table_width: int
    """Blocks in each table."""

    @property
    def num_integers(self) -> int:
        return 3 * self.num_rows + self.num_tables * self.table_width


@dataclass(frozen=True, slots=True)
class StepInputs:
    """Views of one buffer on the device."""

    token_ids: torch.Tensor
    """[num_rows] int32, as all of these."""
    positions: torch.Tensor
    """[num_rows] in the rows' own sequences."""
    sequences: torch.Tensor
    """[num_rows] indices of tables."""
    tables: torch.Tensor
    """[num_tables, table_width]"""

    @classmethod
    def of(cls, buffer: torch.Tensor, shape: StepShape) -> StepInputs:
        """`buffer` is [shape.num_integers] int32."""
        by_row = buffer[: 3 * shape.num_rows].view(3, shape.num_rows)
        tables = buffer[3 * shape.num_rows :].view(shape.num_tables, shape.table_width)
        return cls(by_row[0], by_row[1], by_row[2], tables)

    def row_tables(self) -> torch.Tensor:
        """[num_rows, table_width]"""
        return self.tables.index_select(0, self.sequences)

    def slots(self, block_size: int) -> torch.Tensor:
        """[num_rows] int64 of a pool: where the rows' keys and values go."""
        positions = self.positions.long()
        blocks = self.row_tables().gather(1, (positions // block_size)[:, None])
        return blocks[:, 0].long() * block_size + positions % block_size


def fill_inputs(rows: PackedRows, shape: StepShape, scratch_block: int) -> torch.Tensor:
    """The buffer's content, on the host: the step's rows, then rows that fill it up.

    Those are the first token of a sequence in the scratch block, whose table is one that the step
    leaves free; a step that needs no fillers may use all tables.
    """
    buffer = torch.zeros(shape.num_integers, dtype=torch.int32)
    inputs = StepInputs.of(buffer, shape)
    num_rows, num_fillers = len(rows.token_ids), shape.num_rows - len(rows.token_ids)
    assert num_fillers >= 0
    assert len(rows.spans) + min(num_fillers, 1) <= shape.num_tables
    inputs.token_ids[:num_rows] = torch.tensor(rows.token_ids)
    inputs.positions[:num_rows] = torch.tensor(rows.positions)
    for index, span in enumerate(rows.spans):
        table = span.block_table[: shape.table_width]
        inputs.sequences[span.first_row : span.first_row + span.num_tokens] = index
        inputs.tables[index, : len(table)] = torch.tensor(table)
    if num_fillers:
        inputs.sequences[num_rows:] = shape.num_tables - 1
        inputs.tables[-1, 0] = scratch_block
    return buffer
