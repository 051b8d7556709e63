"""The session table: a wrong message costs its session and nothing else."""

from __future__ import annotations

import copy
import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cluster.config import AheadConfig
from cluster.protocol.messages import CommitTokens, OpenSession, TargetBatch
from cluster.protocol.prefix_hash import prefix_hash
from cluster.types import SamplingParams
from drafter_service.scheduler import Limits, Pace, plan_round
from drafter_service.session import Begin, End, Extend, SessionTable

PROMPT = (5, 6, 7)


def opening(
    session: int,
    token_ids=PROMPT,
    *,
    epoch=1,
    num_prompt_tokens=None,
    num_speculative_tokens=4,
    **sampling,
):
    return OpenSession(
        session,
        epoch,
        tuple(token_ids),
        len(token_ids) if num_prompt_tokens is None else num_prompt_tokens,
        request_key=9,
        sampling=SamplingParams(**sampling),
        num_speculative_tokens=num_speculative_tokens,
    )


def opens(*openings):
    return TargetBatch(opens=openings)


def commits(*items):
    return TargetBatch(commits=tuple(CommitTokens(*item) for item in items))


def owing(table):
    return {(s.stream, s.number) for s in table.owing}


class WatchedTable(SessionTable):
    """A table whose operations a drafter of lists follows."""

    def __init__(self, max_sessions=8, ttl_s=60.0, max_context_len=0):
        super().__init__(max_sessions, ttl_s, max_context_len)
        self.told = {}

    def committed(self, stream, number):
        """The session's tokens as the drafter was told them, None if it is not open."""
        for operation in self.take_operations():
            match operation:
                case Begin(session):
                    self.told[session.session_key] = list(session.token_ids)
                case Extend(key, token_ids):
                    self.told[key] += token_ids
                case End(key):
                    del self.told[key]
        sessions = [self.by_key(key) for key in self.told]
        assert len(sessions) == len(self)
        for session in sessions:
            assert list(session.token_ids) == self.told[session.session_key]
            assert session.prefix_hash == prefix_hash(session.token_ids)
        found = [s for s in sessions if (s.stream, s.number) == (stream, number)]
        assert len(found) <= 1
        return self.told[found[0].session_key] if found else None


def committed(table, stream, number):
    return copy.copy(table.committed(stream, number))


@pytest.fixture
def table():
    return WatchedTable()


@pytest.fixture
def stream(table):
    return table.open_stream()


def kinds(errors):
    return [(e.session, e.epoch, e.kind) for e in errors]


def test_an_open_session_owes_a_draft_and_takes_commits(table, stream):
    assert table.apply(stream, opens(opening(1)), 0.0) == ()
    assert owing(table) == {(stream, 1)}
    table.take(next(iter(table.owing)))
    assert owing(table) == set()
    assert table.apply(stream, commits((1, 3, (8, 9))), 1.0) == ()
    assert committed(table, stream, 1) == [5, 6, 7, 8, 9]
    assert owing(table) == {(stream, 1)}


@pytest.mark.parametrize(
    ("told", "holds"),
    [(0.25, 0.25), (1.0, 1.0), (0.0, 0.0), (math.nan, 0.0), (-1.0, 0.0), (2.0, 0.0)],
)
def test_each_message_says_which_drafts_its_verifier_wants(table, stream, told, holds):
    other = table.open_stream()
    table.apply(stream, TargetBatch(opens=(opening(1),), least_survival=told), 0.0)
    table.apply(other, TargetBatch(opens=(opening(1),), least_survival=0.5), 0.0)
    one, two = sorted(table.sessions, key=lambda session: session.stream)
    assert (table.least_survival(one), table.least_survival(two)) == (holds, 0.5)
    for _ in ("what is owed", "what goes ahead"):
        work = plan_round(table, Limits(4, AheadConfig()), Pace(), 0.0)
        assert [task.request.least_survival for task in work.tasks] == [holds, 0.5]
    table.apply(stream, TargetBatch(), 0.0)
    assert table.least_survival(one) == 0.0
    table.close_stream(stream)
    table.close_stream(other)


@pytest.mark.parametrize(
    ("item", "kind"),
    [
        ((1, 4, (8,)), "InvalidRequestError"),
        ((1, 2, (7, 8)), "InvalidRequestError"),
        ((1, 1, (9, 9)), "InvalidRequestError"),
        ((1, 3, ()), "InvalidRequestError"),
        ((3, 3, (8,)), "UnknownSessionError"),
    ],
    ids=["gap", "overlap", "contradiction", "empty", "unknown"],
)
def test_a_wrong_commit_costs_its_session_alone(table, stream, item, kind):
    table.apply(stream, opens(opening(1), opening(2)), 0.0)
    errors = table.apply(stream, commits(item, (2, 3, (8,))), 1.0)
    assert [(e.session, e.kind) for e in errors] == [(item[0], kind)]
    assert committed(table, stream, item[0]) is None
    assert committed(table, stream, 2) == [5, 6, 7, 8]
    assert table.num_errors == {kind: 1}


def test_a_duplicate_that_agrees_changes_nothing(table, stream):
    table.apply(stream, opens(opening(1)), 0.0)
    table.apply(stream, commits((1, 3, (8, 9))), 1.0)
    assert table.apply(stream, commits((1, 3, (8, 9)), (1, 0, (5,)), (1, 4, (9,))), 2.0) == ()
    assert committed(table, stream, 1) == [5, 6, 7, 8, 9]


