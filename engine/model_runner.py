"""Runs the model: token ids of many sequences in, logits out, over one paged KV pool."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from cluster.config import KVCacheConfig
from cluster.types import ModelCard
from engine.attention import KVPool, Span, choose_attention_tiling, plan_step
from engine.kv_cache import KVCacheManager
from engine.loader import LoadedModel


@dataclass(frozen=True, slots=True)
class SequenceSlice:
    """Tokens of one sequence that one forward takes."""

    block_table: Sequence[int]
    """Of the sequence; the slots of these tokens are reserved."""
    start: int
    """Absolute position of the first token."""
    token_ids: Sequence[int]
    num_logits: int
    """Logits are wanted after this many of the last tokens; 0 for a prompt's earlier chunks."""


class ModelRunner:
    """A model with its KV pool. Not thread safe: one compute thread owns it."""

    def __init__(self, loaded: LoadedModel, kv_config: KVCacheConfig) -> None:
        self._model = loaded.model
        self._min_step_rows = loaded.min_step_rows
        self.card: ModelCard = loaded.card
        self.device = loaded.device
        self.kv = KVCacheManager(_num_blocks(loaded, kv_config), kv_config.block_size)
        self._pool = KVPool(
            loaded.layer_shapes,
            self.kv.num_blocks,
            self.kv.block_size,
            loaded.dtype,
            loaded.device,
        )
        self._tiling = choose_attention_tiling(loaded.layer_shapes, loaded.dtype, loaded.device)

    @property
    def vocab_size(self) -> int:
        return self.card.vocab_size

    @property
    def max_model_len(self) -> int:
        return self.card.max_model_len

    @torch.inference_mode()
    def forward(self, slices: Sequence[SequenceSlice]) -> torch.Tensor:
        """One step over prefill chunks, decode tokens and drafts of many sequences.

        Writes the keys and values of all tokens into their slots. A sequence may be in one slice
        only. Returns [sum of num_logits, vocab_size] float32 in the order of the slices.
        """
        token_ids, positions, wanted, spans = _pack(slices)
        num_fillers = max(0, self._min_step_rows - len(token_ids))
        step = plan_step(self._pool, spans, num_fillers, self._tiling, self.device)
        output = self._model(
            input_ids=self._tensor([token_ids + token_ids[-1:] * num_fillers]),
            position_ids=self._tensor([positions + positions[-1:] * num_fillers]),
            use_cache=False,
            logits_to_keep=self._tensor(wanted),
            attention_step=step,
        )
        logits: torch.Tensor = output.logits[0]
        return logits.float()

    def warm_up(self) -> None:
        """Run once, so that the first request pays for nothing."""
        cache = self.kv.open()
        self.kv.reserve(cache, 1)
        self.forward([SequenceSlice(cache.block_table, 0, [0], 1)])
        self.kv.close(cache)

    def _tensor(self, values: Sequence[object]) -> torch.Tensor:
        return torch.tensor(values, dtype=torch.long, device=self.device)


def _pack(
    slices: Sequence[SequenceSlice],
) -> tuple[list[int], list[int], list[int], list[Span]]:
    """Token ids, positions, rows whose logits are wanted, and each slice's place."""
    token_ids: list[int] = []
    positions: list[int] = []
    wanted: list[int] = []
    spans: list[Span] = []
    for piece in slices:
        assert 0 <= piece.num_logits <= len(piece.token_ids)
        num_tokens = len(piece.token_ids)
        spans.append(Span(len(token_ids), piece.start, num_tokens, piece.block_table))
        token_ids += piece.token_ids
        positions += range(piece.start, piece.start + num_tokens)
        wanted += range(len(token_ids) - piece.num_logits, len(token_ids))
    return token_ids, positions, wanted, spans


def _num_blocks(loaded: LoadedModel, config: KVCacheConfig) -> int:
    """As many blocks as were asked for, or as fit into the memory."""
    if config.num_blocks is not None:
        return config.num_blocks
    num_elements = sum(shape.num_elements for shape in loaded.layer_shapes) * config.block_size
    num_blocks = config.memory_bytes // (num_elements * loaded.dtype.itemsize)
    if num_blocks == 0:
        raise ValueError(f"{config.memory_bytes} bytes hold no block of the KV cache")
    return num_blocks
