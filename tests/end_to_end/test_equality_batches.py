"""The real model in bfloat16 gives the same tokens at any batch size, cut into any chunks, with and
without the prefix cache, behind drafts, and preempted at any step. Nothing is forgiven.
`make test` takes half of the requests."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass

import pytest
from tokenizers import Tokenizer

from cluster.config import KVCacheConfig, ModelConfig, SchedulerConfig, SpeculationConfig
from cluster.types import GenerationRequest, SamplingParams
from engine.kv_cache import KVCacheManager
from engine.loader import load_model
from engine.model_runner import ModelRunner
from tests.support import prompts
from tests.support.engine_driver import EngineDriver, Result

NUM_TOKENS = 12
BLOCK_SIZE = 16
SAMPLINGS = [
    SamplingParams(temperature=0.0),
    SamplingParams(temperature=1.0),
    SamplingParams(temperature=0.8, top_p=0.9),
    SamplingParams(temperature=0.0, repetition_penalty=1.3, presence_penalty=0.4),
]

Tokens = list[list[int]]


@dataclass
class Requests:
    """Every eighth is a conversation that starts like another."""

    prompt_ids: Tokens
    vocab_size: int

    def submit_to(self, driver: EngineDriver) -> list[int]:
        return [
            driver.submit(
                token_ids,
                max_tokens=NUM_TOKENS,
                sampling=SAMPLINGS[index % len(SAMPLINGS)],
                request_key=index,
            )
            for index, token_ids in enumerate(self.prompt_ids)
        ]


@pytest.fixture(scope="module")
def runner() -> ModelRunner:
    return ModelRunner(load_model(ModelConfig()), KVCacheConfig(num_blocks=400))


@pytest.fixture(
    scope="module", params=[2, pytest.param(1, marks=pytest.mark.long)], ids=["half", "all"]
)
def requests(request: pytest.FixtureRequest, runner: ModelRunner) -> Requests:
    """Of the first 32 prompts every one, or every second one."""
    tokenizer = Tokenizer.from_str(runner.card.tokenizer_json)
    encoded = [tokenizer.encode(text).ids[:60] for text in prompts.ALL[: 32 : request.param]]
    encoded[0] = max(encoded, key=len)
    for index in range(8, len(encoded), 8):
        encoded[index] = encoded[0] + encoded[index]
    return Requests(encoded, runner.vocab_size)


def fresh_pool(runner: ModelRunner, *, prefix_cache: bool, num_blocks: int = 400) -> None:
    """Forget what is cached. The pool's memory stays, with all that was in it."""
    runner.kv = KVCacheManager(num_blocks, BLOCK_SIZE, prefix_cache=prefix_cache)


def tokens_of(results: dict[int, Result], seqs: Sequence[int]) -> Tokens:
    assert not [result.error for result in results.values() if result.error]
    return [results[seq].token_ids for seq in seqs]


@pytest.fixture(scope="module")
def expected(runner: ModelRunner, requests: Requests) -> Tokens:
    """Alone, prompts whole, plain."""
    fresh_pool(runner, prefix_cache=False)
    scheduler = SchedulerConfig(max_running_sequences=1)
    driver = EngineDriver(runner, scheduler=scheduler)
    seqs = requests.submit_to(driver)
    tokens = tokens_of(driver.run(), seqs)
    assert len({tuple(t) for t in tokens}) > 0.75 * len(tokens)
    return tokens


@pytest.mark.parametrize(
    ("batch_size", "prefix_cache", "seed"),
    [(1, True, 0), (7, False, 1), (7, True, 2), (32, True, 3)],
)
def test_batches_chunks_preemption_and_drafts_change_nothing(
    runner: ModelRunner,
    requests: Requests,
    expected: Tokens,
    batch_size: int,
    prefix_cache: bool,
    seed: int,
) -> None:
    rng = random.Random(seed)
    by_key = dict(enumerate(expected))

    def drafter(committed: tuple[int, ...], request: GenerationRequest) -> list[int]:
        """Right for a while, then wrong, or nothing at all."""
        num_done = len(committed) - len(request.prompt_ids)
        right = by_key[request.request_key][num_done : num_done + rng.randrange(4)]
        wrong = [rng.randrange(requests.vocab_size) for _ in range(rng.randrange(2))]
        return [*right, *wrong]

    fresh_pool(runner, prefix_cache=prefix_cache)
    driver = EngineDriver(
        runner,
        drafter=drafter,
        scheduler=SchedulerConfig(max_running_sequences=batch_size),
        speculation=SpeculationConfig(planner="fixed", draft_deadline_ms=1.0),
    )
    seqs = requests.submit_to(driver)
    scheduler, num_preempted = driver.engine._scheduler, 0
    preempted_share = 0.2 if batch_size < 32 else 0.7  # A large batch takes few steps.
    while not all(result.ended for result in driver.results.values()):
        chunk = rng.choice([1, 3, 17, 64, 256])
        scheduler.config = scheduler.config.model_copy(update={"max_prefill_chunk_tokens": chunk})
        if scheduler.running and rng.random() < preempted_share:
            scheduler._preempt_newest()
            num_preempted += 1
        driver.step()
    assert tokens_of(driver.results, seqs) == expected
    finishes = [driver.results[seq].finish for seq in seqs]
    assert num_preempted > 2
    assert sum(finish.stats.num_accepted_tokens for finish in finishes if finish) > 1.5 * len(seqs)
    assert (runner.kv.num_hit_tokens > 0) == prefix_cache


def test_a_pool_that_is_too_small_changes_nothing(
    runner: ModelRunner, requests: Requests, expected: Tokens
) -> None:
    """The engine preempts by itself."""
    fresh_pool(runner, prefix_cache=True, num_blocks=24)
    driver = EngineDriver(runner, scheduler=SchedulerConfig(max_running_sequences=32))
    seqs = requests.submit_to(driver)
    assert tokens_of(driver.run(), seqs) == expected
    assert driver.engine.num_preemptions > 0
