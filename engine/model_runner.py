"""Runs the model: token ids of many sequences in, logits out, over one paged KV pool."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from cluster.config import KVCacheConfig
from cluster.types import ModelCard
from engine.decoder import SequenceSlice
from engine.kv_cache import KVCacheManager
from engine.loader import LoadedModel
from engine.memory import available_bytes, choose_num_blocks


class ModelRunner:
    """A model with its KV pool. Not thread safe: one compute thread owns it."""

    def __init__(self, loaded: LoadedModel, kv_config: KVCacheConfig) -> None:
        """Makes the pool. Raises MemoryLimitError if it would not fit."""
        decoder, block_size = loaded.decoder, kv_config.block_size
        num_blocks = choose_num_blocks(
            kv_config, decoder.block_bytes(block_size), available_bytes(decoder.device)
        )
        decoder.allocate(num_blocks, block_size)
        self._decoder = decoder
        self.card: ModelCard = loaded.card
        self.kv = KVCacheManager(num_blocks, block_size, prefix_cache=kv_config.prefix_cache)

    @property
    def device(self) -> torch.device:
        return self._decoder.device

    @property
    def vocab_size(self) -> int:
        return self.card.vocab_size

    @property
    def max_model_len(self) -> int:
        return self.card.max_model_len

    @torch.inference_mode()
    def forward(self, slices: Sequence[SequenceSlice]) -> torch.Tensor:
        """One step; see Decoder.forward."""
        return self._decoder.forward(slices)

    def copy_block(self, source: int, target: int) -> None:
        """What one block of the pool holds into another; see Decoder.copy_block."""
        self._decoder.copy_block(source, target)

    def warm_up(self) -> None:
        """Run once, so that the first request pays for nothing."""
        cache = self.kv.open()
        self.kv.reserve(cache, 1)
        self.forward([SequenceSlice(cache.block_table, 0, [0], 1)])
        self.kv.close(cache)
