"""Laws of the choice of a verifier."""

from __future__ import annotations

import random
import time
from collections import Counter
from itertools import islice

from hypothesis import given
from hypothesis import strategies as st

from router.verifier_routing import (
    MAX_CANDIDATES,
    HashRing,
    RecentCount,
    VerifierView,
    choose_verifier,
    fleet_mean,
    prompt_affinity,
)

counts = st.integers(0, 30)
views_of_many = st.lists(
    st.builds(VerifierView, st.text("abcdef", min_size=4), counts, counts, counts),
    min_size=1,
    max_size=6,
    unique_by=lambda view: view.incarnation,
)


def ring_of(*members: str) -> HashRing:
    ring = HashRing()
    ring.set_members(set(members))
    return ring


@given(views=views_of_many)
def test_the_chosen_is_never_much_busier_than_the_mean(views: list[VerifierView]) -> None:
    mean = fleet_mean(views)
    chosen = choose_verifier(views, mean)
    [load] = [view.load for view in views if view.incarnation == chosen]
    assert load <= 1.25 * mean.load + 1


@given(views=views_of_many)
def test_the_first_candidate_is_chosen_unless_it_is_over_its_bounds(
    views: list[VerifierView],
) -> None:
    mean = fleet_mean(views)
    first = views[0]
    over = first.load > 1.25 * mean.load + 1
    assert (choose_verifier(views, mean) != first.incarnation) == over


def test_work_that_is_over_before_it_shows_counts_too() -> None:
    views = [VerifierView("a", recent=40.0), VerifierView("b", recent=2.0)]
    assert choose_verifier(views, fleet_mean(views)) == "b"


def test_no_verifier_is_no_choice() -> None:
    assert choose_verifier([], fleet_mean([])) is None
    assert list(ring_of().walk(b"x")) == []


# --- the ring ---------------------------------------------------------------------------------


@given(st.sets(st.text("abcdef", min_size=4), max_size=12), st.binary())
def test_a_walk_meets_every_member_once(members: set[str], affinity: bytes) -> None:
    walked = list(ring_of(*members).walk(affinity))
    assert sorted(walked) == sorted(members)


@given(
    st.lists(st.sets(st.sampled_from("abcdefgh"), max_size=8), min_size=1, max_size=6),
    st.binary(),
)
def test_how_members_came_and_went_does_not_matter(history: list[set[str]], affinity: bytes):
    ring = ring_of()
    for members in history:
        ring.set_members(members)
    assert list(ring.walk(affinity)) == list(ring_of(*history[-1]).walk(affinity))


@given(st.sets(st.sampled_from("abcdefgh"), min_size=2), st.binary())
def test_a_member_that_goes_leaves_the_order_of_the_others(
    members: set[str], affinity: bytes
) -> None:
    gone = min(members)
    before = [name for name in ring_of(*members).walk(affinity) if name != gone]
    assert list(ring_of(*members - {gone}).walk(affinity)) == before


def test_a_new_member_takes_only_its_own_share() -> None:
    members = [f"verifier-{index}" for index in range(4)]
    ring, larger = ring_of(*members), ring_of(*members, "verifier-4")
    sessions = [f"session-{index}".encode() for index in range(400)]
    before = {session: next(ring.walk(session)) for session in sessions}
    after = {session: next(larger.walk(session)) for session in sessions}
    moved = [session for session in sessions if before[session] != after[session]]
    assert all(after[session] == "verifier-4" for session in moved)
    assert 40 <= len(moved) <= 120
    assert min(Counter(before.values()).values()) >= 60


def test_shared_prefixes_meet_their_cache_and_no_replica_is_overloaded() -> None:
    """Without models: 200 requests over 20 prefixes, each over before the next comes."""
    for seed in range(50):
        rng = random.Random(seed)
        members = [f"{rng.getrandbits(64):x}" for _ in range(3)]
        ring, recent = ring_of(*members), {name: RecentCount() for name in members}
        taken: Counter[str] = Counter()
        cached: set[tuple[str, int]] = set()
        num_hits = 0
        for number in range(200):
            prefix, now = rng.randrange(20), 0.01 * number
            candidates = [
                VerifierView(name, recent=recent[name].value(now))
                for name in ring.walk(f"{seed}-{prefix}".encode())
            ]
            chosen = choose_verifier(candidates, fleet_mean(candidates))
            assert chosen is not None
            recent[chosen].add(now)
            taken[chosen] += 1
            num_hits += (chosen, prefix) in cached
            cached.add((chosen, prefix))
        assert num_hits >= 0.8 * 180
        assert max(taken.values()) <= 1.5 * 200 / 3


def test_a_choice_among_a_thousand_looks_at_a_few() -> None:
    members = [f"verifier-{index}" for index in range(1000)]
    ring = ring_of(*members)
    started, num_choices = time.process_time(), 200
    for number in range(num_choices):
        walk = islice(ring.walk(f"{number}".encode()), MAX_CANDIDATES)
        candidates = [VerifierView(name) for name in walk]
        assert choose_verifier(candidates, fleet_mean(candidates)) == candidates[0].incarnation
    assert (time.process_time() - started) / num_choices < 0.005


def test_a_recent_count_fades_by_half_in_its_half_life() -> None:
    recent = RecentCount()
    assert recent.value(0.0) == 0.0
    for _ in range(8):
        recent.add(100.0)
    assert recent.value(100.0) == 8.0
    assert recent.value(130.0) == 4.0


def test_prompts_with_the_same_beginning_are_neighbours() -> None:
    system = tuple(range(40))
    assert prompt_affinity((*system, 1)) == prompt_affinity((*system, 2))
    assert prompt_affinity((1,)) != prompt_affinity((2,))
    assert prompt_affinity((1,), "a") != prompt_affinity((1,), "b")
