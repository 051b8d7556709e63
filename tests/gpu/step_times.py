"""What steps cost, against the time that reading the weights takes."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from pathlib import Path

import torch

from engine.decoder import Decoder, SequenceSlice
from engine.models.paged_attention import PagedKernel
from engine.models.spec import DecoderSpec, DecoderWeights
from engine.models.torch_decoder import TorchDecoder
from tests.support.decoders import read_model

_NUM_ROUNDS = 15
_NUM_WARM_UPS = 4
Shape = tuple[int, int]
"""Sequences in a step, and rows of each."""


def median_ms(run: Callable[[], object], device: torch.device) -> float:
    """Of some rounds, after some that are not counted."""
    times = []
    for _ in range(_NUM_WARM_UPS + _NUM_ROUNDS):
        started = time.perf_counter()
        run()
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        times.append(time.perf_counter() - started)
    return 1e3 * statistics.median(times[_NUM_WARM_UPS:])


def memory_bytes_per_ms(device: torch.device, num_bytes: int = 1 << 30) -> float:
    """Read and written by a copy."""
    source = torch.ones(num_bytes // 4, device=device)
    target = torch.empty_like(source)
    return 2 * num_bytes / median_ms(lambda: target.copy_(source), device)


def weight_bytes(weights: DecoderWeights) -> int:
    """What a step reads of them: all but the embedding, of which it reads a few rows."""
    matrices = [weights.head]
    for layer in weights.layers:
        matrices += [layer.qkv, layer.o, layer.gate_up, layer.down]
    return sum(matrix.nbytes for matrix in matrices)


class TimedDecoder:
    """A TorchDecoder with a pool for steps of many shapes."""

    def __init__(
        self,
        folder: Path,
        device: torch.device,
        *,
        block_size: int,
        num_tokens: int,
        dtype: torch.dtype = torch.bfloat16,
        deterministic: bool = False,
    ) -> None:
        self.spec, weights = read_model(folder, dtype, device)
        self.device = device
        self.weight_bytes = weight_bytes(weights)
        self.decoder: Decoder = TorchDecoder(
            self.spec, weights, dtype, device, deterministic=deterministic
        )
        self._block_size = block_size
        self.decoder.allocate(-(-num_tokens // block_size), block_size)

    def step_ms(self, shape: Shape, context_len: int) -> float:
        """Every row with logits, after a context of so many tokens."""
        num_sequences, num_rows = shape
        num_blocks = -(-(context_len + num_rows) // self._block_size)
        slices = [
            SequenceSlice(
                range(s * num_blocks, (s + 1) * num_blocks), context_len, [7] * num_rows, num_rows
            )
            for s in range(num_sequences)
        ]
        return median_ms(lambda: self.decoder.forward(slices), self.device)


def attention_ms(
    kernel: PagedKernel,
    spec: DecoderSpec,
    device: torch.device,
    *,
    num_rows: int,
    context_len: int,
    block_size: int,
) -> float:
    """Of one layer, bfloat16, rows of as many sequences."""
    width = -(-context_len // block_size)
    pool_shape = (num_rows * width, block_size, spec.num_kv_heads, spec.head_dim)
    keys = torch.randn(pool_shape, device=device).bfloat16()
    tables = torch.arange(num_rows * width, dtype=torch.int32, device=device).view(num_rows, width)
    lens = torch.full((num_rows,), context_len, dtype=torch.int32, device=device)
    query = torch.randn(num_rows, spec.num_heads, spec.head_dim, device=device).bfloat16()
    attend = kernel.rows(tables, lens)
    return median_ms(lambda: attend(query, keys, keys, spec.attention_scaling, None), device)
