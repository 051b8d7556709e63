"""The breaker on acceptance: whom it leaves alone, after how many verdicts, and for how long."""

from __future__ import annotations

import random

import pytest

from verifier_service.acceptance_breaker import (
    BROKEN,
    EARNED_S,
    MAX_PROBE_REFUSALS,
    MAX_PROBE_SESSIONS,
    MAX_REFUSALS,
    POOR,
    PROBE_S,
    AcceptanceBreaker,
    Turn,
)
from verifier_service.drafter_choice import MAX_BACKOFF_S

PAUSE_S = 1.0


def verdicts_until_open(breaker, share, seed, limit, now=0.0):
    """How many verdicts with this share of acceptances open it; None if so many do not."""
    rng = random.Random(seed)
    for number in range(1, limit + 1):
        if breaker.record(now, accepted=rng.random() < share) is not None:
            assert breaker.is_open(now)
            return number
    return None


def opened(now=0.0):
    breaker = AcceptanceBreaker(PAUSE_S)
    assert verdicts_until_open(breaker, 0.0, 0, MAX_REFUSALS, now) == MAX_REFUSALS
    return breaker


def test_a_run_of_refusals_opens_it_however_good_the_drafter_was():
    assert MAX_REFUSALS < 150
    for num_accepted in (0, 10_000):
        breaker = AcceptanceBreaker(PAUSE_S)
        for _ in range(num_accepted):
            assert breaker.record(0.0, accepted=True) is None
        for _ in range(MAX_REFUSALS - 1):
            assert breaker.record(0.0, accepted=False) is None
        assert not breaker.is_open(0.0)
        assert breaker.record(0.0, accepted=False) == Turn(PAUSE_S, MAX_REFUSALS, 0)
        assert breaker.is_open(0.0)


@pytest.mark.parametrize("seed", range(5))
def test_a_poor_drafter_is_kept_and_a_broken_one_is_not(seed):
    """Over 100,000 verdicts; a bound that a poor drafter crosses once in a million."""
    assert verdicts_until_open(AcceptanceBreaker(PAUSE_S), POOR, seed, 100_000) is None
    assert verdicts_until_open(AcceptanceBreaker(PAUSE_S), 0.0, seed, 1_000) == MAX_REFUSALS
    took = verdicts_until_open(AcceptanceBreaker(PAUSE_S), BROKEN, seed, 1_000)
    assert took is not None
    assert took >= MAX_REFUSALS


def test_while_open_it_takes_no_session_and_what_is_judged_then_counts_for_nothing():
    breaker = opened(now=5.0)
    for _ in range(1_000):
        assert breaker.record(5.5, accepted=True) is None
    assert not breaker.may_take(5.0 + PAUSE_S - 0.01, num_sessions=0, drafts=True)
    assert breaker.may_take(5.0 + PAUSE_S, num_sessions=0, drafts=True)
    assert breaker.record(5.0 + PAUSE_S, accepted=True) is None, "it closed on what came while open"


def test_a_probe_is_a_few_sessions_that_draft():
    breaker = opened()
    assert breaker.may_take(PAUSE_S, num_sessions=MAX_PROBE_SESSIONS - 1, drafts=True)
    assert not breaker.may_take(PAUSE_S, num_sessions=MAX_PROBE_SESSIONS, drafts=True)
    assert not breaker.may_take(PAUSE_S, num_sessions=0, drafts=False)
    closed = AcceptanceBreaker(PAUSE_S)
    assert closed.may_take(PAUSE_S, num_sessions=1_000, drafts=False)


def test_a_probe_that_is_accepted_closes_it():
    breaker = opened()
    assert [breaker.record(PAUSE_S, accepted=True) for _ in range(2)] == [None, None]
    assert breaker.record(PAUSE_S, accepted=True) == Turn(0.0, 3, 3)
    assert breaker.may_take(PAUSE_S, num_sessions=1_000, drafts=True)
    num_left = verdicts_until_open(breaker, 0.0, 0, MAX_REFUSALS, PAUSE_S)
    assert num_left == MAX_REFUSALS, "the probe's verdicts count once"


def test_a_probe_that_is_refused_opens_it_for_ever_longer():
    breaker, now, pauses = opened(), 0.0, [PAUSE_S]
    while pauses[-1] < MAX_BACKOFF_S:
        now += pauses[-1]
        for _ in range(MAX_PROBE_REFUSALS - 1):
            assert breaker.record(now, accepted=False) is None
        turn = breaker.record(now, accepted=False)
        assert turn is not None
        pauses.append(turn.pause_s)
    assert pauses == [1.0, 2.0, 4.0, 8.0, 16.0, 30.0]
    assert MAX_PROBE_REFUSALS < 40


def test_a_probe_that_nobody_judges_is_over_after_a_while():
    """Silence is no recovery, and no state for ever. As long as nobody wants drafts it waits."""
    breaker = opened()
    assert breaker.watch(1, 0.5) is None, "open"
    assert breaker.watch(0, 1_000.0) is None, "no session has come"
    assert breaker.watch(1, 1_001.0) is None
    breaker.record(1_002.0, accepted=False)
    assert breaker.watch(0, 1_001.0 + PROBE_S - 0.01) is None
    assert breaker.watch(0, 1_001.0 + PROBE_S) == Turn(2 * PAUSE_S, 1, 0)
    now = 1_001.0 + PROBE_S + 2 * PAUSE_S
    assert breaker.watch(1, now) is None, "the next probe has a time of its own"
    assert breaker.watch(1, now + PROBE_S - 0.01) is None


@pytest.mark.parametrize(("closed_s", "pause_s"), [(EARNED_S - 1, 2.0), (EARNED_S + 1, 1.0)])
def test_a_short_pause_is_earned_again(closed_s, pause_s):
    breaker = opened()
    for _ in range(3):
        breaker.record(PAUSE_S, accepted=True)
    now = PAUSE_S + closed_s
    verdicts_until_open(breaker, 0.0, 0, MAX_REFUSALS, now)
    assert breaker.is_open(now + pause_s - 0.01)
    assert not breaker.is_open(now + pause_s)


def test_a_closed_breaker_has_no_probe_to_watch():
    breaker = AcceptanceBreaker(PAUSE_S)
    assert breaker.watch(5, 0.0) is None
    assert breaker.watch(5, 1_000.0) is None
