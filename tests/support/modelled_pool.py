"""A KV pool beside a model of it that is simple enough to be believed.

The model keeps what is written in every slot: its token and all tokens before it, as real keys and
values depend on them. After each operation every open sequence must find its own tokens in its
slots, and what the pool offers to a new sequence must be exactly what is there of it.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass

from engine.kv_cache import KVCacheManager, SequenceCache

Content = tuple[str, tuple[int, ...]]
"""Salt, and the tokens up to and with the one that is stored."""


@dataclass(eq=False)
class PooledSequence:
    """An open sequence: its cache, and the tokens in its slots."""

    cache: SequenceCache
    salt: str
    token_ids: list[int]

    def content(self, end: int) -> Content:
        return self.salt, tuple(self.token_ids[:end])


class ModelledPool:
    """Every operation checks itself, and all blocks after it."""

    def __init__(self, num_blocks: int, block_size: int, *, prefix_cache: bool = True) -> None:
        self.kv = KVCacheManager(num_blocks, block_size, prefix_cache=prefix_cache)
        self.open_sequences: list[PooledSequence] = []
        self.num_shared = 0
        """Blocks that a sequence read and another had written."""
        self._prefix_cache = prefix_cache
        self._slots: dict[int, Content] = {}
        self._cached: dict[Content, int] = {}
        """By the tokens up to its end: the block that may be shared."""

    def open(self, token_ids: Sequence[int], salt: str = "") -> PooledSequence:
        """A sequence that is to hold these tokens; it begins with what is cached of them."""
        prefix = self.kv.find(token_ids, salt)
        assert list(prefix.blocks) == self._expected_blocks(token_ids, salt)
        counts = self.kv.num_queried_tokens, self.kv.num_hit_tokens
        num_free = self.kv.num_free_blocks - prefix.num_idle_blocks
        cache = self.kv.open(prefix)
        num_hit = len(prefix.blocks) * self.kv.block_size
        assert (cache.num_committed, cache.num_pending) == (num_hit, 0)
        assert num_hit < max(1, len(token_ids))
        assert self.kv.num_free_blocks == num_free
        num_queried = len(token_ids) if self._prefix_cache else 0
        assert self.kv.num_queried_tokens == counts[0] + num_queried
        assert self.kv.num_hit_tokens == counts[1] + num_hit
        self.num_shared += len(prefix.blocks)
        sequence = PooledSequence(cache, salt, list(token_ids[:num_hit]))
        self.open_sequences.append(sequence)
        self.check()
        return sequence

    def grow(self, sequence: PooledSequence, token_ids: Sequence[int]) -> bool:
        """Reserve slots for these tokens and write them there."""
        cache, kv = sequence.cache, self.kv
        table, num_pending, num_free = (
            list(cache.block_table),
            cache.num_pending,
            kv.num_free_blocks,
        )
        num_spare = len(table) * kv.block_size - cache.num_slots
        fits = len(token_ids) <= num_spare + num_free * kv.block_size
        assert kv.reserve(cache, len(token_ids)) == fits
        assert cache.block_table[: len(table)] == table
        if not fits:
            assert (cache.block_table, cache.num_pending) == (table, num_pending)
            assert kv.num_free_blocks == num_free
            return False
        taken = cache.block_table[len(table) :]
        self._cached = {c: block for c, block in self._cached.items() if block not in taken}
        for token_id in token_ids:
            sequence.token_ids.append(token_id)
            position = len(sequence.token_ids) - 1
            self._slots[self._slot(sequence, position)] = sequence.content(position + 1)
        self.check()
        return True

    def commit(self, sequence: PooledSequence, n: int) -> None:
        cache = sequence.cache
        start, table = cache.num_committed, list(cache.block_table)
        expected = table, start + n, cache.num_pending - n
        self.kv.commit(cache, sequence.token_ids[start : start + n])
        assert (cache.block_table, cache.num_committed, cache.num_pending) == expected
        size = self.kv.block_size
        for index in range(start // size, (start + n) // size):
            if self._prefix_cache:
                self._cached.setdefault(sequence.content((index + 1) * size), table[index])
        self.check()

    def rollback(self, sequence: PooledSequence, n: int) -> None:
        cache = sequence.cache
        num_committed, table = cache.num_committed, list(cache.block_table)
        self.kv.rollback(cache, n)
        assert cache.num_committed == num_committed
        assert cache.block_table == table[: len(cache.block_table)]
        del sequence.token_ids[cache.num_slots :]
        self.check()

    def close(self, sequence: PooledSequence) -> None:
        self.open_sequences.remove(sequence)
        still_held = {b for other in self.open_sequences for b in other.cache.block_table}
        num_freed = len(set(sequence.cache.block_table) - still_held)
        num_free = self.kv.num_free_blocks
        self.kv.close(sequence.cache)
        assert self.kv.num_free_blocks == num_free + num_freed
        self.check()

    def check(self) -> None:
        """The manager's own law, and: every sequence finds in its slots what it put there."""
        self.kv.check()
        assert self.kv.num_free_blocks + self.kv.num_used_blocks == self.kv.num_blocks
        for sequence in self.open_sequences:
            assert sequence.cache.num_slots == len(sequence.token_ids)
            for position in range(len(sequence.token_ids)):
                stored = self._slots[self._slot(sequence, position)]
                assert stored == sequence.content(position + 1), "another's KV"

    def _expected_blocks(self, token_ids: Sequence[int], salt: str) -> list[int]:
        blocks = []
        for end in range(self.kv.block_size, len(token_ids), self.kv.block_size):
            block = self._cached.get((salt, tuple(token_ids[:end])))
            if block is None:
                break
            blocks.append(block)
        return blocks

    def _slot(self, sequence: PooledSequence, position: int) -> int:
        block = sequence.cache.block_table[position // self.kv.block_size]
        return block * self.kv.block_size + position % self.kv.block_size


def operate(pool: ModelledPool, rng: random.Random, num_operations: int) -> None:
    """Random operations as the engine does them; conversations go on, so that much is shared."""
    said: list[tuple[str, list[int]]] = [("", [])]
    most_open = 1 + pool.kv.num_slots // 20
    for _ in range(num_operations):
        sequence = rng.choice(pool.open_sequences) if pool.open_sequences else None
        is_full = len(pool.open_sequences) >= most_open
        turnover = "close" if is_full else rng.choice(["open", "close"])
        operation = rng.choice([turnover, "grow", "grow", "commit", "commit", "rollback"])
        if sequence is None or operation == "open":
            salt, token_ids = rng.choice(said[-12:])
            if rng.random() < 0.2:
                salt = rng.choice(["", "a", "b"])
            kept = token_ids[: rng.randint(0, len(token_ids))]
            pool.open([*kept, *rng.choices(range(2), k=rng.randint(0, 9))], salt)
        elif operation == "grow":
            pool.grow(sequence, rng.choices(range(2), k=rng.randint(0, 9)))
        elif operation == "commit":
            pool.commit(sequence, rng.randint(0, sequence.cache.num_pending))
        elif operation == "rollback":
            pool.rollback(sequence, rng.randint(0, sequence.cache.num_pending))
        else:
            said.append((sequence.salt, list(sequence.token_ids)))
            pool.close(sequence)
