"""The suffix drafter against its definition; what is remembered, for whom, and how much."""

from __future__ import annotations

import random
import time

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cluster.types import SamplingParams
from engine.drafting.interface import DraftRequest, DraftSession
from engine.drafting.suffix import SuffixDrafter


def make(
    *,
    min_match: int = 2,
    max_sources: int = 4,
    min_survival: float = 0.0,
    max_remembered_tokens: int = 1000,
    remember_unsalted: bool = False,
) -> SuffixDrafter:
    return SuffixDrafter(
        min_match, max_sources, min_survival, max_remembered_tokens, remember_unsalted
    )


def begin(
    drafter: SuffixDrafter,
    token_ids: list[int],
    session_key: int = 1,
    *,
    tenant: str = "",
    num_prompt_tokens: int = 1,
) -> None:
    drafter.begin(
        DraftSession(
            session_key,
            tuple(token_ids),
            num_prompt_tokens,
            0,
            SamplingParams(),
            tenant=tenant,
        )
    )


def draft(drafter: SuffixDrafter, num_tokens: int, session_key: int = 1) -> list[int]:
    (nodes,) = drafter.draft([DraftRequest(session_key, num_tokens)])
    assert [node.parent for node in nodes] == list(range(-1, len(nodes) - 1))
    assert all(0.0 < node.confidence < 1.0 for node in nodes)
    return [node.token_id for node in nodes]


def generate(drafter: SuffixDrafter, session_key: int, output: list[int], tenant: str) -> None:
    """A whole session of a tenant."""
    begin(drafter, [1], session_key, tenant=tenant)
    for token_id in output:
        drafter.extend(session_key, [token_id])
    drafter.end(session_key)


def definition(token_ids: list[int], min_match: int, num_tokens: int) -> list[int]:
    """What followed the longest suffix that occurred earlier, of equal ones at its latest earlier
    occurrence; where that runs into the end, on through the proposal itself."""
    for n in range(len(token_ids) - 1, min_match - 1, -1):
        for start in range(len(token_ids) - n - 1, -1, -1):
            if token_ids[start : start + n] == token_ids[-n:]:
                proposal: list[int] = []
                for i in range(num_tokens):
                    proposal.append([*token_ids, *proposal][start + n + i])
                return proposal
    return []


pieces = st.lists(st.lists(st.integers(0, 3), min_size=1, max_size=8), min_size=1, max_size=6)


@settings(max_examples=60, deadline=None)
@given(pieces=pieces, min_match=st.integers(1, 4), num_tokens=st.integers(0, 6))
def test_it_proposes_what_its_definition_says(pieces, min_match, num_tokens):
    """However the tokens come in."""
    drafter = make(min_match=min_match, max_sources=64)
    begin(drafter, pieces[0])
    for piece in pieces[1:]:
        draft(drafter, 3)
        drafter.extend(1, piece)
    token_ids = [token_id for piece in pieces for token_id in piece]
    # A match of 16 tokens is as good as any longer one.
    if len(token_ids) < 16:
        assert draft(drafter, num_tokens) == definition(token_ids, min_match, num_tokens)


@settings(max_examples=60, deadline=None)
@given(
    outputs=st.lists(st.lists(st.integers(0, 4), max_size=12), max_size=5),
    pieces=pieces,
    max_sources=st.integers(1, 5),
    max_remembered=st.integers(0, 40),
)
def test_a_proposal_is_always_a_real_continuation(outputs, pieces, max_sources, max_remembered):
    """Of the session's end, in its own tokens or in one output of its tenant."""
    drafter = make(max_sources=max_sources, max_remembered_tokens=max_remembered)
    for number, output in enumerate(outputs, start=2):
        generate(drafter, number, output, "us")
        assert drafter.num_remembered_tokens <= max_remembered
    begin(drafter, pieces[0], tenant="us")
    token_ids = list(pieces[0])
    for piece in pieces[1:]:
        drafter.extend(1, piece)
        token_ids += piece
        proposed = draft(drafter, 5)
        suffix = token_ids[-2:]
        texts = [*outputs, [*token_ids, *proposed]]
        assert not proposed or any(
            text[start : start + 2 + len(proposed)] == suffix + proposed
            for index, text in enumerate(texts)
            for start in range(len(text) - 2 - (index == len(outputs)) * len(proposed))
        )


