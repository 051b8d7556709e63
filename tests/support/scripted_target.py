"""A target whose next-token law is any function of the prefix, behind the real KV interface.

It writes the tokens it is fed into a paged pool, by block table and position, and reads every
prefix back from there; of earlier tokens it is told nothing else. So a wrong block table, start or
rollback changes its answers, as it would change a model's. And as a model's keys and values do,
what it writes depends on all tokens before it: to read a block behind another prefix than it was
made for is an error, even if its own tokens are right.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from cluster.protocol.prefix_hash import EMPTY_PREFIX_HASH, extend_prefix_hash
from cluster.types import ModelCard
from engine.decoder import SequenceSlice
from engine.kv_cache import KVCacheManager

VOCAB_SIZE = 40
EOS = 2

Law = Callable[[tuple[int, ...]], list[float]]
"""Prefix -> logits."""


def hashed_law(*, salt: str = "", vocab_size: int = VOCAB_SIZE, sharpness: float = 4.0) -> Law:
    """Logits that look random and depend on the whole prefix."""

    def law(prefix: tuple[int, ...]) -> list[float]:
        digest = hashlib.shake_128(f"{salt}{prefix}".encode()).digest(vocab_size)
        return [sharpness * byte / 255 for byte in digest]

    return law


def continuation_law(continuation: Sequence[int], prompt_len: int) -> Law:
    """All mass on a scripted continuation; after its end, on token 7."""

    def law(prefix: tuple[int, ...]) -> list[float]:
        index = len(prefix) - prompt_len
        wanted = continuation[index] if index < len(continuation) else 7
        return [30.0 if token_id == wanted else 0.0 for token_id in range(VOCAB_SIZE)]

    return law


@dataclass(frozen=True, slots=True)
class _Entry:
    """What stands in a slot."""

    token_id: int = -1
    prefix_hash: int = 0
    """Of the tokens up to this one."""


class ScriptedRunner:
    """Stands where a ModelRunner stands."""

    def __init__(
        self,
        law: Law,
        *,
        num_blocks: int = 64,
        block_size: int = 4,
        max_model_len: int = 200,
        vocab_size: int = VOCAB_SIZE,
        prefix_cache: bool = True,
    ) -> None:
        self.law = law
        self.kv = KVCacheManager(num_blocks, block_size, prefix_cache=prefix_cache)
        self.vocab_size = vocab_size
        self.max_model_len = max_model_len
        self.card = ModelCard(
            name="scripted",
            max_model_len=max_model_len,
            vocab_size=vocab_size,
            vocabulary="scripted",
            fingerprint="scripted",
            eos_token_ids=(EOS,),
            tokenizer_json="",
            chat_template="",
        )
        self.num_forwards = 0
        self.max_rows = 0
        self.num_fed = 0
        self.num_copied_blocks = 0
        self._pool = [_Entry()] * (num_blocks * block_size)

    def forward(self, slices: Sequence[SequenceSlice]) -> torch.Tensor:
        num_tokens = sum(len(part.token_ids) for part in slices)
        self.num_forwards += 1
        self.max_rows = max(self.max_rows, num_tokens)
        self.num_fed += num_tokens
        for part in slices:
            self._write(part)
        rows = [row for part in slices for row in self._rows(part)]
        return torch.tensor(rows, dtype=torch.float32).reshape(len(rows), self.vocab_size)

    def copy_block(self, source: int, target: int) -> None:
        self.num_copied_blocks += 1
        size = self.kv.block_size
        held = self._pool[source * size : (source + 1) * size]
        self._pool[target * size : (target + 1) * size] = held

    def _write(self, part: SequenceSlice) -> None:
        prefix_hash = self._read(part, part.start)[1]
        for position, token_id in enumerate(part.token_ids, part.start):
            prefix_hash = extend_prefix_hash(prefix_hash, token_id)
            self._pool[self._slot(part, position)] = _Entry(token_id, prefix_hash)

    def _read(self, part: SequenceSlice, end: int) -> tuple[list[int], int]:
        """The tokens up to `end`, and their hash."""
        token_ids, prefix_hash = [], EMPTY_PREFIX_HASH
        for position in range(end):
            entry = self._pool[self._slot(part, position)]
            prefix_hash = extend_prefix_hash(prefix_hash, entry.token_id)
            if entry.prefix_hash != prefix_hash:
                raise AssertionError(f"position {position} holds the KV of another prefix")
            token_ids.append(entry.token_id)
        return token_ids, prefix_hash

    def _rows(self, part: SequenceSlice) -> list[list[float]]:
        end = part.start + len(part.token_ids)
        stored, _ = self._read(part, end)
        return [
            self.law(tuple(stored[: position + 1]))
            for position in range(end - part.num_logits, end)
        ]

    def _slot(self, part: SequenceSlice, position: int) -> int:
        block = part.block_table[position // self.kv.block_size]
        return block * self.kv.block_size + position % self.kv.block_size
