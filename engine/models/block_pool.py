"""Keys and values by blocks, in the layout that paged attention kernels of GPUs read."""

from __future__ import annotations

import torch

from engine.models.spec import DecoderSpec


class BlockPool:
    """Per layer two of [num_blocks + 1, block_size, num_kv_heads, head_dim].

    The block after the last is scratch: rows that fill a step up write there. Never holds anything
    that is not finite, so that a masked slot adds exactly nothing.
    """

    def __init__(
        self,
        spec: DecoderSpec,
        num_blocks: int,
        block_size: int,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        shape = (num_blocks + 1, block_size, spec.num_kv_heads, spec.head_dim)
        self.block_size = block_size
        self.scratch_block = num_blocks
        self._keys = [torch.zeros(shape, dtype=dtype, device=device) for _ in spec.layers]
        self._values = [torch.zeros(shape, dtype=dtype, device=device) for _ in spec.layers]

    def layer(self, layer: int) -> tuple[torch.Tensor, torch.Tensor]:
        """All keys and values of a layer."""
        return self._keys[layer], self._values[layer]

    def write(
        self, layer: int, slots: torch.Tensor, key: torch.Tensor, value: torch.Tensor
    ) -> None:
        """Put [n, num_kv_heads, head_dim] into the slots [n]."""
        for pool, new in ((self._keys[layer], key), (self._values[layer], value)):
            pool.flatten(0, 1).index_copy_(0, slots, torch.nan_to_num(new, 0.0, 0.0, 0.0))

    def copy_block(self, source: int, target: int) -> None:
        for pool in (*self._keys, *self._values):
            pool[target] = pool[source]
