"""Ends inside an accepted block are ends: stop ids, length, and what is counted."""

from __future__ import annotations

import pytest

from cluster.types import FinishReason, Path
from tests.support.engine_driver import EngineDriver
from tests.support.scripted_target import EOS, ScriptedRunner, continuation_law

PROMPT = (3, 4, 5)


def run(script, *, drafter="copy", max_tokens=16, depth=6, max_model_len=200, eos=(EOS,), **fields):
    runner = ScriptedRunner(continuation_law(script, len(PROMPT)), max_model_len=max_model_len)
    runner.card = type(runner.card)(**{**_fields(runner.card), "eos_token_ids": eos})

    def copy(committed, request):
        start = len(committed) - len(PROMPT)
        return ([*script, *[7] * 50])[start : start + depth]

    chosen = copy if drafter == "copy" else drafter
    driver = EngineDriver(runner, drafter=chosen)
    path = Path.PLAIN if drafter is None else Path.SPECULATIVE
    driver.submit(PROMPT, max_tokens=max_tokens, path=path, num_speculative_tokens=depth, **fields)
    result = driver.run()[1]
    assert runner.kv.num_used_blocks == 0
    return result, driver


def _fields(card):
    return {name: getattr(card, name) for name in card.__dataclass_fields__}


@pytest.mark.parametrize("index", range(8))
def test_an_eos_at_any_place_of_a_block_ends_it_there(index):
    script = [10 + i for i in range(9)]
    script[index] = EOS
    result, _ = run(script)
    assert result.token_ids == script[: index + 1]
    assert result.finish.reason is FinishReason.STOP


@pytest.mark.parametrize("index", range(8))
def test_a_stop_token_id_of_the_request_ends_it(index):
    script = [10 + i for i in range(9)]
    result, _ = run(script, stop_token_ids=frozenset({script[index]}))
    assert result.token_ids == script[: index + 1]
    assert result.finish.reason is FinishReason.STOP


@pytest.mark.parametrize(("stop_at", "num_tokens", "reason"), [(2, 3, "stop"), (6, 5, "length")])
def test_a_stop_within_the_cap_is_a_stop_and_beyond_it_a_length(stop_at, num_tokens, reason):
    script = [10, 11, 12, 13, 14, 15, 16, 17]
    script[stop_at] = EOS
    result, _ = run(script, max_tokens=5, depth=8)
    assert len(result.token_ids) == num_tokens
    assert result.finish.reason.value == reason


@pytest.mark.parametrize("max_tokens", [1, 2, 3, 8])
def test_never_more_than_max_tokens_and_all_of_them(max_tokens):
    result, _ = run([9] * 30, max_tokens=max_tokens, depth=8)
    assert result.token_ids == [9] * max_tokens
    assert result.finish.reason is FinishReason.LENGTH


def test_an_eos_that_only_the_drafter_wants_does_not_end_it():
    script = [5, 6, 7, 8]
    result, _ = run(script, drafter=lambda committed, request: [5, EOS], max_tokens=4)
    assert result.token_ids == script


def test_without_an_eos_id_it_runs_to_the_window():
    result, _ = run([9] * 100, max_tokens=10_000, max_model_len=20, eos=())
    assert len(result.token_ids) == 20 - len(PROMPT)
    assert result.finish.reason is FinishReason.LENGTH


def test_ignore_eos_runs_on():
    result, _ = run([EOS] * 6, max_tokens=6, ignore_eos=True)
    assert result.token_ids == [EOS] * 6


@pytest.mark.parametrize("room", [1, 2, 3, 5])
def test_drafts_are_clipped_to_what_the_window_leaves(room):
    result, driver = run([9] * 50, max_model_len=len(PROMPT) + room, max_tokens=500, depth=6)
    assert len(result.token_ids) == room
    assert driver.runner.kv.num_used_blocks == 0


def test_accepted_counts_leave_out_what_lies_behind_an_eos():
    result, _ = run([5, EOS, 7, 7, 7], depth=5)
    assert result.token_ids == [5, EOS]
    stats = result.finish.stats
    assert stats.num_accepted_tokens <= len(result.token_ids)
    assert sum(len(event.token_ids) for event in result.events) == 2


def test_the_first_token_is_verified_like_any_other():
    result, _ = run(
        [5, 6, 7, 8, 9, 1], drafter=lambda committed, request: [9], depth=1, max_tokens=6
    )
    assert result.token_ids == [5, 6, 7, 8, 9, 1]
    assert result.finish.stats.accepted_per_position == (1,)


def test_a_drafter_that_is_always_wrong_accepts_nothing():
    result, _ = run([5, 6, 7, 8], drafter=lambda committed, request: [39] * 4, max_tokens=4)
    assert result.token_ids == [5, 6, 7, 8]
    assert result.finish.stats.num_accepted_tokens == 0
    assert result.finish.stats.num_draft_tokens > 0
    assert {refused for event in result.events for refused in event.refused_ids} == {39}
