"""Laws of the block bookkeeping."""

from __future__ import annotations

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, consumes, invariant, rule

from engine.kv_cache import KVCacheManager, SequenceCache

NUM_BLOCKS = 12
BLOCK_SIZE = 4


class Conservation(RuleBasedStateMachine):
    """Over any operations every block is free or owned by one sequence, and counts add up."""

    caches = Bundle("caches")

    def __init__(self) -> None:
        super().__init__()
        self.kv = KVCacheManager(NUM_BLOCKS, BLOCK_SIZE)

    @rule(target=caches)
    def open(self) -> SequenceCache:
        return self.kv.open()

    @rule(cache=caches, n=st.integers(0, NUM_BLOCKS * BLOCK_SIZE + 1))
    def reserve(self, cache: SequenceCache, n: int) -> None:
        before = (list(cache.block_table), cache.num_pending, self.kv.num_free_blocks)
        num_spare = len(cache.block_table) * BLOCK_SIZE - cache.num_slots
        fits = n <= num_spare + self.kv.num_free_blocks * BLOCK_SIZE
        assert self.kv.reserve(cache, n) == fits
        if fits:
            assert cache.block_table[: len(before[0])] == before[0]
            assert cache.num_pending == before[1] + n
        else:
            assert (list(cache.block_table), cache.num_pending, self.kv.num_free_blocks) == before

    @rule(cache=caches, data=st.data())
    def commit(self, cache: SequenceCache, data: st.DataObject) -> None:
        n = data.draw(st.integers(0, cache.num_pending))
        expected = (list(cache.block_table), cache.num_committed + n, cache.num_pending - n)
        self.kv.commit(cache, n)
        assert (cache.block_table, cache.num_committed, cache.num_pending) == expected

    @rule(cache=caches, data=st.data())
    def rollback(self, cache: SequenceCache, data: st.DataObject) -> None:
        n = data.draw(st.integers(0, cache.num_pending))
        table, num_committed = list(cache.block_table), cache.num_committed
        self.kv.rollback(cache, n)
        assert cache.num_committed == num_committed
        assert cache.block_table == table[: len(cache.block_table)]

    @rule(cache=consumes(caches))
    def close(self, cache: SequenceCache) -> None:
        num_free = self.kv.num_free_blocks + len(cache.block_table)
        self.kv.close(cache)
        assert self.kv.num_free_blocks == num_free

    @invariant()
    def conserved(self) -> None:
        self.kv.check()
        assert self.kv.num_free_blocks + self.kv.num_used_blocks == NUM_BLOCKS


Conservation.TestCase.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)
TestConservation = Conservation.TestCase


def test_rejected_drafts_give_their_blocks_back() -> None:
    kv = KVCacheManager(num_blocks=4, block_size=4)
    cache = kv.open()
    assert kv.reserve(cache, 5)
    kv.commit(cache, 5)
    assert kv.reserve(cache, 8)
    assert kv.num_used_blocks == 4
    kv.commit(cache, 2)
    kv.rollback(cache, 6)
    assert (cache.num_committed, cache.num_pending, kv.num_used_blocks) == (7, 0, 2)
    kv.check()


def test_closing_twice_is_caught_and_frees_nothing_twice() -> None:
    kv = KVCacheManager(num_blocks=2, block_size=4)
    cache = kv.open()
    kv.reserve(cache, 4)
    kv.close(cache)
    with pytest.raises(AssertionError):
        kv.close(cache)
    kv.check()
    assert kv.num_free_blocks == 2


@pytest.mark.parametrize("operation", ["reserve", "commit", "rollback"])
def test_a_closed_sequence_takes_no_operation(operation: str) -> None:
    kv = KVCacheManager(num_blocks=2, block_size=4)
    cache = kv.open()
    kv.close(cache)
    with pytest.raises(AssertionError):
        getattr(kv, operation)(cache, 0)


@pytest.mark.parametrize("operation", ["commit", "rollback"])
def test_more_than_is_pending_is_caught(operation: str) -> None:
    kv = KVCacheManager(num_blocks=2, block_size=4)
    cache = kv.open()
    kv.reserve(cache, 3)
    with pytest.raises(AssertionError):
        getattr(kv, operation)(cache, 4)


def test_check_sees_a_block_owned_twice() -> None:
    kv = KVCacheManager(num_blocks=2, block_size=4)
    cache, thief = kv.open(), kv.open()
    kv.reserve(cache, 4)
    thief.block_table = list(cache.block_table)
    thief.num_pending = 4
    with pytest.raises(AssertionError):
        kv.check()
