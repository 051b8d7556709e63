"""The decoder in torch operations: Llama-like models on any device.

A row's bits are independent of the batch on a CPU, where that costs little. On a GPU they are with
`deterministic` alone; engine/models/fixed_row_steps.py says what that costs. Without it rows are
equal up to floating-point near-ties, and steps are captured (engine/models/captured_steps.py).
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from engine.decoder import SequenceSlice
from engine.linear import kernel_class
from engine.models.rows import pack_rows
from engine.models.spec import DecoderSpec, DecoderWeights
from engine.models.steps import MakeSteps, Steps


class TorchDecoder:
    """A Decoder; see engine/decoder.py."""

    name = "torch"

    def __init__(
        self,
        spec: DecoderSpec,
        weights: DecoderWeights,
        dtype: torch.dtype,
        device: torch.device,
        *,
        deterministic: bool | None = None,
    ) -> None:
        """`weights` are of this dtype and on this device. None is what costs the device nothing."""
        self.device = device
        self._spec = spec
        self._dtype = dtype
        way, self._make_steps = _steps_maker(spec, weights, device, bool(deterministic))
        self.kernel_class = f"torch/{way}/{kernel_class(dtype, device)}"
        self._steps: Steps | None = None

    def block_bytes(self, block_size: int) -> int:
        num_elements = 2 * self._spec.num_kv_heads * self._spec.head_dim * len(self._spec.layers)
        return num_elements * self._dtype.itemsize * block_size

    def allocate(self, num_blocks: int, block_size: int) -> None:
        assert self._steps is None, "the pool is made once"
        self._steps = self._make_steps(num_blocks, block_size)

    def copy_block(self, source: int, target: int) -> None:
        assert self._steps is not None, "allocate comes first"
        self._steps.copy_block(source, target)

    @torch.inference_mode()
    def forward(self, slices: Sequence[SequenceSlice]) -> torch.Tensor:
        assert self._steps is not None, "allocate comes first"
        return self._steps.run(pack_rows(slices))


def _steps_maker(
    spec: DecoderSpec, weights: DecoderWeights, device: torch.device, deterministic: bool
) -> tuple[str, MakeSteps]:
    """How this device runs steps, by its name and as a function. Imports what it needs alone."""
    if device.type == "cpu":
        from engine.models.tiled_steps import tiled_steps

        return "tiled", tiled_steps(spec, weights)
    if deterministic:
        from engine.models.fixed_row_steps import fixed_row_steps

        return "fixed-rows", fixed_row_steps(spec, weights)
    from engine.models.captured_steps import captured_steps

    return "captured", captured_steps(spec, weights)
