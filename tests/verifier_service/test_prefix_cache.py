"""Reuse of KV between requests changes no token, and saves what it can.

The scripted target reads every prefix from the pool by block table, and refuses what was written
behind other tokens; so a wrong block that is served fails its request.
"""

from __future__ import annotations

import random

import pytest

from cluster.config import SchedulerConfig
from cluster.types import Path, SamplingParams
from engine import kv_cache
from tests.support.engine_driver import GREEDY, EngineDriver, flaky_drafter, oracle_drafter
from tests.support.reference import decode
from tests.support.scripted_target import VOCAB_SIZE, ScriptedRunner, hashed_law

SAMPLINGS = [GREEDY, SamplingParams(temperature=0.5), SamplingParams(temperature=1.0, top_p=0.9)]
LAW = hashed_law()
BLOCK_SIZE = 4


class Conversations:
    """Requests that go on from one another's answers, from the same beginnings, under some salts.

    Made with one seed they are the same, whatever the engine does with them in between.
    """

    def __init__(self, seed, law, longest):
        self.rng, self.law, self.longest = random.Random(seed), law, longest
        self.beginnings = [self.words(longest // 4) for _ in range(2)]
        self.said = []

    def words(self, most):
        return [self.rng.randrange(3, VOCAB_SIZE) for _ in range(self.rng.randint(1, most))]

    def next(self):
        """The next request's fields, and its only right answer."""
        begun = self.rng.choice([*self.beginnings, *self.said[-3:]])
        fields = {
            "prompt": [*begun, *self.words(6)][: self.longest],
            "max_tokens": self.rng.randint(1, 12),
            "sampling": self.rng.choice(SAMPLINGS),
            "request_key": self.rng.getrandbits(64),
        }
        answer = decode(self.law, **fields)
        self.said.append([*fields["prompt"], *answer])
        return {**fields, "cache_salt": self.rng.choice(["", "", "a"])}, answer


def converse(seed, *, prefix_cache=True, num_requests=25):
    """Serve conversations in a tight pool, in chunks, with drafts, preempting now and then.
    Returns the driver, the expected answers, and how often a sequence was forced out."""
    rng, law = random.Random(seed), hashed_law(salt=str(seed))
    runner = ScriptedRunner(
        law,
        num_blocks=rng.choice([20, 30, 90]),
        block_size=rng.choice([1, 2, 4]),
        prefix_cache=prefix_cache,
    )
    driver = EngineDriver(
        runner,
        drafter=flaky_drafter(rng, law),
        scheduler=SchedulerConfig(
            max_running_sequences=rng.choice([2, 8]),
            max_step_tokens=rng.choice([3, 16, 64]),
            max_prefill_chunk_tokens=rng.choice([1, 3, 7, 64]),
        ),
    )
    conversations = Conversations(seed, law, runner.kv.num_slots - 12)
    expected, num_forced = {}, 0
    while len(expected) < num_requests or not all(r.ended for r in driver.results.values()):
        if len(expected) < num_requests and rng.random() < 0.3:
            fields, answer = conversations.next()
            expected[driver.submit(path=rng.choice(list(Path)), **fields)] = answer
        if rng.random() < 0.1 and driver.engine._scheduler.running:
            driver.engine._scheduler._preempt_newest()
            num_forced += 1
        driver.step()
        check_names(driver)
    return driver, expected, num_forced


def check_names(driver):
    """What is cached of a running sequence is named by its own tokens: a wrong name is no error
    until someone asks for just those wrong tokens."""
    size = driver.runner.kv.block_size
    for sequence in driver.engine._scheduler.running if driver.runner.kv._prefix_cache else ():
        name = kv_cache._root_name(sequence.request.cache_salt)
        for end in range(size, sequence.num_computed_tokens + 1, size):
            name = kv_cache._block_name(name, sequence.token_ids[end - size : end])
        assert sequence.cache.prefix_name == name


@pytest.mark.parametrize("seed", range(16))
def test_the_cache_changes_no_token(seed):
    """G and I: shared beginnings, chunks, drafts, evictions, preemption at any step."""
    driver, expected, num_forced = converse(seed)
    kv = driver.runner.kv
    assert {seq: result.error for seq, result in driver.results.items() if result.error} == {}
    assert {seq: result.token_ids for seq, result in driver.results.items()} == expected
    assert kv.num_hit_tokens > 0
    assert num_forced > 0
    assert kv.num_used_blocks == 0


@pytest.mark.parametrize("seed", range(4))
def test_nor_does_its_absence(seed):
    driver, expected, _ = converse(seed, prefix_cache=False, num_requests=12)
    assert {seq: result.token_ids for seq, result in driver.results.items()} == expected
    kv = driver.runner.kv
    assert (kv.num_queried_tokens, kv.num_hit_tokens, kv.num_evictions) == (0, 0, 0)


def test_a_wrong_block_would_be_seen(monkeypatch):
    """The same test, over names that leave out what came before a block."""
    monkeypatch.setattr(kv_cache, "_block_name", lambda prefix_name, token_ids: bytes(token_ids))
    drivers = [converse(seed)[0] for seed in range(4)]
    errors = [r.error for driver in drivers for r in driver.results.values() if r.error]
    assert errors
    assert all("another prefix" in error.message for error in errors)


# --- what it saves -------------------------------------------------------------------------------


def make_driver(*, drafter=None, scheduler=None, **runner):
    settings = {"num_blocks": 64, "block_size": BLOCK_SIZE, "max_model_len": 400, **runner}
    return EngineDriver(ScriptedRunner(LAW, **settings), drafter=drafter, scheduler=scheduler)


def serve(driver, prompt, max_tokens=6, **fields):
    """One request to its end: (its answer, tokens fed, prompt tokens that it says were cached)."""
    before = driver.runner.num_fed
    seq = driver.submit(prompt, max_tokens=max_tokens, ignore_eos=True, **fields)
    result = driver.run()[seq]
    assert result.error is None
    cached = [event.num_cached_prompt_tokens for event in result.events]
    assert not any(cached[1:]), "told once"
    return result.token_ids, driver.runner.num_fed - before, cached[0]


@pytest.mark.parametrize(("num_tokens", "num_cached"), [(3, 0), (4, 0), (5, 4), (8, 4), (21, 20)])
def test_a_prompt_again_is_fed_from_its_last_block_on(num_tokens, num_cached):
    driver, prompt = make_driver(), list(range(3, 3 + num_tokens))
    first, num_fed, none_cached = serve(driver, prompt, path=Path.PLAIN)
    assert (num_fed, none_cached) == (num_tokens + 5, 0)
    assert serve(driver, prompt, path=Path.PLAIN) == (first, num_fed - num_cached, num_cached)
    load = driver.engine.load()
    assert load.prefix_cache_query_tokens == 2 * num_tokens
    assert load.prefix_cache_hit_tokens == num_cached


@pytest.mark.parametrize("path", Path)
def test_every_turn_finds_all_turns_before_it(path):
    """G3: with drafts as without."""
    driver = make_driver(drafter=oracle_drafter(LAW, GREEDY, 1, depth=4), num_blocks=200)
    history = [3, 4, 5]
    for turn in range(10):
        asked = [*history, 6 + turn, 7, 8]
        answer, _, num_cached = serve(driver, asked, max_tokens=9, path=path)
        # Of an answer's last token no KV is computed.
        assert num_cached == (len(history) - 1) // BLOCK_SIZE * BLOCK_SIZE
        history = [*asked, *answer]


def test_a_drafter_fares_as_well_behind_a_cached_prompt():
    """G2."""
    driver = make_driver(drafter=oracle_drafter(LAW, GREEDY, 1, depth=4))
    prompt = list(range(3, 30))
    for _ in range(2):
        serve(driver, prompt, max_tokens=21)
    cold, warm = (result.finish.stats for result in driver.results.values())
    assert warm == cold
    assert warm.num_accepted_tokens == warm.num_draft_tokens > 10


def test_only_drafts_that_were_accepted_are_cached():
    """G7: the draft is wrong from its third token on; the block that begins there is found with
    the right tokens only."""
    prompt = [3] * 6
    answer = decode(LAW, prompt, max_tokens=9, sampling=GREEDY, request_key=1)
    wrong = [*answer[:2], *[9] * 6]
    driver = make_driver(drafter=lambda committed, request: wrong if len(committed) == 6 else [])
    serve(driver, prompt, max_tokens=9)
    stats = driver.results[1].finish.stats
    assert (stats.num_draft_tokens, stats.num_accepted_tokens) == (7, 1)
    found = [driver.runner.kv.find([*prompt, *ids, 3, 3]).blocks for ids in (answer, wrong)]
    assert [len(blocks) for blocks in found] == [3, 2]


def test_tenants_with_other_salts_share_nothing():
    driver, prompt = make_driver(), list(range(3, 20))
    cached = [serve(driver, prompt, cache_salt=salt)[2] for salt in ("", "a", "b", "a", "")]
    assert cached == [0, 0, 0, 16, 16]


def test_choices_of_one_prompt_that_come_at_once_are_right_and_later_ones_share():
    driver = make_driver(scheduler=SchedulerConfig(max_running_sequences=2))
    prompt = list(range(3, 20))
    fields = {"max_tokens": 8, "sampling": SamplingParams(temperature=1.0), "ignore_eos": True}
    seqs = [driver.submit(prompt, request_key=key, **fields) for key in range(4)]
    results = driver.run()
    for key, seq in enumerate(seqs):
        expected = decode(
            LAW, prompt, max_tokens=8, sampling=fields["sampling"], request_key=key,
            stop_ids=frozenset(),
        )  # fmt: skip
        assert results[seq].token_ids == expected
    cached = [results[seq].events[0].num_cached_prompt_tokens for seq in seqs]
    assert cached == [0, 0, 16, 16]


# --- room ----------------------------------------------------------------------------------------


def test_a_preempted_sequence_finds_its_own_blocks_again():
    driver = make_driver()
    seq = driver.submit(list(range(3, 24)), max_tokens=10, ignore_eos=True, path=Path.PLAIN)
    for _ in range(5):
        driver.step()
    num_tokens = 21 + len(driver.results[seq].token_ids)
    before = driver.runner.num_fed
    driver.engine._scheduler._preempt_newest()
    driver.step()
    assert (
        driver.runner.num_fed - before == num_tokens - (num_tokens - 1) // BLOCK_SIZE * BLOCK_SIZE
    )
    result = driver.run()[seq]
    assert result.token_ids == decode(
        LAW, range(3, 24), max_tokens=10, sampling=GREEDY, request_key=1, stop_ids=frozenset()
    )
    assert result.events[0].num_cached_prompt_tokens == 0, "what it had computed itself"


def test_what_a_preempted_prompt_had_computed_itself_is_not_told_as_cached():
    driver = make_driver(scheduler=SchedulerConfig(max_prefill_chunk_tokens=8))
    seq = driver.submit(list(range(3, 24)), max_tokens=3, ignore_eos=True)
    driver.step()
    driver.engine._scheduler._preempt_newest()
    assert driver.run()[seq].events[0].num_cached_prompt_tokens == 0
    assert driver.runner.kv.num_hit_tokens == 8


def test_a_full_cache_is_room_for_what_fills_the_pool():
    """Blocks that nobody holds neither refuse, delay nor preempt anyone."""
    driver = make_driver(num_blocks=10)
    for start in (3, 10, 17):
        serve(driver, list(range(start, start + 14)))
    kv = driver.runner.kv
    assert len(kv._free) < 3, "the cache is not full: the test shows nothing"
    prompt = [39] * 20
    expected = decode(
        LAW, prompt, max_tokens=20, sampling=GREEDY, request_key=1, stop_ids=frozenset()
    )
    assert serve(driver, prompt, max_tokens=20)[0] == expected
    assert driver.engine.num_preemptions == 0
    assert kv.num_evictions > 5
    too_long = driver.submit(prompt, max_tokens=21)
    assert driver.run()[too_long].error.param == "max_tokens"


@pytest.mark.parametrize(("prefix_cache", "num_running"), [(True, 4), (False, 1)])
def test_a_prefix_that_is_shared_takes_room_once(prefix_cache, num_running):
    driver = make_driver(num_blocks=12, prefix_cache=prefix_cache)
    prompt = list(range(3, 27))
    driver.submit([*prompt, 30], max_tokens=4, ignore_eos=True)
    driver.step()
    for last in (31, 32, 33):
        driver.submit([*prompt, last], max_tokens=3, ignore_eos=True)
    driver.step()
    assert driver.engine.load().running == num_running
    driver.run()
    assert driver.engine.num_preemptions == 0


def test_preemption_comes_after_eviction_and_drafts():
    """A pool of cached blocks, and two sequences that draft deep: the cache gives way to drafts,
    drafts to tokens, and nobody is preempted."""
    driver = make_driver(drafter=oracle_drafter(LAW, GREEDY, 1, depth=8), num_blocks=8)
    serve(driver, list(range(3, 20)), max_tokens=12)
    for first in (30, 31):
        driver.submit([first] * 4, max_tokens=12, ignore_eos=True)
    driver.run()
    assert driver.engine.num_preemptions == 0
    assert driver.runner.kv.num_evictions > 0


def test_a_failed_forward_leaves_nothing_in_the_cache():
    driver, prompt = make_driver(), list(range(3, 20))
    runner = driver.runner
    good_forward = runner.forward

    def bad_forward(slices):
        runner.forward = good_forward
        raise RuntimeError("out of memory")

    runner.forward = bad_forward
    seq = driver.submit(prompt)
    assert driver.run()[seq].error.kind == "InternalError"
    assert serve(driver, prompt)[2] == 0


@pytest.mark.parametrize("drafts", [False, True])
def test_a_prompt_of_4000_tokens_stalls_nobody_by_more_than_a_chunk(drafts):
    """While it is read, every step gives every other sequence at least a token, and takes no more
    than that, their drafts and one chunk."""
    depth, chunk, others = 4, 64, 3
    driver = make_driver(
        drafter=oracle_drafter(LAW, GREEDY, 1, depth) if drafts else None,
        scheduler=SchedulerConfig(max_step_tokens=128, max_prefill_chunk_tokens=chunk),
        num_blocks=2_000,
        max_model_len=5_000,
    )
    short = [driver.submit([3 + i], max_tokens=4_000, ignore_eos=True) for i in range(others)]
    driver.step()
    long = driver.submit([39] * 4_000, max_tokens=1, ignore_eos=True, path=Path.PLAIN)
    num_steps = 0
    while not driver.results[long].ended:
        before = [len(driver.results[seq].token_ids) for seq in short]
        driver.runner.max_rows = 0
        driver.step()
        num_steps += 1
        assert driver.runner.max_rows <= others * (1 + depth * drafts) + chunk
        for seq, num_tokens in zip(short, before, strict=True):
            assert len(driver.results[seq].token_ids) > num_tokens
    assert num_steps == -(-4_000 // chunk)
