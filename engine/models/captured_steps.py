"""Steps on a GPU: small ones by captured forwards of few shapes, large ones as they come.

A step of decode tokens and drafts is filled up to the next of a few numbers of rows, and its tables
to the next of a few widths; each such shape is captured the first time it occurs. A step that holds
longer pieces of prompts, or more rows, runs eagerly: it is long enough to hide its launches.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from engine.attention import Span
from engine.models.block_pool import BlockPool
from engine.models.cuda_graphs import Capture, Forward, GraphCapture
from engine.models.flash_attention import PagedShapes, choose_kernel
from engine.models.fused_rows import fused_kernels
from engine.models.layers import DecoderLayers, plain_product
from engine.models.paged_attention import BlockStep, PagedKernel, StepPart
from engine.models.rows import PackedRows
from engine.models.spec import DecoderSpec, DecoderWeights
from engine.models.step_inputs import StepInputs, StepShape, fill_inputs
from engine.models.steps import MakeSteps

ROW_BUCKETS = (1, 2, 4, 8, 16, 32, 48, 64, 96, 128)
"""Rows of captured steps."""
_MAX_SHORT_SPAN = 32
"""Rows of one sequence that are attended each by itself."""
_SHORTEST_CONTEXT = 512


def captured_steps(spec: DecoderSpec, weights: DecoderWeights) -> MakeSteps:
    """With what this GPU has: fused kernels, the best attention, graphs."""
    layers = DecoderLayers(spec, weights, plain_product, fused_kernels(spec, weights))

    def make(num_blocks: int, block_size: int) -> CapturedSteps:
        kernel = choose_kernel(PagedShapes(spec, block_size, layers.dtype, layers.device))
        capture = GraphCapture(layers.device)
        return CapturedSteps(layers, kernel, capture, num_blocks, block_size)

    return make


@dataclass(frozen=True, slots=True)
class _CapturedStep:
    buffer: torch.Tensor
    """[shape.num_integers] int32 on the device; see StepInputs."""
    forward: Forward
    """Hidden states of all rows."""


class CapturedSteps:
    """Steps in which a row's bits may depend on the step's shape."""

    def __init__(
        self,
        layers: DecoderLayers,
        kernel: PagedKernel,
        capture: Capture,
        num_blocks: int,
        block_size: int,
    ) -> None:
        self._layers = layers
        self._kernel = kernel
        self._capture = capture
        self._pool = BlockPool(layers.spec, num_blocks, block_size, layers.dtype, layers.device)
        self._captured: dict[StepShape, _CapturedStep] = {}

    def run(self, rows: PackedRows) -> torch.Tensor:
        is_short = max(span.num_tokens for span in rows.spans) <= _MAX_SHORT_SPAN
        if is_short and len(rows.token_ids) <= ROW_BUCKETS[-1]:
            hidden = self._run_captured(rows)
        else:
            hidden = self._run_eagerly(rows)
        wanted = torch.tensor(rows.wanted, dtype=torch.long, device=self._layers.device)
        return self._layers.logits(hidden.index_select(0, wanted))

    def copy_block(self, source: int, target: int) -> None:
        self._pool.copy_block(source, target)

    def _run_captured(self, rows: PackedRows) -> torch.Tensor:
        shape = self._bucket(rows)
        content = fill_inputs(rows, shape, self._pool.scratch_block)
        if shape not in self._captured:
            buffer = content.to(self._layers.device)
            self._captured[shape] = _CapturedStep(buffer, self._captured_forward(buffer, shape))
        step = self._captured[shape]
        step.buffer.copy_(content)
        return step.forward()

    def _captured_forward(self, buffer: torch.Tensor, shape: StepShape) -> Forward:
        inputs = StepInputs.of(buffer, shape)

        def forward() -> torch.Tensor:
            attend = self._kernel.rows(inputs.row_tables(), inputs.positions + 1)
            return self._forward(inputs, [StepPart(slice(None), attend)])

        return self._capture(forward)

    def _run_eagerly(self, rows: PackedRows) -> torch.Tensor:
        shape = StepShape(len(rows.token_ids), len(rows.spans), self._table_width(rows))
        content = fill_inputs(rows, shape, self._pool.scratch_block)
        inputs = StepInputs.of(content.to(self._layers.device), shape)
        short = [span for span in rows.spans if span.num_tokens <= _MAX_SHORT_SPAN]
        parts = [
            self._span_part(index, span, inputs)
            for index, span in enumerate(rows.spans)
            if span.num_tokens > _MAX_SHORT_SPAN
        ]
        if short:
            parts.append(self._rows_part(short, inputs))
        return self._forward(inputs, parts)

    def _span_part(self, index: int, span: Span, inputs: StepInputs) -> StepPart:
        end = span.start + span.num_tokens
        table = inputs.tables[index, : -(-end // self._pool.block_size)]
        rows = slice(span.first_row, span.first_row + span.num_tokens)
        return StepPart(rows, self._kernel.span(table, span.start, span.num_tokens))

    def _rows_part(self, spans: list[Span], inputs: StepInputs) -> StepPart:
        indices = [
            row for span in spans for row in range(span.first_row, span.first_row + span.num_tokens)
        ]
        rows = torch.tensor(indices, device=self._layers.device)
        attend = self._kernel.rows(inputs.row_tables()[rows], inputs.positions[rows] + 1)
        return StepPart(rows, attend)

    def _forward(self, inputs: StepInputs, parts: list[StepPart]) -> torch.Tensor:
        step = BlockStep(self._pool, inputs.slots(self._pool.block_size), parts)
        return self._layers.hidden(inputs.token_ids, inputs.positions, step)

    def _bucket(self, rows: PackedRows) -> StepShape:
        num_rows = next(bucket for bucket in ROW_BUCKETS if bucket >= len(rows.token_ids))
        return StepShape(num_rows, num_rows, self._table_width(rows))

    def _table_width(self, rows: PackedRows) -> int:
        """Blocks of the longest context, padded to a power of two from 512 tokens on."""
        longest = max(rows.positions) + 1
        padded = max(_SHORTEST_CONTEXT, 1 << (longest - 1).bit_length())
        return -(-padded // self._pool.block_size)