@pytest.mark.parametrize(
    "bad",
    [
        opening(1, ()),
        opening(1, num_prompt_tokens=0),
        opening(1, num_prompt_tokens=4),
        opening(1, temperature=math.nan),
        opening(1, temperature=-1.0),
        opening(1, temperature=math.inf),
        opening(1, top_p=0.0),
        opening(1, top_p=math.nan),
    ],
)
def test_a_wrong_open_is_refused(table, stream, bad):
    errors = table.apply(stream, opens(bad, opening(2)), 0.0)
    assert kinds(errors) == [(1, 1, "InvalidRequestError")]
    assert committed(table, stream, 1) is None
    assert committed(table, stream, 2) == [5, 6, 7]


def test_opening_again_replaces(table, stream):
    table.apply(stream, opens(opening(1)), 0.0)
    table.apply(stream, commits((1, 3, (8,))), 0.0)
    first = next(iter(table.owing)).session_key
    assert table.apply(stream, opens(opening(1, (1, 2), epoch=2)), 1.0) == ()
    assert committed(table, stream, 1) == [1, 2]
    assert table.by_key(first) is None
    assert [s.epoch for s in table.owing] == [2]


def test_a_full_table_refuses_and_replaces(table, stream):
    table.apply(stream, opens(*(opening(n) for n in range(8))), 0.0)
    assert kinds(table.apply(stream, opens(opening(8, epoch=3)), 0.0)) == [
        (8, 3, "OverloadedError")
    ]
    assert table.apply(stream, opens(opening(7, epoch=2)), 0.0) == ()
    table.apply(stream, TargetBatch(closes=(0,)), 0.0)
    assert table.apply(stream, opens(opening(8)), 0.0) == ()
    assert len(table) == 8


def test_a_draining_table_takes_nothing_new_and_serves_what_is_open(table, stream):
    table.apply(stream, opens(opening(1)), 0.0)
    table.draining = True
    assert kinds(table.apply(stream, opens(opening(2)), 0.0)) == [(2, 1, "OverloadedError")]
    assert table.apply(stream, commits((1, 3, (8,))), 0.0) == ()
    assert committed(table, stream, 1) == [5, 6, 7, 8]


def test_a_paused_session_takes_commits_and_owes_nothing(table, stream):
    table.apply(stream, opens(opening(1)), 0.0)
    table.apply(stream, TargetBatch(pauses=(1,)), 1.0)
    table.apply(stream, commits((1, 3, (8,))), 2.0)
    assert owing(table) == set()
    table.apply(stream, TargetBatch(resumes=(1,)), 3.0)
    assert owing(table) == {(stream, 1)}
    assert committed(table, stream, 1) == [5, 6, 7, 8]


def test_silence_beyond_the_ttl_closes(table, stream):
    table.apply(stream, opens(opening(1), opening(2)), 0.0)
    table.apply(stream, commits((2, 3, (8,))), 50.0)
    assert table.expire(60.0) == ()
    ((of_stream, error),) = table.expire(61.0)
    assert (of_stream, *kinds([error])) == (stream, (1, 1, "UnknownSessionError"))
    assert committed(table, stream, 2) == [5, 6, 7, 8]


def test_streams_have_their_own_numbers_and_die_alone(table):
    one, two = table.open_stream(), table.open_stream()
    table.apply(one, opens(opening(1)), 0.0)
    table.apply(two, opens(opening(1, (1, 2))), 0.0)
    table.apply(one, commits((1, 3, (8,))), 0.0)
    assert committed(table, two, 1) == [1, 2]
    table.close_stream(one)
    assert committed(table, one, 1) is None
    assert committed(table, two, 1) == [1, 2]
    assert owing(table) == {(two, 1)}


def test_a_context_window_is_kept():
    table = WatchedTable(max_context_len=4)
    stream = table.open_stream()
    errors = table.apply(stream, opens(opening(1), opening(2, range(5))), 0.0)
    assert kinds(errors) == [(2, 1, "InvalidRequestError")]
    assert table.apply(stream, commits((1, 3, (8,))), 0.0) == ()
    assert kinds(table.apply(stream, commits((1, 4, (9,))), 0.0)) == [(1, 1, "InvalidRequestError")]
    assert len(table) == 0


numbers = st.integers(1, 3)
short = st.lists(st.integers(0, 1), max_size=3).map(tuple)
batches = st.builds(
    TargetBatch,
    opens=st.lists(st.builds(opening, numbers, short), max_size=2).map(tuple),
    commits=st.lists(st.builds(CommitTokens, numbers, st.integers(0, 6), short), max_size=3).map(
        tuple
    ),
    pauses=st.lists(numbers, max_size=1).map(tuple),
    resumes=st.lists(numbers, max_size=1).map(tuple),
    closes=st.lists(numbers, max_size=1).map(tuple),
)


@settings(max_examples=100, deadline=None)
@given(st.lists(st.tuples(st.integers(0, 1), batches), max_size=12))
def test_no_message_breaks_the_table(sequence):
    """Whatever comes, the drafter is told a consistent story and no stream touches another."""
    table = WatchedTable(max_sessions=4)
    streams = [table.open_stream(), table.open_stream()]
    for now, (which, batch) in enumerate(sequence):
        other = streams[1 - which]
        before = [committed(table, other, n) for n in (1, 2, 3)]
        table.apply(streams[which], batch, float(now))
        assert [committed(table, other, n) for n in (1, 2, 3)] == before
        assert not any(session.paused for session in table.owing)
        assert len(table) <= 4
    for stream in streams:
        table.close_stream(stream)
    assert committed(table, 0, 0) is None
    assert len(table) == 0
    assert owing(table) == set()
