"""Bookkeeping of the paged KV cache: which blocks belong to which sequences. Knows no tensors.

A block holds the keys and values of `block_size` consecutive tokens. A slot is one token's place:
slot = block * block_size + offset.

What a slot holds depends on its token and on all tokens before it, and on nothing else. So a block
that is full and final is named by a hash of all tokens up to its end, and any sequence that begins
with the same tokens may read it. Names start from a salt: tenants with different salts share
nothing, and cannot learn from the time an answer takes what others asked.
"""

from __future__ import annotations

import hashlib
from array import array
from collections import Counter, OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass, field

_NAME_BYTES = 32
"""So wide that nobody finds two prefixes of one name, and reads another's KV by it."""


@dataclass(eq=False, slots=True)
class SequenceCache:
    """The blocks of one sequence. Only the manager changes it."""

    block_table: list[int] = field(default_factory=list)
    """Block ids in the order of the sequence's tokens."""
    num_committed: int = 0
    """Tokens whose keys and values are final."""
    num_pending: int = 0
    """Slots after those, reserved or written, not final yet."""
    prefix_name: bytes = b""
    """Of the committed tokens in full blocks; what the names of further blocks are made from."""
    unnamed_ids: list[int] = field(default_factory=list)
    """The committed tokens after those."""

    @property
    def num_slots(self) -> int:
        return self.num_committed + self.num_pending


@dataclass(frozen=True, slots=True)
class CachedPrefix:
    """What the pool already holds of a sequence. True until the pool changes."""

    name: bytes
    """Of the tokens in `blocks`."""
    blocks: tuple[int, ...] = ()
    num_idle_blocks: int = 0
    """Those of the blocks that no sequence holds: they count as free until they are taken."""
    num_queried_tokens: int = 0
    """Tokens that were looked up."""


