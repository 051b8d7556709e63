"""Runs the model: token ids of many sequences in, logits out, over one paged KV pool."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from cluster.config import KVCacheConfig
from cluster.types import ModelCard
from engine.decoder import Decoder, SequenceSlice
from engine.kv_cache import KVCacheManager
from engine.loader import LoadedModel


class ModelRunner:
    """A model with its KV pool. Not thread safe: one compute thread owns it."""

    def __init__(self, loaded: LoadedModel, kv_config: KVCacheConfig) -> None:
        self._decoder = loaded.decoder
        self.card: ModelCard = loaded.card
        self.kv = KVCacheManager(
            _num_blocks(loaded.decoder, kv_config),
            kv_config.block_size,
            prefix_cache=kv_config.prefix_cache,
        )
        self._decoder.allocate(self.kv.num_blocks, self.kv.block_size)

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

    def warm_up(self) -> None:
        """Run once, so that the first request pays for nothing."""
        cache = self.kv.open()
        self.kv.reserve(cache, 1)
        self.forward([SequenceSlice(cache.block_table, 0, [0], 1)])
        self.kv.close(cache)


def _num_blocks(decoder: Decoder, config: KVCacheConfig) -> int:
    """As many blocks as were asked for, or as fit into the memory."""
    if config.num_blocks is not None:
        return config.num_blocks
    num_blocks = config.memory_bytes // decoder.block_bytes(config.block_size)
    if num_blocks == 0:
        raise ValueError(f"{config.memory_bytes} bytes hold no block of the KV cache")
    return num_blocks
