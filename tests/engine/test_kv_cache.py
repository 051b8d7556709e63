"""Laws of the block bookkeeping, and of the prefix cache over it."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, consumes, rule

from engine import kv_cache
from engine.kv_cache import KVCacheManager, SequenceCache
from tests.support.modelled_pool import ModelledPool, PooledSequence, operate

NUM_BLOCKS = 12
BLOCK_SIZE = 4
some_ids = st.lists(st.integers(0, 1), max_size=3 * BLOCK_SIZE)


class Conservation(RuleBasedStateMachine):
    """Over any operations every block is free, idle or held by as many sequences as it counts, and
    nobody reads what another wrote behind other tokens."""

    sequences = Bundle("sequences")

    def __init__(self) -> None:
        super().__init__()
        self.pool = ModelledPool(NUM_BLOCKS, BLOCK_SIZE)

    @rule(target=sequences, token_ids=some_ids, salt=st.sampled_from(["", "a"]))
    def open(self, token_ids: list[int], salt: str) -> PooledSequence:
        return self.pool.open(token_ids, salt)

    @rule(sequence=sequences, token_ids=some_ids)
    def grow(self, sequence: PooledSequence, token_ids: list[int]) -> None:
        self.pool.grow(sequence, token_ids)

    @rule(sequence=sequences, data=st.data())
    def commit(self, sequence: PooledSequence, data: st.DataObject) -> None:
        self.pool.commit(sequence, data.draw(st.integers(0, sequence.cache.num_pending)))

    @rule(sequence=sequences, data=st.data())
    def rollback(self, sequence: PooledSequence, data: st.DataObject) -> None:
        self.pool.rollback(sequence, data.draw(st.integers(0, sequence.cache.num_pending)))

    @rule(sequence=consumes(sequences))
    def close(self, sequence: PooledSequence) -> None:
        self.pool.close(sequence)


Conservation.TestCase.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)
TestConservation = Conservation.TestCase


@pytest.mark.parametrize(
    ("num_blocks", "block_size", "prefix_cache"),
    [(40, 1, True), (25, 2, True), (12, 4, True), (60, 4, True), (25, 2, False)],
)
def test_ten_thousand_operations(num_blocks: int, block_size: int, prefix_cache: bool) -> None:
    pool = ModelledPool(num_blocks, block_size, prefix_cache=prefix_cache)
    operate(pool, random.Random(0), 10_000)
    assert (pool.num_shared > 100) == prefix_cache
    assert (pool.kv.num_evictions > 100) == prefix_cache
    for sequence in list(pool.open_sequences):
        pool.close(sequence)
    assert pool.kv.num_free_blocks == num_blocks


# --- the pool ------------------------------------------------------------------------------------


def test_rejected_drafts_give_their_blocks_back() -> None:
    kv = KVCacheManager(num_blocks=4, block_size=4)
    cache = kv.open()
    assert kv.reserve(cache, 5)
    kv.commit(cache, [1] * 5)
    assert kv.reserve(cache, 8)
    assert kv.num_used_blocks == 4
    kv.commit(cache, [1] * 2)
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


OPERATIONS: dict[str, Callable[[KVCacheManager, SequenceCache, int], object]] = {
    "reserve": lambda kv, cache, n: kv.reserve(cache, n),
    "commit": lambda kv, cache, n: kv.commit(cache, [1] * n),
    "rollback": lambda kv, cache, n: kv.rollback(cache, n),
}


@pytest.mark.parametrize("operation", OPERATIONS)
def test_a_closed_sequence_takes_no_operation(operation: str) -> None:
    kv = KVCacheManager(num_blocks=2, block_size=4)
    cache = kv.open()
    kv.close(cache)
    with pytest.raises(AssertionError):
        OPERATIONS[operation](kv, cache, 0)


@pytest.mark.parametrize("operation", ["commit", "rollback"])
def test_more_than_is_pending_is_caught(operation: str) -> None:
    kv = KVCacheManager(num_blocks=2, block_size=4)
    cache = kv.open()
    kv.reserve(cache, 3)
    with pytest.raises(AssertionError):
        OPERATIONS[operation](kv, cache, 4)


# --- the prefix cache ----------------------------------------------------------------------------


def say(pool: ModelledPool, token_ids: Sequence[int], salt: str = "") -> int:
    """Compute a whole sequence and close it; how many of its tokens were there already."""
    sequence = pool.open(token_ids, salt)
    num_hit = sequence.cache.num_committed
    assert pool.grow(sequence, token_ids[num_hit:])
    pool.commit(sequence, len(token_ids) - num_hit)
    pool.close(sequence)
    return num_hit


@pytest.mark.parametrize(
    ("num_tokens", "num_hit"), [(3, 0), (4, 0), (5, 4), (8, 4), (9, 8), (15, 12)]
)
def test_a_prompt_again_is_computed_from_its_last_block_on(num_tokens: int, num_hit: int) -> None:
    """At least one token is left, since its logits are wanted."""
    pool = ModelledPool(NUM_BLOCKS, BLOCK_SIZE)
    prompt = list(range(num_tokens))
    assert say(pool, prompt) == 0
    assert say(pool, prompt) == num_hit
    assert (pool.kv.num_queried_tokens, pool.kv.num_hit_tokens) == (2 * num_tokens, num_hit)


def test_the_next_turn_finds_the_answer_to_the_last() -> None:
    pool = ModelledPool(NUM_BLOCKS, BLOCK_SIZE)
    asked = pool.open([1, 2, 3])
    pool.grow(asked, [1, 2, 3])
    pool.commit(asked, 3)
    for token_id in range(10, 20):
        pool.grow(asked, [token_id])
        pool.commit(asked, 1)
    said = list(asked.token_ids)
    pool.close(asked)
    assert pool.open([*said, 5, 6, 7, 8]).cache.num_committed == 12


def test_sequences_that_run_share_what_is_committed() -> None:
    pool = ModelledPool(NUM_BLOCKS, BLOCK_SIZE)
    first = pool.open([1] * 9)
    pool.grow(first, [1] * 9)
    assert pool.open([1] * 9).cache.num_committed == 0, "nothing of it is final"
    pool.commit(first, 7)
    second = pool.open([1] * 9)
    assert second.cache.block_table == first.cache.block_table[:1]
    num_used = pool.kv.num_used_blocks
    pool.close(first)
    assert pool.kv.num_used_blocks == num_used - 2
    assert pool.grow(second, [2] * 9)


def test_what_was_rolled_back_is_never_found() -> None:
    pool = ModelledPool(NUM_BLOCKS, BLOCK_SIZE)
    sequence = pool.open([1] * 5)
    pool.grow(sequence, [1] * 5)
    pool.commit(sequence, 5)
    pool.grow(sequence, [2] * 7)
    pool.rollback(sequence, 7)
    pool.grow(sequence, [3] * 3)
    pool.commit(sequence, 3)
    pool.close(sequence)
    assert not pool.kv.find([1, 1, 1, 1, 1, 2, 2, 2, 2]).blocks[1:]
    assert len(pool.kv.find([1, 1, 1, 1, 1, 3, 3, 3, 3]).blocks) == 2


def test_what_a_sequence_had_pending_when_it_was_closed_is_never_found() -> None:
    pool = ModelledPool(NUM_BLOCKS, BLOCK_SIZE)
    sequence = pool.open([1] * 9)
    pool.grow(sequence, [1] * 9)
    pool.close(sequence)
    assert say(pool, [1] * 9) == 0


def test_other_salts_share_nothing() -> None:
    pool = ModelledPool(NUM_BLOCKS, BLOCK_SIZE)
    prompt = [1] * 9
    assert [say(pool, prompt, salt) for salt in ("", "a", "b", "a", "", "ä")] == [0, 0, 0, 8, 8, 0]


def test_what_was_left_longest_ago_gives_way_first() -> None:
    pool = ModelledPool(4, BLOCK_SIZE)
    old, new = [1] * 5, [2] * 5
    say(pool, old)
    say(pool, new)
    assert say(pool, old) == 4, "used again, so it is the newer now"
    say(pool, [3] * 12)
    assert pool.kv.num_evictions == 1
    assert not pool.kv.find(new).blocks
    assert pool.kv.find(old).blocks


def test_a_prefix_outlives_what_follows_it() -> None:
    pool = ModelledPool(5, BLOCK_SIZE)
    say(pool, [1] * 17)
    for num_evicted in (1, 2, 3, 4):
        sequence = pool.open([])
        pool.grow(sequence, [2] * 4 * (num_evicted + 1))
        assert len(pool.kv.find([1] * 17).blocks) == 4 - num_evicted
        pool.close(sequence)


def test_idle_blocks_count_as_free_until_they_are_held() -> None:
    pool = ModelledPool(4, BLOCK_SIZE)
    say(pool, [1] * 12)
    assert pool.kv.num_free_blocks == 4
    prefix = pool.kv.find([1] * 12)
    assert (len(prefix.blocks), prefix.num_idle_blocks) == (2, 2)
    first = pool.open([1] * 12)
    assert pool.kv.num_free_blocks == 2
    assert pool.kv.find([1] * 12).num_idle_blocks == 0
    assert not pool.grow(first, [2] * 9), "what it shares cannot be taken"
    assert pool.grow(first, [2] * 8)


def test_names_tell_any_two_prefixes_apart() -> None:
    """Blocks, their order, their borders, and the salt."""
    names = {
        kv_cache._block_name(kv_cache._block_name(kv_cache._root_name(salt), first), second)
        for salt in ("", "a", "1")
        for first in ((1, 2), (2, 1), (1, 1), (256, 0), (0, 1))
        for second in ((1, 2), (2, 1), (1, 1), (256, 0), (0, 1))
    }
    assert len(names) == 75
    assert all(len(name) == 32 for name in names)


# --- the checks see what they are for -------------------------------------------------------------


def full(kv: KVCacheManager, num_tokens: int) -> SequenceCache:
    cache = kv.open()
    kv.reserve(cache, num_tokens)
    kv.commit(cache, [1] * num_tokens)
    return cache


def test_check_sees_a_block_held_by_one_that_does_not_count() -> None:
    kv = KVCacheManager(num_blocks=4, block_size=4)
    cache, thief = full(kv, 4), kv.open()
    kv.check()
    thief.block_table = list(cache.block_table)
    thief.num_committed = 4
    with pytest.raises(AssertionError):
        kv.check()


def test_check_sees_a_shared_block_that_is_still_written() -> None:
    kv = KVCacheManager(num_blocks=4, block_size=4)
    full(kv, 9)
    other = kv.open(kv.find([1] * 9))
    kv.check()
    other.num_committed, other.num_pending = 6, 2
    other.unnamed_ids = [1, 1]
    with pytest.raises(AssertionError):
        kv.check()


def test_check_sees_a_block_that_is_lost() -> None:
    kv = KVCacheManager(num_blocks=4, block_size=4)
    kv.close(full(kv, 9))
    kv.check()
    kv._idle.popitem()
    with pytest.raises(AssertionError):
        kv.check()


@pytest.mark.parametrize(
    "bad_name",
    [
        lambda prefix_name, token_ids: bytes(token_ids),
        lambda prefix_name, token_ids: prefix_name + bytes(token_ids[:-1]),
        lambda prefix_name, token_ids: prefix_name[32:] + bytes(token_ids),
    ],
    ids=["without the prefix", "without a token", "without the salt"],
)
def test_the_model_sees_names_that_leave_something_out(
    bad_name: Callable[[bytes, Sequence[int]], bytes], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(kv_cache, "_block_name", bad_name)
    with pytest.raises(AssertionError):
        operate(ModelledPool(25, 2), random.Random(0), 1_000)
