"""What the engine counts is what it emits, to the token."""

from __future__ import annotations

import pytest

from cluster.types import TokensEvent
from tests.support.engine_driver import EngineDriver
from tests.support.scripted_target import EOS, ScriptedRunner, continuation_law

PROMPT = (3, 4, 5)
DEPTH = 5


def run(script: list[int], *, wrong_at: int | None = None, max_tokens: int = 16) -> EngineDriver:
    """A drafter that knows the script, except at one place."""
    runner = ScriptedRunner(continuation_law(script, len(PROMPT)), max_model_len=200)
    guess = [*script, *[7] * 50]
    if wrong_at is not None:
        guess[wrong_at] += 1

    def copy(committed, request):
        start = len(committed) - len(PROMPT)
        return guess[start : start + DEPTH]

    driver = EngineDriver(runner, drafter=copy)
    driver.submit(PROMPT, max_tokens=max_tokens, num_speculative_tokens=DEPTH)
    driver.run()
    return driver


def token_events(driver: EngineDriver) -> list[TokensEvent]:
    events = (item.event for output in driver.outputs for item in output.events)
    return [event for event in events if isinstance(event, TokensEvent)]


def check(driver: EngineDriver) -> None:
    events, totals = token_events(driver), driver.engine.recorder.speculation.totals()
    num_accepted = sum(sum(event.drafted) for event in events)
    assert num_accepted > 0, "nothing was accepted: the test shows nothing"
    assert sum(totals.accepted_tokens.values()) == num_accepted
    assert sum(totals.accepted_per_position) == num_accepted
    assert sum(totals.draft_tokens.values()) == sum(event.num_draft_tokens for event in events)
    assert totals.num_drafts == sum(event.num_draft_tokens > 0 for event in events)
    assert sum(len(event.token_ids) for event in events) == len(driver.results[1].token_ids)
    steps = driver.engine.recorder.step_seconds
    # One step reads the prompt and draws; each event is one step.
    assert steps.count == driver.engine.recorder.step_tokens.count == len(events)
    assert (
        driver.engine.recorder.step_tokens.sum
        == sum(event.num_draft_tokens + 1 for event in events) + len(PROMPT) - 1
    )


@pytest.mark.parametrize("index", range(2, 9))
def test_an_end_of_sequence_within_the_accepted_drafts(index: int) -> None:
    """M1: what lies behind it was accepted by the target, and is nothing that was emitted."""
    script = [10 + i for i in range(9)]
    script[index] = EOS
    check(run(script))


@pytest.mark.parametrize("index", range(1, 9))
def test_a_refused_draft(index: int) -> None:
    check(run([10 + i for i in range(12)], wrong_at=index, max_tokens=12))


@pytest.mark.parametrize("max_tokens", range(3, 12))
def test_a_limit_within_a_block(max_tokens: int) -> None:
    check(run([10 + i for i in range(20)], max_tokens=max_tokens))
