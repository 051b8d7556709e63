"""Attention kernels of GPUs that read a BlockPool in place, and the choice among those present.

None of the libraries is needed. A kernel is used if on this machine, for this block size, it gives
what the gathering kernel gives; where it raises, or gives anything else, the next one is tried.
"""

from __future__ import annotations

import importlib
import logging
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch

from engine.models.paged_attention import Attend, GatherKernel, PagedKernel
from engine.models.spec import DecoderSpec

logger = logging.getLogger(__name__)

_WHAT_A_LIBRARY_MAY_RAISE = (
    AttributeError,
    ImportError,
    RuntimeError,
    TypeError,
    ValueError,
)
_PROBED_LENS = (1, 37, 160)
"""Contexts, in tokens."""
_PROBED_WINDOW = 29
_TOLERANCE = 0.03
"""Of outputs about as large as 1, in 16 bits."""


class FlashAttentionKernel:
    """flash_attn_with_kvcache of package flash-attn, version 2 or 3.

    Rows are a batch of sequences with one new token each, so version 2 splits long contexts.
    https://github.com/Dao-AILab/flash-attention
    """

    def __init__(self, module: str, table_argument: str) -> None:
        """Raises ImportError."""
        self.name = module
        self._function: Callable[..., Any] = importlib.import_module(module).flash_attn_with_kvcache
        self._table_argument = table_argument

    def rows(self, tables: torch.Tensor, context_lens: torch.Tensor) -> Attend:
        return self._attend(tables, context_lens, rows_per_table=1)

    def span(self, table: torch.Tensor, start: int, num_rows: int) -> Attend:
        lens = torch.full((1,), start + num_rows, dtype=torch.int32, device=table.device)
        return self._attend(table[None], lens, rows_per_table=num_rows)

    def _attend(self, tables: torch.Tensor, lens: torch.Tensor, rows_per_table: int) -> Attend:
        def attend(
            query: torch.Tensor,
            keys: torch.Tensor,
            values: torch.Tensor,
            scaling: float,
            window: int | None,
        ) -> torch.Tensor:
            output: torch.Tensor = self._function(
                query.reshape(-1, rows_per_table, *query.shape[1:]),
                keys,
                values,
                cache_seqlens=lens,
                softmax_scale=scaling,
                causal=True,
                window_size=_window_size(window),
                **{self._table_argument: tables},
            )
            return output.flatten(0, 1)

        return attend


class VarlenKernel:
    """torch's own flash attention over blocks, torch.nn.attention.varlen."""

    name = "torch.nn.attention.varlen"

    def __init__(self) -> None:
        """Raises ImportError."""
        self._function: Callable[..., Any] = importlib.import_module(self.name).varlen_attn

    def rows(self, tables: torch.Tensor, context_lens: torch.Tensor) -> Attend:
        borders = torch.arange(len(tables) + 1, dtype=torch.int32, device=tables.device)
        return self._attend(tables, context_lens, borders, most_rows=1)

    def span(self, table: torch.Tensor, start: int, num_rows: int) -> Attend:
        lens = torch.full((1,), start + num_rows, dtype=torch.int32, device=table.device)
        borders = torch.tensor([0, num_rows], dtype=torch.int32, device=table.device)
        return self._attend(table[None], lens, borders, most_rows=num_rows)

    def _attend(
        self, tables: torch.Tensor, lens: torch.Tensor, borders: torch.Tensor, most_rows: int
    ) -> Attend:
        def attend(
            query: torch.Tensor,
            keys: torch.Tensor,
            values: torch.Tensor,
            scaling: float,
            window: int | None,
        ) -> torch.Tensor:
            output: torch.Tensor = self._function(
                query.contiguous(),
                keys,
                values,
                cu_seq_q=borders,
                cu_seq_k=None,
                max_q=most_rows,
                max_k=tables.shape[1] * keys.shape[1],
                scale=scaling,
                window_size=_window_size(window),
                enable_gqa=True,
                seqused_k=lens,
                block_table=tables,
            )
            return output

        return attend