def test_a_longer_match_wins_over_a_later_one():
    drafter = make()
    begin(drafter, [1, 2, 3, 4, 50, 9, 3, 4, 60, 9, 1, 2, 3, 4])
    assert draft(drafter, 1) == [50]


def test_confidence_comes_from_counts():
    """Matches that agree make it surer; a match that was wrong before, less sure."""

    def confidence(token_ids: list[int]) -> float:
        drafter = make()
        begin(drafter, token_ids)
        (nodes,) = drafter.draft([DraftRequest(1, 1)])
        return nodes[0].confidence

    agreeing = confidence([1, 2, 50, 1, 2, 50, 1, 2, 50, 7, 1, 2])
    divided = confidence([1, 2, 70, 1, 2, 60, 1, 2, 50, 7, 1, 2])
    assert divided < agreeing / 2

    drafter = make()
    begin(drafter, [1, 2, 50, 7, 1, 2])
    (before,) = drafter.draft([DraftRequest(1, 1)])
    for other in range(10, 16):
        drafter.extend(1, [other, 1, 2])
        drafter.draft([DraftRequest(1, 1)])
    (after,) = drafter.draft([DraftRequest(1, 1)])
    assert after[0].confidence < before[0].confidence / 2


def test_an_unlikely_chain_is_cut_but_still_judged():
    drafter = make(min_survival=0.55)
    begin(drafter, [1, 2, 3, 1, 2])
    assert draft(drafter, 8) == [3]  # 2/3, then 3/4 of it
    for _ in range(6):
        drafter.extend(1, [9, 1, 2])
        draft(drafter, 8)
    assert len(draft(drafter, 8)) == 8


def test_a_tenants_own_outputs_are_drafted_from():
    drafter = make()
    generate(drafter, 2, [10, 11, 12, 13, 14, 15], "us")
    begin(drafter, [1, 10, 11], tenant="us")
    assert draft(drafter, 8) == [12, 13, 14, 15]


@pytest.mark.parametrize("tenant", ["them", ""])
def test_no_token_of_one_tenants_output_is_proposed_to_another(tenant):
    drafter = make()
    generate(drafter, 2, [10, 11, 12, 13], "us")
    begin(drafter, [1, 10, 11], tenant=tenant)
    assert draft(drafter, 8) == []


def test_requests_without_a_salt_remember_nothing_unless_that_is_configured():
    forgetful, remembering = make(), make(remember_unsalted=True)
    for drafter in (forgetful, remembering):
        generate(drafter, 2, [10, 11, 12, 13], "")
        begin(drafter, [1, 10, 11])
        begin(drafter, [1, 10, 11], 3, tenant="us")
        assert draft(drafter, 8, 3) == []
    assert draft(forgetful, 8) == []
    assert forgetful.num_remembered_tokens == 0
    assert draft(remembering, 8) == [12, 13]


@settings(max_examples=25, deadline=None)
@given(st.lists(st.tuples(st.sampled_from("abc"), st.integers(1, 9)), max_size=40), st.data())
def test_tenants_never_mix_whatever_comes_and_goes(sessions, data):
    """Each tenant's outputs are of tokens of its own."""
    drafter = make(max_remembered_tokens=30)
    first = {"a": 1000, "b": 2000, "c": 3000}
    for number, (tenant, length) in enumerate(sessions, start=1):
        begin(drafter, [1, 2], number, tenant=tenant, num_prompt_tokens=2)
        for _ in range(length):
            token_id = first[tenant] + data.draw(st.integers(0, 2))
            drafter.extend(number, [token_id])
            proposed = draft(drafter, 4, number)
            assert all(first[tenant] <= i < first[tenant] + 3 for i in proposed)
        drafter.end(number)
        assert drafter.num_remembered_tokens <= 30


