"""Priorities in the engine: who gets a place first, and that no token depends on it."""

from __future__ import annotations

from cluster.config import SchedulerConfig
from tests.support.engine_driver import EngineDriver
from tests.support.scripted_target import ScriptedRunner, hashed_law

ONE_PLACE = SchedulerConfig(max_running_sequences=1)
PROMPTS = [[3, 4, index] for index in range(5, 11)]


def run(priorities: list[int]) -> tuple[list[int], list[list[int]]]:
    """In which order the requests ended, and their tokens."""
    driver = EngineDriver(ScriptedRunner(hashed_law()), scheduler=ONE_PLACE)
    for prompt, priority in zip(PROMPTS, priorities, strict=True):
        driver.submit(prompt, max_tokens=3, ignore_eos=True, priority=priority)
    order: list[int] = []
    while len(order) < len(PROMPTS):
        driver.step()
        ended = [seq for seq, result in driver.results.items() if result.ended]
        order += [seq for seq in ended if seq not in order]
    return order, [driver.results[seq].token_ids for seq in sorted(driver.results)]


def test_the_lowest_priority_runs_first_and_changes_no_token() -> None:
    order, tokens = run([0] * 6)
    assert order == [1, 2, 3, 4, 5, 6]
    other_order, other_tokens = run([2, 0, 1, -1, 0, 2])
    assert other_order == [4, 2, 5, 3, 1, 6]
    assert other_tokens == tokens
