"""Rounds: fair, batched, and proof against a drafter that raises."""

from __future__ import annotations

import random

import pytest

from cluster.config import AheadConfig
from cluster.protocol.messages import MAX_DRAFTS_PER_MESSAGE, CommitTokens, TargetBatch
from cluster.protocol.prefix_hash import prefix_hash
from cluster.types import DraftNode
from drafter_service.proposal import Growth
from drafter_service.scheduler import (
    DraftingRate,
    Limits,
    Pace,
    fair_order,
    finish_round,
    plan_round,
    run_round,
)
from drafter_service.session import Begin, SessionTable
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


class Oracle:
    """Drafts 101, 102 and so on, as far as it is asked, but never token `end`; with branches of
    tokens from 500 on where they are wanted. `reads`: calls in which it only reads."""

    def __init__(self, end=10_000, reads=0):
        self.end_id, self.reads = end, reads
        self.lengths, self.requests = {}, []

    def begin(self, session):
        self.lengths[session.session_key] = len(session.token_ids)

    def extend(self, session_key, token_ids):
        self.lengths[session_key] += len(token_ids)

    def end(self, session_key):
        del self.lengths[session_key]

    def draft(self, requests):
        self.requests.append(requests)
        if self.reads:
            self.reads -= 1
            return [None] * len(requests)
        return [self.nodes(request) for request in requests]

    def nodes(self, request):
        first = 100 + self.lengths[request.session_key]
        ids = range(first, min(first + request.num_tokens, self.end_id))
        chain = [DraftNode(token_id, i - 1, 0.5) for i, token_id in enumerate(ids)]
        for place in range(min(request.num_branches, len(chain))):
            parent = place - 1
            for step in range(request.branch_len):
                chain.append(DraftNode(500 + place + 10 * step, parent, 0.2))
                parent = len(chain) - 1
        return tuple(chain)


def limits(max_tokens=8, max_sessions=64, **ahead):
    return Limits(
        max_tokens, AheadConfig(**{"lead_tokens": 0, "branches": 0} | ahead), max_sessions
    )


def keys_of(work):
    return [task.request.session_key for task in work.tasks]


class Service:
    """A table and a drafter, whose rounds are run at once."""

    def __init__(self, drafter, **ahead):
        self.table, self.drafter = SessionTable(64, 60.0), drafter
        self.stream = self.table.open_stream()
        self.limits = limits(8, **ahead)
        self.now = 0.0

    def apply(self, batch):
        assert self.table.apply(self.stream, batch, self.now) == ()

    def commit(self, session, position, *token_ids):
        self.apply(TargetBatch(commits=(CommitTokens(session, position, token_ids),)))

    def round(self):
        """What one round tells on the stream; None if there was nothing to do."""
        work = plan_round(self.table, self.limits, Pace(), self.now)
        if not work.tasks:
            return None
        finish_round(self.table, work, run_round(self.drafter, work), self.now)
        self.now += 1.0
        return self.table.take_drafts(self.stream)

    def rounds(self):
        """All until there is nothing to do."""
        told = []
        while (drafts := self.round()) is not None:
            told += drafts
        return told


def shape(draft):
    """(anchor, token ids, what it answers)."""
    return draft.anchor_position, [node.token_id for node in draft.nodes], draft.answers


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
        work = plan_round(table, limits(max_sessions=2), Pace(), float(now))
        if any(table.by_key(key).stream == quiet for key in keys_of(work)):
            return
    pytest.fail("the quiet stream was not served")


def test_a_round_is_one_batch_from_the_tokens_of_its_planning():
    table, drafter = SessionTable(64, 60.0), MoodyDrafter()
    stream = table.open_stream()
    table.apply(stream, opens(opening(1, (1, 2, 3, 1, 2)), opening(2)), 0.0)
    work = plan_round(table, limits(3), Pace(), 2.0)
    assert work.queue_s == 2.0
    assert [t.request.num_tokens for t in work.tasks] == [3, 3]
    table.apply(stream, TargetBatch(commits=(CommitTokens(1, 5, (3,)),)), 3.0)
    result = run_round(drafter, work)
    keys = keys_of(work)
    assert [n.token_id for n in result.nodes[keys[0]]] == [3, 1, 2]
    assert result.nodes[keys[1]] == ()
    assert drafter.batch_sizes == [2]
    outcome = finish_round(table, work, result, 3.0)
    assert outcome.growths == (Growth(2), Growth(0))
    one, two = table.take_drafts(stream)
    # The first was drafted before token 3 came: what goes on from there stands, as no answer.
    assert (one.draft.anchor_position, one.draft.anchor_hash) == (
        6,
        prefix_hash((1, 2, 3, 1, 2, 3)),
    )
    assert [n.token_id for n in one.draft.nodes] == [1, 2]
    assert (one.draft.answers, two.draft.answers) == (None, 3)
    assert keys_of(plan_round(table, limits(3), Pace(), 4.0)) == keys[:1]


