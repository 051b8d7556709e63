"""The n-gram drafter against its definition, and per-session isolation."""

from __future__ import annotations

import time

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cluster.types import SamplingParams
from engine.drafting.interface import Drafter, DraftRequest, DraftSession
from engine.drafting.ngram import NgramDrafter


def begin(drafter: Drafter, token_ids: list[int] | tuple[int, ...], session_key: int = 1) -> None:
    drafter.begin(DraftSession(session_key, tuple(token_ids), len(token_ids), 0, SamplingParams()))


def draft(drafter: Drafter, num_tokens: int, session_key: int = 1) -> list[int]:
    (nodes,) = drafter.draft([DraftRequest(session_key, num_tokens)])
    assert [node.parent for node in nodes] == list(range(-1, len(nodes) - 1))
    assert all(0.0 <= node.confidence <= 1.0 for node in nodes)
    return [node.token_id for node in nodes]


def definition(token_ids: list[int], max_ngram: int, min_ngram: int, num_tokens: int) -> list[int]:
    """Longest suffix that occurred earlier, its latest earlier occurrence, and what followed it;
    where that runs into the end, on through the proposal itself."""
    for n in range(min(max_ngram, len(token_ids) - 1), min_ngram - 1, -1):
        for start in range(len(token_ids) - n - 1, -1, -1):
            if token_ids[start : start + n] == token_ids[-n:]:
                proposal: list[int] = []
                for i in range(num_tokens):
                    proposal.append([*token_ids, *proposal][start + n + i])
                return proposal
    return []


@settings(max_examples=150, deadline=None)
@given(
    pieces=st.lists(st.lists(st.integers(0, 3), min_size=1, max_size=8), min_size=1, max_size=6),
    max_ngram=st.integers(1, 4),
    min_ngram=st.integers(1, 4),
    num_tokens=st.integers(0, 6),
)
def test_it_proposes_what_its_definition_says(pieces, max_ngram, min_ngram, num_tokens):
    """However the tokens come in."""
    min_ngram = min(min_ngram, max_ngram)
    drafter = NgramDrafter(max_ngram, min_ngram)
    begin(drafter, pieces[0])
    for piece in pieces[1:]:
        drafter.extend(1, piece)
    token_ids = [token_id for piece in pieces for token_id in piece]
    expected = definition(token_ids, max_ngram, min_ngram, num_tokens)
    assert draft(drafter, num_tokens) == expected


def test_repetition_is_drafted_to_full_depth():
    drafter = NgramDrafter(4, 2)
    begin(drafter, [7, 8, 9, 7, 8])
    assert draft(drafter, 16) == [9, 7, 8] * 5 + [9]


def test_nothing_to_propose_is_an_empty_draft():
    drafter = NgramDrafter(4, 2)
    begin(drafter, [1, 2, 3, 4])
    assert draft(drafter, 8) == []
    begin(drafter, [5], session_key=2)
    assert draft(drafter, 8, session_key=2) == []


def test_sessions_share_nothing():
    drafter = NgramDrafter(4, 2)
    begin(drafter, [1, 2, 3, 4, 5, 6], session_key=1)
    begin(drafter, [9, 1, 2], session_key=2)
    assert draft(drafter, 4, session_key=2) == []
    nodes = drafter.draft([DraftRequest(2, 4), DraftRequest(1, 4), DraftRequest(2, 4)])
    assert nodes == [(), (), ()]


def test_an_ended_session_is_gone():
    drafter = NgramDrafter(4, 2)
    begin(drafter, [1, 2, 1, 2])
    drafter.end(1)
    with pytest.raises(KeyError):
        drafter.draft([DraftRequest(1, 4)])
    with pytest.raises(KeyError):
        drafter.extend(1, [3])


def test_confidence_follows_what_became_of_the_drafts():
    """The same match is trusted more after hits than after misses."""

    def confidence_after(following: list[int]) -> float:
        drafter = NgramDrafter(2, 2)
        begin(drafter, [1, 2, 3, 1, 2])
        for token_id in following:
            draft(drafter, 1)
            drafter.extend(1, [token_id])
        drafter.extend(1, [1, 2])
        (nodes,) = drafter.draft([DraftRequest(1, 1)])
        return nodes[0].confidence

    hit, missed = confidence_after([3, 1, 2, 3, 1, 2]), confidence_after([4, 1, 2, 5, 1, 2])
    assert 0.0 < missed < hit < 1.0


def test_a_longer_match_is_trusted_more():
    drafter = NgramDrafter(4, 1)
    begin(drafter, [1, 2, 3, 4, 9, 1, 2, 3, 4], session_key=1)
    begin(drafter, [4, 9, 1, 4], session_key=2)
    (long,), (short,) = drafter.draft([DraftRequest(1, 1), DraftRequest(2, 1)])
    assert long.token_id == short.token_id == 9
    assert long.confidence > short.confidence


def test_a_token_costs_the_same_however_long_the_session_is():
    def time_of_extending(num_tokens: int) -> float:
        drafter = NgramDrafter(4, 2)
        begin(drafter, [i * 7919 % 5003 for i in range(num_tokens)])
        start = time.thread_time()
        for i in range(500):
            drafter.extend(1, [i])
            draft(drafter, 8)
        return time.thread_time() - start

    short, long = (min(time_of_extending(n) for _ in range(3)) for n in (500, 50_000))
    assert long < 8 * short


def test_chains_end_where_they_are_too_unlikely_and_grow_again_with_hits():
    drafter = NgramDrafter(2, 2, min_survival=0.3)
    begin(drafter, [1, 2, 3, 1, 2])
    assert draft(drafter, 8) == [3, 1]  # 2/3 each: the third would survive with 0.296
    for other in range(10, 18):  # The pair comes back, and something new follows each time.
        drafter.extend(1, [other, 1, 2])
        drafter.draft([DraftRequest(1, 8)])
    assert draft(drafter, 8) == []
    for _ in range(30):  # Now the text repeats itself, which no proposal has said.
        drafter.extend(1, [9, 1, 2])
        drafter.draft([DraftRequest(1, 8)])
    assert len(draft(drafter, 8)) == 8
