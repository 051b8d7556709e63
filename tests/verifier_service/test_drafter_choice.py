"""Which drafters a verifier keeps streams to, and which takes a session."""

from __future__ import annotations

from collections import Counter

from verifier_service.drafter_choice import (
    MAX_BACKOFF_S,
    Candidate,
    choose_drafter,
    next_backoff_s,
    preferred_drafters,
    reopen_pause_s,
)


def test_the_fewest_sessions_win_then_the_nearest():
    far, near, busy = Candidate("a", 1, 9.0), Candidate("b", 1, 2.0), Candidate("c", 2, 0.1)
    assert choose_drafter([far, near, busy]) == "b"
    assert choose_drafter([far, busy]) == "a"
    assert choose_drafter([]) is None


def test_a_drafter_that_leaves_moves_only_its_own_share():
    drafters = [f"drafter-{i}" for i in range(40)]
    for verifier in ("v1", "v2", "v3"):
        before = preferred_drafters(verifier, drafters, 8)
        assert len(before) == 8
        gone = next(iter(before))
        after = preferred_drafters(verifier, [d for d in drafters if d != gone], 8)
        assert before - after == {gone}
        assert len(after - before) == 1


def test_verifiers_spread_over_the_drafters():
    drafters = [f"drafter-{i}" for i in range(40)]
    load = Counter(d for v in range(200) for d in preferred_drafters(f"verifier-{v}", drafters, 8))
    assert len(load) == 40
    assert max(load.values()) < 2 * 200 * 8 / 40


def test_pauses_double_up_to_a_bound():
    pause, pauses = 1.0, []
    for _ in range(8):
        pauses.append(pause)
        pause = next_backoff_s(pause)
    assert pauses == [1, 2, 4, 8, 16, MAX_BACKOFF_S, MAX_BACKOFF_S, MAX_BACKOFF_S]
    assert [reopen_pause_s(n, 1.0) for n in range(5)] == [0, 1, 2, 4, 8]
    assert reopen_pause_s(5_000, 1.0) == MAX_BACKOFF_S
