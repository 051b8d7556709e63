"""Bookkeeping of the paged KV cache: which blocks belong to which sequence. Knows no tensors.

A block holds the keys and values of `block_size` consecutive tokens of one sequence. A slot is one
token's place: slot = block * block_size + offset.
"""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass(eq=False, slots=True)
class SequenceCache:
    """The blocks of one sequence. Only the manager changes it."""

    block_table: list[int] = field(default_factory=list)
    """Block ids in the order of the sequence's tokens."""
    num_committed: int = 0
    """Tokens whose keys and values are final."""
    num_pending: int = 0
    """Slots after those, reserved or written, not final yet."""

    @property
    def num_slots(self) -> int:
        return self.num_committed + self.num_pending


class KVCacheManager:
    """A pool of blocks. Every block is free or owned by exactly one open sequence."""

    def __init__(self, num_blocks: int, block_size: int) -> None:
        self.num_blocks = num_blocks
        self.block_size = block_size
        self._free = list(reversed(range(num_blocks)))
        self._open: set[SequenceCache] = set()

    @property
    def num_slots(self) -> int:
        """Tokens that the whole pool holds."""
        return self.num_blocks * self.block_size

    @property
    def num_free_blocks(self) -> int:
        return len(self._free)

    @property
    def num_used_blocks(self) -> int:
        return self.num_blocks - len(self._free)

    def open(self) -> SequenceCache:
        """A new sequence without blocks."""
        cache = SequenceCache()
        self._open.add(cache)
        return cache

    def reserve(self, cache: SequenceCache, n: int) -> bool:
        """Add n pending slots, all or nothing; False if the pool has too few free blocks."""
        self._assert_open(cache)
        assert n >= 0
        num_missing = self._blocks_for(cache.num_slots + n) - len(cache.block_table)
        if num_missing > len(self._free):
            return False
        cache.block_table += [self._free.pop() for _ in range(num_missing)]
        cache.num_pending += n
        return True

    def commit(self, cache: SequenceCache, n: int) -> None:
        """The n oldest pending slots are final."""
        self._assert_open(cache)
        assert 0 <= n <= cache.num_pending
        cache.num_pending -= n
        cache.num_committed += n

    def rollback(self, cache: SequenceCache, n: int) -> None:
        """Drop the n newest pending slots; blocks that this empties go back to the pool."""
        self._assert_open(cache)
        assert 0 <= n <= cache.num_pending
        cache.num_pending -= n
        num_kept = self._blocks_for(cache.num_slots)
        self._release(cache.block_table[num_kept:])
        del cache.block_table[num_kept:]

    def close(self, cache: SequenceCache) -> None:
        """Give all blocks back. Closing twice is a bug and changes nothing."""
        self._assert_open(cache)
        self._open.remove(cache)
        self._release(cache.block_table)
        cache.block_table.clear()
        cache.num_committed = cache.num_pending = 0

    def check(self) -> None:
        """Assert the conservation law over all blocks."""
        owned = [block for cache in self._open for block in cache.block_table]
        assert sorted(owned + self._free) == list(range(self.num_blocks))
        for cache in self._open:
            assert cache.num_committed >= 0
            assert cache.num_pending >= 0
            assert len(cache.block_table) == self._blocks_for(cache.num_slots)

    def _blocks_for(self, num_tokens: int) -> int:
        return -(-num_tokens // self.block_size)

    def _release(self, blocks: list[int]) -> None:
        self._free += reversed(blocks)

    def _assert_open(self, cache: SequenceCache) -> None:
        assert cache in self._open, "this sequence is closed, or belongs to another pool"
