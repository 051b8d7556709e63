"""Ends inside an accepted block are ends: stop ids, length, and what is counted."""

from __future__ import annotations

import pytest

from cluster.types import FinishReason, Path
from tests.support.engine_driver import GREEDY, EngineDriver
from tests.support.reference import decode
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


def test_the_draft_session_stays_open_behind_a_refused_eos():
    """Elsewhere the end that the drafter wanted closed it."""
    script = list(range(5, 20))

    def ends_too_early(committed, request):
        start = len(committed) - len(PROMPT)
        return [*script[start : start + 2], EOS]

    result, driver = run(script, drafter=ends_too_early, max_tokens=len(script))
    assert result.token_ids == script
    assert sum(EOS in event.refused_ids for event in result.events) > 2
    assert sum(len(output.orders.opens) for output in driver.outputs) == 1
    closed = [seq for output in driver.outputs for seq in output.orders.closes]
    assert closed == [1]
    assert driver.outputs[-1].orders.closes == (1,), "not before the answer's own end"


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


def test_the_next_turn_goes_on_from_what_was_said_and_not_from_drafts_behind_the_end():
    """Elsewhere these stood in the prompt of the next turn, and counted as accepted."""
    script = [5, 6, EOS, 7, 7, 7, 7, 7, 7]
    result, driver = run(script, depth=8)
    assert result.token_ids == [5, 6, EOS]
    assert driver.runner.max_rows > 3, "nothing behind the end was computed"
    assert 0 < result.finish.stats.num_accepted_tokens <= 3
    # The first block is all that both turns share; the drafts fill the second.
    again = [*PROMPT, 5, 6, EOS, 8, 9]
    seq = driver.submit(again, max_tokens=3, path=Path.SPECULATIVE)
    result = driver.run()[seq]
    assert result.events[0].num_cached_prompt_tokens == 4
    law = continuation_law(script, len(PROMPT))
    assert result.token_ids == decode(law, again, max_tokens=3, sampling=GREEDY, request_key=1)


@pytest.mark.parametrize("left", [1, 2, 5])
def test_prompt_and_max_tokens_that_fill_the_window_leave_drafts_no_room_and_need_none(left):
    """Elsewhere the slots for drafts overflowed."""
    script = [9] * 30
    result, _ = run(script, max_model_len=len(PROMPT) + left, max_tokens=left, depth=5)
    assert (result.token_ids, result.finish.reason) == ([9] * left, FinishReason.LENGTH)
    # The last token is never drafted: it comes behind the drafts.
    assert result.finish.stats.num_draft_tokens < left


def test_where_nothing_may_be_drafted_no_zeros_are():
    """Token 0 is a token like any other. Elsewhere zeros stood for absent drafts near the limit."""
    result, _ = run([0] * 30, max_tokens=4, depth=5, drafter=lambda committed, request: [])
    assert result.token_ids == [0] * 4
    assert result.finish.stats.num_draft_tokens == 0
    assert not any(result.finish.stats.drafted_per_position)
    assert not any(event.refused_ids or any(event.drafted) for event in result.events)
    # One token more than the drafts leaves room for: the last one comes without.
    result, _ = run([0] * 30, max_tokens=4, depth=5)
    assert result.token_ids == [0] * 4
    assert result.finish.stats.num_draft_tokens == result.finish.stats.num_accepted_tokens < 4


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
