"""Sequences of one batch that accept different numbers of drafts in one step."""

from __future__ import annotations

import random

import pytest

from cluster.config import SchedulerConfig, SpeculationConfig
from cluster.types import GenerationRequest, Path
from tests.support.engine_driver import GREEDY, EngineDriver, flaky_drafter, oracle_drafter
from tests.support.reference import decode
from tests.support.scripted_target import VOCAB_SIZE, ScriptedRunner, hashed_law

RIGHT = {"1": 0, "2": 1, "3": 3, "4": 5}
"""By request, how many of each five drafts are right."""
DEPTH = 5


def test_ragged_acceptance_in_a_batch_gives_what_each_gives_alone() -> None:
    """Elsewhere: batches refused, or cut to the shortest acceptance, or shifted by it."""
    law = hashed_law(salt="ragged")
    prompts = {name: [3, 4, 5 + index] for index, name in enumerate(RIGHT)}

    def draft(committed: tuple[int, ...], request: GenerationRequest) -> list[int]:
        answer = decode(law, committed, max_tokens=DEPTH, sampling=GREEDY, request_key=1)
        answer += [0] * (DEPTH - len(answer))
        right = RIGHT[request.request_id]
        if committed == request.prompt_ids:
            # The step that reads a prompt verifies none, and its answer would stand beside this.
            return []
        return [*answer[:right], *((token_id + 1) % VOCAB_SIZE for token_id in answer[right:])]

    driver = EngineDriver(
        ScriptedRunner(law),
        drafter=draft,
        speculation=SpeculationConfig(
            planner="fixed", num_speculative_tokens=DEPTH, local_drafters=()
        ),
    )
    seqs = {
        name: driver.submit(prompt, max_tokens=24, ignore_eos=True)
        for name, prompt in prompts.items()
    }
    results = driver.run()
    for name, seq in seqs.items():
        alone = EngineDriver(ScriptedRunner(law))
        serial = alone.submit(prompts[name], max_tokens=24, ignore_eos=True)
        assert results[seq].token_ids == alone.run()[serial].token_ids
        sizes = {len(event.token_ids) for event in results[seq].events if event.num_draft_tokens}
        assert RIGHT[name] + 1 in sizes
        assert max(sizes) == RIGHT[name] + 1


def drafting(chains: dict[str, list[int] | None]) -> EngineDriver:
    """By request: always this chain, or silence."""
    return EngineDriver(
        ScriptedRunner(hashed_law(salt="empty"), num_blocks=400),
        drafter=lambda committed, request: chains[request.request_id],
        speculation=SpeculationConfig(
            draft_deadline_ms=1.0, planner="fixed", num_speculative_tokens=DEPTH, local_drafters=()
        ),
    )


@pytest.mark.parametrize(
    "chains",
    [
        {"1": [], "2": [], "3": []},
        {"1": [39] * DEPTH, "2": [39] * DEPTH, "3": [39] * DEPTH},
        {"1": [], "2": [39] * DEPTH, "3": None},
    ],
    ids=["all drafts empty", "none accepted", "one of each"],
)
def test_a_step_without_drafts_or_without_an_accepted_one_is_a_step(
    chains: dict[str, list[int] | None],
) -> None:
    """Elsewhere an index out of range."""
    driver = drafting(chains)
    law = driver.runner.law
    for name in chains:
        driver.submit([3, 4, int(name)], max_tokens=12, ignore_eos=True)
    for result, name in zip(driver.run().values(), chains, strict=True):
        assert result.token_ids == decode(
            law, [3, 4, int(name)], max_tokens=12, sampling=GREEDY, request_key=1,
            stop_ids=frozenset(),
        )  # fmt: skip
        assert result.finish is not None
        assert result.finish.stats.num_accepted_tokens < 3


def test_a_request_that_asks_for_no_depth_beside_one_that_does() -> None:
    law = hashed_law(salt="depths")
    driver = EngineDriver(ScriptedRunner(law), drafter=oracle_drafter(law, GREEDY, 1, DEPTH))
    plain = driver.submit([3, 4, 5], max_tokens=24, ignore_eos=True, path=Path.PLAIN)
    drafted = driver.submit([3, 4, 6], max_tokens=24, ignore_eos=True)
    results = driver.run()
    told = [results[seq].finish.stats.num_draft_tokens for seq in (plain, drafted)]
    assert told[0] == 0 < told[1]


def test_sixty_four_at_once_get_what_each_gets_alone() -> None:
    """Elsewhere a few requests together crashed, hung, or got one another's tokens."""
    law = hashed_law(salt="many")
    sizes = [(3 + i % 7, 1 + i * 5 % 23) for i in range(64)]
    expected = [
        decode(law, range(3, 3 + size), max_tokens=count, sampling=GREEDY, request_key=1)
        for size, count in sizes
    ]
    for turn in range(3):
        driver = EngineDriver(
            ScriptedRunner(law, num_blocks=900),
            drafter=flaky_drafter(random.Random(turn), law),
            scheduler=SchedulerConfig(max_running_sequences=64),
        )
        for size, count in sizes:
            driver.submit(range(3, 3 + size), max_tokens=count)
        most_running = 0
        while driver.engine._generations or not most_running:
            driver.step()
            most_running = max(most_running, driver.engine.load().running)
        assert most_running > 30
        assert [result.token_ids for result in driver.run().values()] == expected
        assert driver.runner.kv.num_used_blocks == 0