def _window_size(window: int | None) -> tuple[int, int]:
    """Keys that a row sees before and after its own."""
    return (-1, 0) if window is None else (window - 1, 0)


@dataclass(frozen=True, slots=True)
class PagedShapes:
    """What decides whether a kernel can be used."""

    spec: DecoderSpec
    block_size: int
    dtype: torch.dtype
    device: torch.device


CANDIDATES: tuple[tuple[str, Callable[[], PagedKernel]], ...] = (
    ("flash_attn_interface", lambda: FlashAttentionKernel("flash_attn_interface", "page_table")),
    ("flash_attn", lambda: FlashAttentionKernel("flash_attn", "block_table")),
    (VarlenKernel.name, VarlenKernel),
)
"""The fastest first."""


def choose_kernel(shapes: PagedShapes) -> PagedKernel:
    """The best kernel for these shapes on this machine. Logs which, and why not a better one."""
    refusals = []
    for name, make in CANDIDATES:
        try:
            kernel = make()
            check_kernel(kernel, shapes)
        except _WHAT_A_LIBRARY_MAY_RAISE as error:
            refusals.append(f"{name}: {first_line(error)}")
            continue
        break
    else:
        kernel = GatherKernel()
    without = f" (without {'; '.join(refusals)})" if refusals else ""
    logger.info("attention over blocks of %d: %s%s", shapes.block_size, kernel.name, without)
    return kernel


def first_line(error: Exception) -> str:
    """What a library says, without its backtrace."""
    return (str(error) or repr(error)).strip().splitlines()[0]


@torch.inference_mode()
def check_kernel(kernel: PagedKernel, shapes: PagedShapes) -> None:
    """Raises ValueError where a kernel does not give what the gathering kernel gives, or whatever
    the kernel raises."""
    window = _PROBED_WINDOW if any(layer.sliding_window for layer in shapes.spec.layers) else None
    for attend, expected, query, pools in _probes(kernel, shapes):
        scaling = shapes.spec.attention_scaling
        got = attend(query, *pools, scaling, window).float()
        want = expected(query.float(), pools[0].float(), pools[1].float(), scaling, window)
        if not torch.allclose(got, want, rtol=_TOLERANCE, atol=_TOLERANCE):
            raise ValueError(f"it is off by {(got - want).abs().max().item():.2g}")


_Probe = tuple[Attend, Attend, torch.Tensor, tuple[torch.Tensor, torch.Tensor]]


def _probes(kernel: PagedKernel, shapes: PagedShapes) -> Iterator[_Probe]:
    """Rows of three sequences, and a span of one, over a random pool."""
    spec, device, reference = shapes.spec, shapes.device, GatherKernel()
    generator = torch.Generator().manual_seed(0)

    def draw(*sizes: int) -> torch.Tensor:
        return torch.randn(*sizes, generator=generator).to(device, shapes.dtype)

    width = -(-max(_PROBED_LENS) // shapes.block_size) + 1
    num_blocks = width * len(_PROBED_LENS)
    pool_shape = (num_blocks, shapes.block_size, spec.num_kv_heads, spec.head_dim)
    pools = draw(*pool_shape), draw(*pool_shape)
    tables = torch.randperm(num_blocks, generator=generator).view(-1, width).int().to(device)
    lens = torch.tensor(_PROBED_LENS, dtype=torch.int32, device=device)
    rows = draw(len(_PROBED_LENS), spec.num_heads, spec.head_dim)
    yield kernel.rows(tables, lens), reference.rows(tables, lens), rows, pools
    span = draw(_PROBED_LENS[-1] - 50, spec.num_heads, spec.head_dim)
    place = tables[-1], 50, len(span)
    yield kernel.span(*place), reference.span(*place), span, pools
