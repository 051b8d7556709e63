"""A decoder that can say some of the tokens only, seen as one that can say all."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from engine.decoder import Decoder, SequenceSlice


class DraftVocabulary:
    """A Decoder; see engine/decoder.py. Its logits are over the whole vocabulary, -inf where the
    inner decoder has none, so that whoever draws from them draws token ids of the target, with the
    noise that the target has for those ids."""

    def __init__(self, inner: Decoder, vocabulary: torch.Tensor, vocab_size: int) -> None:
        """
        vocabulary  # [columns of the inner decoder's logits] int64, ascending: their token ids
        vocab_size  # of the whole
        """
        self._inner = inner
        self._vocabulary = vocabulary.to(inner.device)
        self._vocab_size = vocab_size

    @property
    def name(self) -> str:
        return self._inner.name

    @property
    def kernel_class(self) -> str:
        return self._inner.kernel_class

    @property
    def device(self) -> torch.device:
        return self._inner.device

    def block_bytes(self, block_size: int) -> int:
        return self._inner.block_bytes(block_size)

    def allocate(self, num_blocks: int, block_size: int) -> None:
        self._inner.allocate(num_blocks, block_size)

    def copy_block(self, source: int, target: int) -> None:
        self._inner.copy_block(source, target)

    def forward(self, slices: Sequence[SequenceSlice]) -> torch.Tensor:
        own = self._inner.forward(slices)
        logits = own.new_full((len(own), self._vocab_size), -torch.inf)
        return logits.index_copy_(1, self._vocabulary, own)
