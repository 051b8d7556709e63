"""Laws of the choice of a verifier."""

from __future__ import annotations

from collections import Counter

from hypothesis import given
from hypothesis import strategies as st

from router.verifier_routing import (
    AFFINITY_SLACK,
    VerifierView,
    choose_verifier,
    prompt_affinity,
)

counts = st.integers(0, 30)
views_of_many = st.lists(
    st.builds(VerifierView, st.text("abcdef", min_size=4), counts, counts, counts),
    min_size=1,
    max_size=6,
    unique_by=lambda view: view.incarnation,
)


@given(views=views_of_many, affinity=st.binary())
def test_the_chosen_is_never_much_busier_than_the_least(
    views: list[VerifierView], affinity: bytes
) -> None:
    loads = {view.incarnation: view.load for view in views}
    chosen = choose_verifier(views, affinity)
    assert chosen is not None
    assert loads[chosen] <= min(loads.values()) + AFFINITY_SLACK


@given(views=views_of_many, affinity=st.binary())
def test_the_order_of_the_views_changes_nothing(views: list[VerifierView], affinity: bytes) -> None:
    assert choose_verifier(views, affinity) == choose_verifier(views[::-1], affinity)


def test_no_verifier_is_no_choice() -> None:
    assert choose_verifier([], b"x") is None


def test_a_new_member_takes_only_its_own_share() -> None:
    views = [VerifierView(f"verifier-{index}") for index in range(4)]
    sessions = [f"session-{index}".encode() for index in range(400)]
    before = {session: choose_verifier(views, session) for session in sessions}
    after = {
        session: choose_verifier([*views, VerifierView("verifier-4")], session)
        for session in sessions
    }
    moved = [session for session in sessions if before[session] != after[session]]
    assert all(after[session] == "verifier-4" for session in moved)
    assert 40 <= len(moved) <= 120
    assert min(Counter(before.values()).values()) >= 60


def test_prompts_with_the_same_beginning_are_neighbours() -> None:
    system = tuple(range(40))
    assert prompt_affinity((*system, 1)) == prompt_affinity((*system, 2))
    assert prompt_affinity((1,)) != prompt_affinity((2,))