@pytest.mark.parametrize("poison", [42, 99], ids=["in draft", "in begin"])
def test_a_session_that_makes_the_drafter_raise_fails_alone(poison):
    table, drafter = SessionTable(64, 60.0), MoodyDrafter(poison=[42])
    stream = table.open_stream()
    table.apply(
        stream, opens(opening(1, (1, 2, 1, 2)), opening(2, (poison, 2)), opening(3, (3,))), 0.0
    )
    work = plan_round(table, limits(3), Pace(), 0.0)
    result = run_round(drafter, work)
    good, bad, other = keys_of(work)
    assert result.nodes.keys() == {good, other}
    assert result.nodes[good][0] == DraftNode(1, -1, pytest.approx(2 / 3))
    assert result.failures.keys() == {bad}
    [error] = finish_round(table, work, result, 1.0).errors[stream]
    assert (error.session, error.kind) == (2, "InternalError")
    # The drafter is told that it ended, whether it ever began or not.
    later = plan_round(table, limits(3), Pace(), 0.0)
    assert bad not in run_round(drafter, later).nodes
    assert bad in {operation.session_key for operation in later.operations}


def test_the_rate_forgets():
    rate = DraftingRate()
    for step in range(100):
        rate.record([Growth(6), Growth(4, 1)], 0.002, step * 0.05)
    report = rate.report(3, 5.0)
    assert report.sessions == 3
    assert report.tokens_per_s == pytest.approx(200, rel=0.1)
    assert report.queue_ms == pytest.approx(2, rel=0.1)
    assert report.num_branches == 100
    assert rate.report(3, 20.0).tokens_per_s < 0.01


# --- ahead of the verdict ----------------------------------------------------------------------


def test_a_chain_comes_in_pieces_and_the_last_one_answers():
    service = Service(Oracle())
    service.apply(opens(opening(1, num_speculative_tokens=6)))
    assert [shape(d.draft) for d in service.rounds()] == [
        (3, [103, 104, 105, 106], None),
        (7, [107, 108], 3),
    ]


def test_the_lead_goes_on_from_what_was_told_and_ends():
    service = Service(Oracle(), lead_tokens=3)
    service.apply(opens(opening(1)))
    assert [shape(d.draft) for d in service.rounds()] == [
        (3, [103, 104, 105, 106], 3),
        (7, [107, 108], None),
        (9, [109], None),
    ]


def test_nothing_is_thrown_away_when_the_guess_was_right():
    """The chain is there, so the answer is empty; then the lead grows by what was taken."""
    service = Service(Oracle(), lead_tokens=6)
    service.apply(opens(opening(1)))
    service.rounds()
    service.commit(1, 3, 103, 104, 105)
    assert [shape(d.draft) for d in service.rounds()] == [
        (6, [], 6),
        (13, [113, 114], None),
        (15, [115], None),
    ]


def test_a_mismatch_starts_anew_at_the_divergence():
    service = Service(Oracle(), lead_tokens=6)
    service.apply(opens(opening(1)))
    service.rounds()
    service.commit(1, 3, 103, 7)
    assert shape(service.round()[0].draft) == (5, [105, 106, 107, 108], 5)


def test_a_chain_that_ends_is_an_answer_and_gets_no_lead():
    service = Service(Oracle(end=105), lead_tokens=6)
    service.apply(opens(opening(1), opening(2, range(5))))
    assert [shape(d.draft) for d in service.rounds()] == [(3, [103, 104], 3), (5, [], 5)]


def test_a_prompt_is_read_on_without_a_message_and_holds_up_no_other_round():
    """It used to go on with the next message of its session only."""
    service = Service(Oracle(reads=5))
    service.apply(opens(opening(1)))
    assert [shape(d.draft) for d in service.rounds()] == [(3, [103, 104, 105, 106], 3)]
    assert len(service.drafter.requests) == 6