def test_the_prompt_of_a_session_is_not_remembered():
    drafter = make()
    begin(drafter, [50, 51, 52, 53], 2, tenant="us", num_prompt_tokens=4)
    drafter.extend(2, [60, 61, 62])
    drafter.end(2)
    begin(drafter, [1, 50, 51], tenant="us")
    assert draft(drafter, 4) == []
    begin(drafter, [1, 60, 61], 3, tenant="us")
    assert draft(drafter, 4, 3) == [62]


def test_outputs_do_not_run_into_one_another():
    drafter = make()
    generate(drafter, 2, [10, 11, 12], "us")
    generate(drafter, 3, [20, 21, 22], "us")
    begin(drafter, [1, 11, 12], tenant="us")
    assert draft(drafter, 8) == []
    begin(drafter, [1, 12, 20], 4, tenant="us")
    assert draft(drafter, 8, 4) == []


def test_the_tenant_not_used_for_longest_forgets_first():
    drafter = make(max_remembered_tokens=12)
    generate(drafter, 2, [10, 11, 12], "old")
    generate(drafter, 3, [20, 21, 22], "new")
    generate(drafter, 4, [13, 14, 15], "old")
    generate(drafter, 5, [23, 24, 25], "new")
    assert drafter.num_remembered_tokens == 12
    expected = {("old", 10): [], ("old", 13): [15], ("new", 20): [22], ("new", 23): [25]}
    for key, ((tenant, start), proposed) in enumerate(expected.items(), start=10):
        begin(drafter, [1, start, start + 1], key, tenant=tenant)
        assert draft(drafter, 4, key) == proposed


def test_a_match_whose_text_was_forgotten_meanwhile_proposes_nothing():
    drafter = make(max_remembered_tokens=8)
    generate(drafter, 2, [10, 11, 12, 13, 14, 15], "us")
    begin(drafter, [1, 10, 11], tenant="us")
    assert draft(drafter, 8) == [12, 13, 14, 15]
    generate(drafter, 3, [20, 21, 22, 23, 24], "us")
    assert draft(drafter, 8) == []
    drafter.extend(1, [12, 13])
    assert draft(drafter, 8) == []


def test_memory_is_bounded_by_bytes_too():
    """Indexes go with the tokens that they point to."""
    rng = random.Random(1)
    drafter = make(max_remembered_tokens=2000)
    for number in range(2, 60):
        tenant = rng.choice("abc")
        generate(drafter, number, [rng.randrange(5000) for _ in range(200)], tenant)
    memory = drafter._memory
    for tenant in memory._tenants.values():
        text = tenant.text
        assert len(text._tokens) == len(text._earlier) == sum(tenant.lengths)
        assert len(text._latest) <= len(text)
    assert drafter.num_remembered_tokens <= 2000
    assert not drafter._sessions


def test_a_token_costs_the_same_however_long_the_session_is():
    def time_of_extending(num_tokens: int) -> float:
        drafter = make()
        begin(drafter, [i * 7919 % 503 for i in range(num_tokens)])
        start = time.process_time()
        for i in range(500):
            drafter.extend(1, [i])
            draft(drafter, 8)
        return time.process_time() - start

    short, long = (min(time_of_extending(n) for _ in range(3)) for n in (500, 50_000))
    assert long < 8 * short


def test_an_ended_session_is_gone():
    drafter = make()
    begin(drafter, [1, 2, 1, 2])
    drafter.end(1)
    with pytest.raises(KeyError):
        drafter.draft([DraftRequest(1, 4)])
