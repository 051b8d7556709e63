"""Rounds: fair, batched, and proof against a drafter that raises."""

from __future__ import annotations

import pytest

from cluster.protocol.messages import CommitTokens, TargetBatch
from cluster.protocol.prefix_hash import prefix_hash
from cluster.types import DraftNode
from drafter_service.scheduler import DraftingRate, fair_order, plan_round, run_round
from drafter_service.session import SessionTable
from engine.drafting.ngram import NgramDrafter
from tests.drafter_service.test_session import opening, opens


class MoodyDrafter(NgramDrafter):
    """Raises for sessions whose first token is in `poison`; counts its calls."""

    def __init__(self, poison=()):
        super().__init__(4, 2)
        self.poison = set(poison)
        self.poisoned_keys = set()
        self.batch_sizes = []

    def begin(self, session):
        if session.token_ids[0] in self.poison:
            self.poisoned_keys.add(session.session_key)
        if session.token_ids[0] == 99:
            raise MemoryError("no room to prefill")
        super().begin(session)

    def draft(self, requests):
        self.batch_sizes.append(len(requests))
        if self.poisoned_keys & {r.session_key for r in requests}:
            raise ZeroDivisionError("poison")
        return super().draft(requests)


def numbers(sessions):
    return [(s.stream, s.number) for s in sessions]


def test_streams_take_turns_and_the_longest_wait_goes_first():
    table = SessionTable(64, 60.0)
    one, two = table.open_stream(), table.open_stream()
    table.apply(one, opens(*(opening(n) for n in range(6))), 0.0)
    table.apply(two, opens(opening(0), opening(1)), 1.0)
    chosen = numbers(fair_order(table.owing, 5))
    assert chosen == [(one, 0), (two, 0), (one, 1), (two, 1), (one, 2)]


def test_a_busy_stream_does_not_starve_another():
    """One session a round: a stream whose session owes again at once, and a stream with one."""
    table = SessionTable(64, 60.0)
    busy, quiet = table.open_stream(), table.open_stream()
    table.apply(busy, opens(*(opening(n) for n in range(10))), 0.0)
    table.apply(quiet, opens(opening(0)), 0.5)
    for now in range(1, 5):
        work = plan_round(table, 2, 8, float(now))
        if any(table.by_key(r.session_key).stream == quiet for r in work.requests):
            return
    pytest.fail("the quiet stream was not served")


def test_a_round_is_one_batch_from_the_tokens_of_its_planning():
    table, drafter = SessionTable(64, 60.0), MoodyDrafter()
    stream = table.open_stream()
    table.apply(stream, opens(opening(1, (1, 2, 3, 1, 2)), opening(2)), 0.0)
    work = plan_round(table, 64, 3, 2.0)
    assert work.queue_s == 2.0
    assert [r.num_tokens for r in work.requests] == [3, 3]
    assert (work.anchors[0].anchor_position, work.anchors[0].anchor_hash) == (
        5,
        prefix_hash((1, 2, 3, 1, 2)),
    )
    table.apply(stream, TargetBatch(commits=(CommitTokens(1, 5, (3,)),)), 3.0)
    result = run_round(drafter, work)
    keys = [r.session_key for r in work.requests]
    assert [n.token_id for n in result.nodes[keys[0]]] == [3, 1, 2]
    assert result.nodes[keys[1]] == ()
    assert drafter.batch_sizes == [2]
    later = plan_round(table, 64, 3, 4.0)
    assert [r.session_key for r in later.requests] == keys[:1]


@pytest.mark.parametrize("poison", [42, 99], ids=["in draft", "in begin"])
def test_a_session_that_makes_the_drafter_raise_fails_alone(poison):
    table, drafter = SessionTable(64, 60.0), MoodyDrafter(poison=[42])
    stream = table.open_stream()
    table.apply(
        stream, opens(opening(1, (1, 2, 1, 2)), opening(2, (poison, 2)), opening(3, (3,))), 0.0
    )
    work = plan_round(table, 64, 3, 0.0)
    result = run_round(drafter, work)
    good, bad, other = (r.session_key for r in work.requests)
    assert result.nodes.keys() == {good, other}
    assert result.nodes[good][0] == DraftNode(1, -1, pytest.approx(2 / 3))
    assert result.failures.keys() == {bad}
    error = table.fail(table.by_key(bad), result.failures[bad])
    assert (error.session, error.kind) == (2, "InternalError")
    # The drafter is told that it ended, whether it ever began or not.
    assert run_round(drafter, plan_round(table, 64, 3, 0.0)).nodes == {}


def test_the_rate_forgets():
    rate = DraftingRate()
    for step in range(100):
        rate.record(10, 0.002, step * 0.05)
    report = rate.report(3, 5.0)
    assert report.sessions == 3
    assert report.tokens_per_s == pytest.approx(200, rel=0.1)
    assert report.queue_ms == pytest.approx(2, rel=0.1)
    assert rate.report(3, 20.0).tokens_per_s < 0.01