class KVCacheManager:
    """A pool of blocks. Every block is free, or held by one or more open sequences, or idle: held
    by none, but full, named and kept for the next sequence that begins with its tokens. Idle blocks
    count as free: when the free ones run out, those that were left longest ago are taken."""

    def __init__(self, num_blocks: int, block_size: int, *, prefix_cache: bool = True) -> None:
        """Without `prefix_cache` no block is ever shared or kept."""
        self.num_blocks = num_blocks
        self.block_size = block_size
        self.num_queried_tokens = 0
        """Tokens of all sequences, as they were opened."""
        self.num_hit_tokens = 0
        """Of those, what was found in the pool."""
        self.num_evictions = 0
        """Blocks whose content gave way to another."""
        self._prefix_cache = prefix_cache
        self._free = list(reversed(range(num_blocks)))
        self._idle: OrderedDict[int, None] = OrderedDict()
        """Those left longest ago first."""
        self._num_holders = [0] * num_blocks
        self._named: dict[bytes, int] = {}
        self._names: dict[int, bytes] = {}
        """The inverse of `_named`."""
        self._open: set[SequenceCache] = set()

    @property
    def num_slots(self) -> int:
        """Tokens that the whole pool holds."""
        return self.num_blocks * self.block_size

    @property
    def num_free_blocks(self) -> int:
        return len(self._free) + len(self._idle)

    @property
    def num_used_blocks(self) -> int:
        return self.num_blocks - self.num_free_blocks

    def find(self, token_ids: Sequence[int], salt: str = "") -> CachedPrefix:
        """The longest run of blocks that a sequence of these tokens may begin with. Never all its
        tokens: the last one is left to compute, since its logits are wanted."""
        name = _root_name(salt)
        if not self._prefix_cache:
            return CachedPrefix(name)
        blocks: list[int] = []
        for start in range(0, len(token_ids) - self.block_size, self.block_size):
            next_name = _block_name(name, token_ids[start : start + self.block_size])
            if (block := self._named.get(next_name)) is None:
                break
            blocks.append(block)
            name = next_name
        num_idle = sum(block in self._idle for block in blocks)
        return CachedPrefix(name, tuple(blocks), num_idle, len(token_ids))

    def open(self, prefix: CachedPrefix | None = None) -> SequenceCache:
        """A new sequence, whose first tokens are those of `prefix` and committed."""
        prefix = prefix or self.find(())
        cache = SequenceCache(prefix_name=prefix.name)
        self._open.add(cache)
        for block in prefix.blocks:
            self._hold(block)
        cache.block_table += prefix.blocks
        cache.num_committed = len(prefix.blocks) * self.block_size
        self.num_queried_tokens += prefix.num_queried_tokens
        self.num_hit_tokens += cache.num_committed
        return cache

    def reserve(self, cache: SequenceCache, n: int) -> bool:
        """Add n pending slots, all or nothing; False if the pool has too few free blocks."""
        self._assert_open(cache)
        assert n >= 0
        num_missing = self._blocks_for(cache.num_slots + n) - len(cache.block_table)
        if num_missing > self.num_free_blocks:
            return False
        cache.block_table += [self._take() for _ in range(num_missing)]
        cache.num_pending += n
        return True

    def commit(self, cache: SequenceCache, token_ids: Sequence[int]) -> None:
        """The oldest pending slots are final, and hold these tokens."""
        self._assert_open(cache)
        assert len(token_ids) <= cache.num_pending
        cache.num_pending -= len(token_ids)
        cache.num_committed += len(token_ids)
        if self._prefix_cache:
            cache.unnamed_ids += token_ids
            self._name_full_blocks(cache)

    def rollback(self, cache: SequenceCache, n: int) -> None:
        """Drop the n newest pending slots; blocks that this empties go back to the pool."""
        self._assert_open(cache)
        assert 0 <= n <= cache.num_pending
        if n == 0:
            return
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
        cache.unnamed_ids.clear()
        cache.num_committed = cache.num_pending = 0

    def check(self) -> None:
        """Assert the conservation law over all blocks."""
        holders = Counter(block for cache in self._open for block in cache.block_table)
        assert [holders[block] for block in range(self.num_blocks)] == self._num_holders
        assert sorted([*self._free, *self._idle, *holders]) == list(range(self.num_blocks))
        assert {name: block for block, name in self._names.items()} == self._named
        assert self._names.keys() >= self._idle.keys()
        assert self._names.keys().isdisjoint(self._free)
        for cache in self._open:
            self._check_open(cache)

    def _check_open(self, cache: SequenceCache) -> None:
        assert cache.num_committed >= 0
        assert cache.num_pending >= 0
        assert len(cache.block_table) == self._blocks_for(cache.num_slots)
        num_full = cache.num_committed // self.block_size
        # Only these are still written, so nobody else may read them.
        for block in cache.block_table[num_full:]:
            assert self._num_holders[block] == 1
            assert block not in self._names
        if self._prefix_cache:
            assert len(cache.unnamed_ids) == cache.num_committed - num_full * self.block_size

    def _name_full_blocks(self, cache: SequenceCache) -> None:
        while len(cache.unnamed_ids) >= self.block_size:
            index = (cache.num_committed - len(cache.unnamed_ids)) // self.block_size
            block_ids = cache.unnamed_ids[: self.block_size]
            del cache.unnamed_ids[: self.block_size]
            cache.prefix_name = _block_name(cache.prefix_name, block_ids)
            # Of two sequences that computed the same block at once, the first gives its own.
            if cache.prefix_name not in self._named:
                self._named[cache.prefix_name] = cache.block_table[index]
                self._names[cache.block_table[index]] = cache.prefix_name

    def _take(self) -> int:
        """A block for new content, held once."""
        if self._free:
            block = self._free.pop()
        else:
            block, _ = self._idle.popitem(last=False)
            del self._named[self._names.pop(block)]
            self.num_evictions += 1
        self._num_holders[block] = 1
        return block

    def _hold(self, block: int) -> None:
        """Once more, for what it holds."""
        self._idle.pop(block, None)
        self._num_holders[block] += 1

    def _release(self, blocks: list[int]) -> None:
        # The last first: a prefix is of use without what follows it, and not the other way round.
        for block in reversed(blocks):
            self._num_holders[block] -= 1
            if self._num_holders[block]:
                continue
            if block in self._names:
                self._idle[block] = None
            else:
                self._free.append(block)

    def _blocks_for(self, num_tokens: int) -> int:
        return -(-num_tokens // self.block_size)

    def _assert_open(self, cache: SequenceCache) -> None:
        assert cache in self._open, "this sequence is closed, or belongs to another pool"


def _root_name(salt: str) -> bytes:
    """Of no tokens at all."""
    return hashlib.blake2b(salt.encode(), digest_size=_NAME_BYTES, person=b"paceline-salt").digest()


def _block_name(prefix_name: bytes, token_ids: Sequence[int]) -> bytes:
    """Of a block of these tokens after a prefix."""
    content = prefix_name + array("I", token_ids).tobytes()
    return hashlib.blake2b(content, digest_size=_NAME_BYTES, person=b"paceline-block").digest()
