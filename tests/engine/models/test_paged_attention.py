"""The gathering kernel against attention written out, and the choice among kernels of a GPU."""

from __future__ import annotations

import logging
import sys
from collections.abc import Callable
from types import ModuleType
from typing import Any

import pytest
import torch

from engine.models.block_pool import BlockPool
from engine.models.flash_attention import PagedShapes, choose_kernel
from engine.models.paged_attention import GatherKernel
from engine.models.spec import Activation, DecoderSpec, LayerSpec

_NUM_HEADS, _NUM_KV_HEADS, _HEAD_DIM, _BLOCK_SIZE = 6, 2, 8, 4


def spec(window: int | None = None) -> DecoderSpec:
    return DecoderSpec(
        hidden_size=48,
        num_heads=_NUM_HEADS,
        num_kv_heads=_NUM_KV_HEADS,
        head_dim=_HEAD_DIM,
        intermediate_size=8,
        vocab_size=8,
        max_position=64,
        rms_norm_eps=1e-6,
        activation=Activation.SILU,
        attention_scaling=0.3,
        embedding_scale=1.0,
        layers=(LayerSpec(window, None),),
        ropes=(),
    )


def written_out(
    query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, window: int | None
) -> torch.Tensor:
    """One row [num_heads, head_dim] over a context [context_len, num_kv_heads, head_dim]."""
    seen = slice(-window if window else None, None)
    outputs = []
    for head in range(_NUM_HEADS):
        kv_head = head * _NUM_KV_HEADS // _NUM_HEADS
        scores = 0.3 * (keys[seen, kv_head] @ query[head])
        outputs.append(torch.softmax(scores, 0) @ values[seen, kv_head])
    return torch.stack(outputs)


class Case:
    """Three sequences in a pool of random blocks."""

    lens = (1, 6, 16)

    def __init__(self) -> None:
        generator = torch.Generator().manual_seed(0)

        def draw(*sizes: int) -> torch.Tensor:
            return torch.randn(*sizes, generator=generator)

        self.keys, self.values = (draw(20, _BLOCK_SIZE, _NUM_KV_HEADS, _HEAD_DIM) for _ in "kv")
        self.tables = torch.randperm(20, generator=generator)[:15].view(3, 5).int()
        self.query = draw(16, _NUM_HEADS, _HEAD_DIM)

    def context(self, pool: torch.Tensor, sequence: int, length: int) -> torch.Tensor:
        return pool[self.tables[sequence].long()].flatten(0, 1)[:length]

    def expected(self, query: torch.Tensor, sequence: int, length: int, window: int | None) -> Any:
        keys, values = (self.context(pool, sequence, length) for pool in (self.keys, self.values))
        return written_out(query, keys, values, window)


@pytest.mark.parametrize("window", [None, 5])
def test_rows_attend_to_their_own_contexts(window: int | None) -> None:
    case = Case()
    attend = GatherKernel().rows(case.tables, torch.tensor(case.lens, dtype=torch.int32))
    output = attend(case.query[:3], case.keys, case.values, 0.3, window)
    for row, length in enumerate(case.lens):
        expected = case.expected(case.query[row], row, length, window)
        torch.testing.assert_close(output[row], expected)


@pytest.mark.parametrize("window", [None, 5])
def test_a_span_attends_to_what_is_before_each_row(window: int | None) -> None:
    case = Case()
    attend = GatherKernel().span(case.tables[2], 4, 9)
    output = attend(case.query[:9], case.keys, case.values, 0.3, window)
    for row in range(9):
        expected = case.expected(case.query[row], 2, 4 + row + 1, window)
        torch.testing.assert_close(output[row], expected)


def test_the_pool_keeps_nothing_that_is_not_finite() -> None:
    pool = BlockPool(spec(), 2, _BLOCK_SIZE, torch.float32, torch.device("cpu"))
    bad = torch.full((2, _NUM_KV_HEADS, _HEAD_DIM), torch.nan)
    pool.write(0, torch.tensor([3, 4]), bad, bad * torch.inf)
    for tensor in pool.layer(0):
        assert torch.isfinite(tensor).all()


# --- the choice -------------------------------------------------------------------------------


def shapes(window: int | None = None) -> PagedShapes:
    return PagedShapes(spec(window), _BLOCK_SIZE, torch.bfloat16, torch.device("cpu"))


def flash_attn_with_kvcache(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    *,
    cache_seqlens: torch.Tensor,
    softmax_scale: float,
    causal: bool,
    window_size: tuple[int, int],
    block_table: torch.Tensor,
) -> torch.Tensor:
    """What the library documents, in plain torch."""
    assert causal
    assert window_size[1] == 0
    window = None if window_size[0] < 0 else window_size[0] + 1
    outputs = []
    for query, length, table in zip(q, cache_seqlens.tolist(), block_table, strict=True):
        attend = GatherKernel().span(table, length - len(query), len(query))
        outputs.append(attend(query, k_cache, v_cache, softmax_scale, window))
    return torch.stack(outputs)


def install(monkeypatch: pytest.MonkeyPatch, function: Callable[..., Any] | None) -> None:
    """A flash_attn with this function alone, and no other library."""
    for name in ("flash_attn_interface", "torch.nn.attention.varlen"):
        monkeypatch.setitem(sys.modules, name, None)
    module = ModuleType("flash_attn")
    if function is not None:
        module.flash_attn_with_kvcache = function  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "flash_attn", module)


@pytest.mark.parametrize("window", [None, 5])
def test_a_library_that_gives_the_right_numbers_is_used(
    window: int | None, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    install(monkeypatch, flash_attn_with_kvcache)
    with caplog.at_level(logging.INFO):
        assert choose_kernel(shapes(window)).name == "flash_attn"
    assert "attention over blocks of 4: flash_attn (without flash_attn_interface" in caplog.text


def wrong_numbers(*args: Any, **kwargs: Any) -> torch.Tensor:
    return flash_attn_with_kvcache(*args, **kwargs | {"softmax_scale": 1.0})


def wrong_window(*args: Any, **kwargs: Any) -> torch.Tensor:
    left, right = kwargs["window_size"]
    return flash_attn_with_kvcache(*args, **kwargs | {"window_size": (left + 1, right)})


def refuses(*args: Any, **kwargs: Any) -> torch.Tensor:
    raise RuntimeError("Paged KV cache block size must be divisible by 256\nand more")


@pytest.mark.parametrize(
    ("function", "words"),
    [
        (wrong_numbers, "flash_attn: it is off by"),
        (wrong_window, "flash_attn: it is off by"),
        (refuses, "flash_attn: Paged KV cache block size must be divisible by 256;"),
        (lambda **others: None, "flash_attn: "),
        (None, "flash_attn: module 'flash_attn' has no attribute"),
    ],
)
def test_a_library_that_does_not_is_left_alone_and_the_log_says_why(
    function: Callable[..., Any] | None,
    words: str,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    install(monkeypatch, function)
    with caplog.at_level(logging.INFO):
        assert choose_kernel(shapes(window=5)).name == "gather"
    assert "attention over blocks of 4: gather (without" in caplog.text
    assert words in caplog.text
