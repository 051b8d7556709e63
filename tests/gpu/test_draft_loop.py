"""The speculation loop on the card, and what its parts cost."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from cluster.config import KVCacheConfig
from tests.gpu.draft_loop import Loop, run_loop

pytestmark = pytest.mark.gpu

KV_CACHE = KVCacheConfig(num_blocks=256, block_size=256)
CHANCES = (1.0, 0.8, 0.6)


@pytest.mark.parametrize("num_requests", [1, 8])
def test_what_the_loop_costs(large: Path, small: Path, num_requests: int) -> None:
    loop = Loop({"dtype": "bfloat16", "device": "cuda"}, KV_CACHE, num_requests, 200, 160)
    figures = asyncio.run(run_loop(large, small, loop, CHANCES))
    print(f"\n{num_requests} requests")
    print("\n".join(figures.report()))
    assert figures.scripted[1.0].tokens_per_s > figures.plain.tokens_per_s


def test_drafts_change_nothing_where_rows_are_fixed(large: Path, small: Path) -> None:
    model = {"dtype": "bfloat16", "device": "cuda", "deterministic": True}
    loop = Loop(model, KV_CACHE, 4, 100, 48)
    figures = asyncio.run(run_loop(large, small, loop, CHANCES))
    for run in (*figures.scripted.values(), figures.by_model):
        assert run.token_ids == figures.plain.token_ids
