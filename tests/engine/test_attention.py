"""Paged attention against the textbook formula, and what a row may depend on."""

from __future__ import annotations

import functools
import random
from itertools import pairwise

import pytest
import torch

from engine.attention import (
    KVPool,
    LayerShape,
    Span,
    choose_attention_tiling,
    padded_context_len,
    plan_step,
)
from engine.tiling import FIXED_TILES, Tiling

CPU = torch.device("cpu")
SHAPE = LayerShape(num_heads=6, num_kv_heads=2, head_dim=16, value_dim=24)
SCALING = 0.2


@functools.cache
def tiling_of(dtype: torch.dtype) -> Tiling:
    """Chosen by trying, which takes longer than what is tested."""
    return choose_attention_tiling([SHAPE], dtype, CPU)


class Sequences:
    """Random queries, keys and values of a few sequences over one pool of scattered blocks."""

    def __init__(self, lens: list[int], block_size: int, dtype: torch.dtype) -> None:
        torch.manual_seed(0)
        num_blocks = sum(-(-n // block_size) for n in lens) + 2
        self.pool = KVPool([SHAPE], num_blocks, block_size, dtype, CPU)
        self.tiling = tiling_of(dtype)
        blocks = list(range(num_blocks))
        random.Random(0).shuffle(blocks)
        self.tables = [[blocks.pop() for _ in range(-(-n // block_size))] for n in lens]
        self.queries = [torch.randn(6, n, 16).to(dtype) for n in lens]
        self.keys = [torch.randn(2, n, 16).to(dtype) for n in lens]
        self.values = [torch.randn(2, n, 24).to(dtype) for n in lens]

    def attend(
        self, pieces: list[tuple[int, int, int]], window: int | None = None
    ) -> list[torch.Tensor]:
        """Feed (sequence, start, end) in one step; each piece's output."""
        spans, first_row = [], 0
        for sequence, start, end in pieces:
            spans.append(Span(first_row, start, end - start, self.tables[sequence]))
            first_row += end - start
        step = plan_step(self.pool, spans, 0, self.tiling, CPU)

        def packed(tensors: list[torch.Tensor]) -> torch.Tensor:
            return torch.cat([tensors[s][:, start:end] for s, start, end in pieces], dim=1)

        output = step.attend(
            0, packed(self.queries), packed(self.keys), packed(self.values), SCALING, window
        )
        return list(output.split([end - start for _, start, end in pieces]))

    def textbook(self, sequence: int, window: int | None = None) -> torch.Tensor:
        """[n, num_heads, value_dim] in float64."""
        query = self.queries[sequence].double()
        key = self.keys[sequence].double().repeat_interleave(3, dim=0)
        value = self.values[sequence].double().repeat_interleave(3, dim=0)
        places = torch.arange(query.shape[1])
        distance = places[:, None] - places
        hidden = (distance < 0) | (distance >= (window or len(places)))
        scores = (query @ key.transpose(1, 2) * SCALING).masked_fill(hidden, -torch.inf)
        return (scores.softmax(-1) @ value).transpose(0, 1)


@pytest.mark.parametrize("window", [None, 1, 20])
@pytest.mark.parametrize("block_size", [1, 16, 48, 256])
def test_is_the_textbook_formula(block_size: int, window: int | None) -> None:
    sequences = Sequences([150, 9], block_size, torch.float32)
    outputs = sequences.attend([(0, 0, 150), (1, 0, 9)], window)
    for sequence, output in enumerate(outputs):
        expected = sequences.textbook(sequence, window)
        torch.testing.assert_close(output.double(), expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("window", [None, 20])
def test_a_row_has_the_same_bits_however_it_is_fed(dtype: torch.dtype, window: int | None) -> None:
    lens = [300, 130, 64]
    reference = Sequences(lens, 16, dtype)
    expected = [reference.attend([(s, 0, n)], window)[0] for s, n in enumerate(lens)]
    rng = random.Random(0)
    for _ in range(3):
        sequences = Sequences(lens, 16, dtype)
        outputs: list[list[torch.Tensor]] = [[] for _ in lens]
        fed = [0 for _ in lens]
        while fed != lens:
            pieces = []
            for s in rng.sample(range(3), rng.randint(1, 3)):
                end = min(lens[s], fed[s] + rng.choice([1, 1, 2, 5, 9, 40, 100]))
                if end > fed[s]:
                    pieces.append((s, fed[s], end))
                    fed[s] = end
            if pieces:
                for (s, _, _), output in zip(pieces, sequences.attend(pieces, window), strict=True):
                    outputs[s].append(output)
        for parts, whole in zip(outputs, expected, strict=True):
            assert torch.equal(torch.cat(parts), whole)


@pytest.mark.parametrize("poison", [torch.nan, torch.inf, -torch.inf])
def test_a_poisoned_draft_or_neighbour_changes_nothing(poison: float) -> None:
    clean = Sequences([70, 40], 16, torch.float32)
    expected = clean.attend([(0, 0, 60), (1, 0, 40)])
    sick = Sequences([70, 40], 16, torch.float32)
    sick.keys[0][:, 61:] = poison
    sick.values[0][:, 61:] = poison
    sick.attend([(0, 0, 70)])  # drafts beyond 60 leave their values in the pool
    sick.keys[1][:, 39] = sick.values[1][:, 39] = poison
    outputs = sick.attend([(0, 0, 60), (1, 0, 40)])
    assert torch.equal(outputs[0], expected[0])
    assert torch.equal(outputs[1][:39], expected[1][:39])


def test_padded_context_is_a_coarse_grid() -> None:
    lens = [padded_context_len(position) for position in range(5000)]
    assert all(position < n for position, n in enumerate(lens))
    assert all(a <= b for a, b in pairwise(lens))
    assert all(n % 64 == 0 for n in lens)
    assert all(padded_context_len(n - 1) == n for n in lens)
    assert len(set(lens)) <= 16
    assert all(n <= max(64 + position, 1.5 * (position + 1)) for position, n in enumerate(lens))


def test_layers_that_disagree_on_tiles_get_fixed_ones(monkeypatch: pytest.MonkeyPatch) -> None:
    other = LayerShape(num_heads=2, num_kv_heads=2, head_dim=16, value_dim=16)
    monkeypatch.setattr(
        "engine.attention._choose_layer_tiling", lambda shape, *_: Tiling(1, shape.num_heads)
    )
    assert choose_attention_tiling([SHAPE, SHAPE], torch.bfloat16, CPU) == Tiling(1, 6)
    assert choose_attention_tiling([SHAPE, other], torch.bfloat16, CPU) == FIXED_TILES