def test_corrections_are_prepared_when_nobody_waits():
    service = Service(Oracle(), branches=2, branch_len=5)
    service.apply(opens(opening(1)))
    told = service.rounds()
    assert [shape(d.draft)[1] for d in told] == [
        [103, 104, 105, 106],
        [103, 501, 511, 521, 500, 510, 520],
        [103, 501, 511, 521, 531, 541, 500, 510, 520, 530, 540],
    ]
    service.commit(1, 3, 103, 501)
    service.round()
    [request] = service.drafter.requests[-1]
    assert request.num_tokens == 4, "all that answers is there"


def test_branches_are_shed_before_the_lead_and_both_before_a_waiting_session():
    service = Service(Oracle(), lead_tokens=4, branches=2, max_branching_sessions=2)
    service.apply(opens(*(opening(n) for n in (1, 2, 3))))
    service.round()
    service.round()
    [requests] = service.drafter.requests[1:]
    assert [(r.num_tokens, r.num_branches) for r in requests] == [(6, 0)] * 3
    service.apply(TargetBatch(closes=(3,)))
    service.round()
    assert [r.num_branches for r in service.drafter.requests[-1]] == [2, 2]
    service.commit(1, 3, 7)
    service.round()
    assert [r.session_key for r in service.drafter.requests[-1]] == [1]


def test_a_paused_session_is_not_drafted_for():
    service = Service(Oracle(), lead_tokens=4, branches=2)
    service.apply(opens(opening(1)))
    service.round()
    service.apply(TargetBatch(pauses=(1,)))
    assert service.rounds() == []


def test_a_session_gets_no_more_drafts_than_its_messages_allow():
    """However far ahead the drafter could go; and the last one is kept for an answer."""
    service = Service(Oracle(), lead_tokens=64)
    service.apply(opens(opening(1)))
    assert len(service.rounds()) == MAX_DRAFTS_PER_MESSAGE - 1
    service.commit(1, 3, 103)
    told = service.rounds()
    assert len(told) <= MAX_DRAFTS_PER_MESSAGE
    assert shape(told[0].draft) == (4, [], 4)


def test_what_was_not_told_yet_is_one_draft_and_a_commit_cuts_it():
    """A verifier that reads slowly: nothing piles up, and nothing that is contradicted is sent."""
    service = Service(Oracle(), lead_tokens=4)
    service.apply(opens(opening(1)))
    for _ in range(3):
        work = plan_round(service.table, service.limits, Pace(), 0.0)
        finish_round(service.table, work, run_round(service.drafter, work), 0.0)
    [untold] = service.table.take_drafts(service.stream)
    assert shape(untold.draft) == (3, list(range(103, 111)), 3)
    service.commit(1, 3, 103, 104)
    work = plan_round(service.table, service.limits, Pace(), 0.0)
    finish_round(service.table, work, run_round(service.drafter, work), 0.0)
    service.commit(1, 5, 9)
    assert service.table.take_drafts(service.stream) == ()


def test_a_drafter_is_told_of_a_session_before_it_drafts():
    service = Service(Oracle())
    service.apply(opens(opening(1)))
    work = plan_round(service.table, service.limits, Pace(), 0.0)
    assert [type(operation) for operation in work.operations] == [Begin]


@pytest.mark.parametrize(
    ("fixed_s", "token_s", "owed", "ahead"),
    [(0.0, 0.003, 3, 2), (0.002, 0.003, 3, 2), (0.0, 0.0005, 20, 10), (0.0, 0.04, 1, 1)],
    ids=["model", "model and overhead", "fast model", "slow model"],
)
def test_rounds_are_as_long_as_some_milliseconds_let_chains_grow(fixed_s, token_s, owed, ahead):
    pace, rng = Pace(), random.Random(0)
    for _ in range(200):
        num_tokens = rng.choice([0, 2, 4])
        pace.observe(num_tokens, (fixed_s + token_s * num_tokens) * rng.uniform(0.9, 1.1))
    assert pace.tokens_within(0.010) == pytest.approx(owed, rel=0.15)
    assert pace.tokens_within(0.005) == pytest.approx(ahead, rel=0.15)


def test_a_drafter_without_a_model_drafts_all_at_once_however_many_sessions_it_has():
    pace, rng = Pace(), random.Random(0)
    for _ in range(200):
        pace.observe(rng.choice([0, 1, 2]), 0.012)
    assert pace.tokens_within(0.005) == 64


def test_rounds_that_are_all_alike_tell_nothing_of_the_pace():
    pace = Pace()
    for _ in range(200):
        pace.observe(2, 0.5)
    before = pace.tokens_within(0.010)
    pace.observe(2, 0.1)
    assert pace.tokens_within(0.010) == before
