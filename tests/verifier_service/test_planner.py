"""Laws of the planner."""

from __future__ import annotations

import itertools
import math
import random
import statistics
import time
from collections.abc import Callable, Sequence
from functools import cache

import pytest
from hypothesis import given
from hypothesis import strategies as st

from verifier_service.planner import (
    PROBE_EVERY,
    Acceptance,
    Drafts,
    DraftValue,
    StepCost,
    WaitPolicy,
    plan_depths,
    worth_waiting,
)

PROFILE = {1: 35.1, 2: 35.2, 4: 35.3, 8: 41.9, 16: 55.0, 32: 75.0, 64: 140.0, 128: 270.0}
SIZES = (1, 2, 3, 6, 8, 24, 64, 100, 128, 500)
KEY = "drafter"

milliseconds = st.floats(0.5, 500.0)


def table(ms: Callable[[int], float], size: int = 64) -> StepCost:
    return StepCost({n: ms(n) for n in range(1, size + 1)})


def chains(
    max_chains: int, max_len: int, chance: st.SearchStrategy[float]
) -> st.SearchStrategy[list[list[float]]]:
    chain = st.lists(chance, max_size=max_len).map(lambda c: sorted(c, reverse=True))
    return st.lists(chain, max_size=max_chains)


# --- T -----------------------------------------------------------------------------------------


def test_cost_is_its_profile_and_linear_between_and_beyond() -> None:
    cost = StepCost(PROFILE)
    assert [cost(n) for n in PROFILE] == pytest.approx(list(PROFILE.values()))
    assert cost(24) == pytest.approx(65.0)
    assert cost(192) == pytest.approx(400.0)
    assert StepCost({4: 30.0})(1) == StepCost({4: 30.0})(9) == 30.0


@given(
    st.dictionaries(st.integers(1, 200), milliseconds, min_size=1, max_size=8),
    st.lists(st.tuples(st.integers(1, 400), st.floats(0.0, 1e5)), max_size=30),
)
def test_cost_never_declines_whatever_is_observed(
    points: dict[int, float], observations: list[tuple[int, float]]
) -> None:
    cost = StepCost(points)
    for num_tokens, ms in observations:
        cost.observe(num_tokens, ms)
    times = [cost(n) for n in range(400)]
    assert times[0] > 0
    assert all(b >= a * (1 - 1e-12) for a, b in itertools.pairwise(times))
    assert cost.span(0, 400) == times
    assert cost.span(37, 100) == times[37:137]


@pytest.mark.parametrize("points", [{}, {0: 1.0}, {1: 0.0}])
def test_cost_refuses_what_is_no_profile(points: dict[int, float]) -> None:
    with pytest.raises(ValueError, match="no profile"):
        StepCost(points)


@pytest.mark.parametrize("factor", [10.0, 0.1])
@pytest.mark.parametrize("num_tokens", SIZES)
def test_one_hiccup_moves_the_cost_little(num_tokens: int, factor: float) -> None:
    cost = StepCost(PROFILE)
    before = [cost(n) for n in SIZES]
    cost.observe(num_tokens, factor * cost(num_tokens))
    assert [cost(n) for n in SIZES] == pytest.approx(before, rel=0.2)


def test_a_hiccup_far_beyond_a_flat_profile_moves_the_cost_little() -> None:
    cost = StepCost({1: 35.0, 128: 36.0})
    before = cost(4_000)
    cost.observe(4_000, 10 * before)
    assert cost(4_000) == pytest.approx(before, rel=0.2)


@pytest.mark.parametrize("factor", [0.5, 1.3, 2.0])
@pytest.mark.parametrize("num_tokens", SIZES)
def test_cost_follows_a_drift(num_tokens: int, factor: float) -> None:
    cost = StepCost(PROFILE)
    now = factor * cost(num_tokens)
    for _ in range(30):
        cost.observe(num_tokens, now)
    assert cost(num_tokens) == pytest.approx(now, rel=0.08)


def test_larger_sizes_share_a_drift_and_smaller_ones_in_part() -> None:
    """So the price of a draft, T(2n) / T(n), is that of the profile until larger steps are seen."""
    for seen in (1, 8):
        cost = StepCost(PROFILE)
        price = cost(2 * seen) / cost(seen)
        for _ in range(200):
            cost.observe(seen, 1.5 * PROFILE[seen])
        assert cost(2 * seen) / cost(seen) == pytest.approx(price, rel=0.01)
        assert cost(64) == pytest.approx(1.5 * PROFILE[64], rel=0.05)
    cost = StepCost(PROFILE)
    for _ in range(60):
        cost.observe(64, 1.5 * PROFILE[64])
    assert 1.1 * PROFILE[1] < cost(1) < 1.45 * PROFILE[1]


def test_sizes_drift_apart() -> None:
    cost = StepCost(PROFILE)
    for _ in range(500):
        cost.observe(1, PROFILE[1])
        cost.observe(64, 1.5 * PROFILE[64])
    assert cost(1) == pytest.approx(PROFILE[1], rel=0.05)
    assert cost(64) == pytest.approx(1.5 * PROFILE[64], rel=0.05)


BEFORE_CONTEXT = {1: 20.0, 8: 22.0, 16: 26.0, 32: 36.0, 64: 60.0, 128: 110.0}
ROW_MS = 0.35e-3
"""What a token of context adds to each token of a step."""


def in_context(num_tokens: int, context_len: int) -> float:
    return StepCost(BEFORE_CONTEXT)(num_tokens) + num_tokens * ROW_MS * context_len


def test_context_is_paid_for_each_token() -> None:
    cost = StepCost(BEFORE_CONTEXT, ROW_MS)
    for context_len in (0, 512, 16_384):
        cost.context_len = context_len
        expected = [in_context(n, context_len) for n in SIZES]
        assert [cost(n) for n in SIZES] == pytest.approx(expected)
        assert cost.span(3, 40) == pytest.approx([cost(n) for n in range(3, 43)])
        assert cost.knee() == StepCost(BEFORE_CONTEXT).knee()


@pytest.mark.parametrize("measured", [0.8, 1.0, 1.25])
@pytest.mark.parametrize("chance", [0.4, 0.7, 0.95])
@pytest.mark.parametrize("num_sequences", [1, 4, 16])
@pytest.mark.parametrize("context_len", [512, 2_048, 8_192, 16_384])
def test_behind_a_long_context_drafting_is_no_loss(
    context_len: int, num_sequences: int, chance: float, measured: float
) -> None:
    """Though what context costs was measured a fourth too high or too low."""
    chains = [[chance ** (i + 1) for i in range(6)]] * num_sequences

    def speed(depths: tuple[int, ...]) -> float:
        expected = num_sequences + sum(sum(chains[0][:depth]) for depth in depths)
        return expected / in_context(num_sequences + sum(depths), context_len)

    cost = StepCost(BEFORE_CONTEXT, measured * ROW_MS)
    cost.context_len = context_len
    for _ in range(60):
        depths = plan_depths(cost, num_sequences, num_sequences, chains)
        num_tokens = num_sequences + sum(depths)
        cost.observe(num_tokens, in_context(num_tokens, context_len))
    informed = StepCost(BEFORE_CONTEXT, ROW_MS)
    informed.context_len = context_len
    best = plan_depths(informed, num_sequences, num_sequences, chains)
    assert speed(depths) >= 0.95 * speed(best)
    assert speed(depths) >= 0.97 * speed((0,) * num_sequences)


def test_knee() -> None:
    assert StepCost(PROFILE).knee() == 6
    assert StepCost({1: 10.0, 8: 10.0}).knee() == 8
    assert StepCost({1: 10.0, 2: 20.0}).knee() == 1


@given(st.dictionaries(st.integers(1, 60), st.integers(10, 90).map(float), min_size=1, max_size=8))
def test_knee_is_the_last_size_within_a_tenth(points: dict[int, float]) -> None:
    cost = StepCost(points)
    knee = cost.knee()
    assert cost(knee) <= 1.1 * cost(1) * (1 + 1e-9)
    assert knee == max(points) or cost(knee + 1) >= 1.1 * cost(1) * (1 - 1e-9)


# --- depths ------------------------------------------------------------------------------------


def goodput(
    cost: StepCost,
    other: int,
    base: int,
    survivals: Sequence[Sequence[float]],
    depths: Sequence[int],
) -> float:
    gain = sum(sum(chain[:depth]) for chain, depth in zip(survivals, depths, strict=True))
    return (base + gain) / cost(other + sum(depths))


@given(
    st.lists(st.integers(1, 40), min_size=1, max_size=16),
    st.integers(0, 6),
    st.integers(0, 4),
    chains(3, 4, st.integers(0, 16).map(lambda n: n / 16)),
)
def test_plan_is_the_best_of_all_depth_vectors(
    steps: list[int], other: int, base: int, survivals: list[list[float]]
) -> None:
    # Sixteenths and whole ms: every sum is exact, so equal plans are equal.
    cost = StepCost(dict(enumerate(map(float, itertools.accumulate(steps, max)), start=1)))
    plan = plan_depths(cost, other, base, survivals)
    rivals = list(itertools.product(*(range(len(chain) + 1) for chain in survivals)))
    values = [goodput(cost, other, base, survivals, depths) for depths in rivals]
    assert goodput(cost, other, base, survivals, plan) == max(values)
    fewest = min(sum(d) for d, v in zip(rivals, values, strict=True) if v == max(values))
    assert sum(plan) == fewest


def test_a_first_decline_is_not_the_end() -> None:
    stairs = table(lambda n: 10.0 if n == 1 else 16.0)
    assert plan_depths(stairs, 1, 1, [[0.5]]) == (0,)
    assert plan_depths(stairs, 1, 1, [[0.5, 0.5, 0.5]]) == (3,)


def test_deep_where_time_is_flat_and_none_where_it_rises_faster_than_drafts_pay() -> None:
    drafts = [[0.5, 0.2, 0.01], [0.9, 0.8]]
    assert plan_depths(table(lambda n: 30.0), 2, 2, drafts) == (3, 2)
    assert plan_depths(table(lambda n: 30.0 * n), 2, 2, drafts) == (0, 0)


def test_a_plan_for_64_sequences_takes_under_half_a_millisecond() -> None:
    rng, cost = random.Random(3), StepCost(PROFILE)
    survivals = [sorted((rng.random() for _ in range(8)), reverse=True) for _ in range(64)]
    took_s = []
    for _ in range(50):
        started = time.process_time()
        plan_depths(cost, 64, 64, survivals)
        took_s.append(time.process_time() - started)
    assert min(took_s) < 0.0005


def test_nothing_to_verify() -> None:
    cost = StepCost(PROFILE)
    assert plan_depths(cost, 3, 3, []) == ()
    assert plan_depths(cost, 3, 3, [[], [0.9], []]) == (0, 1, 0)
    assert plan_depths(cost, 3, 3, [[0.0]]) == (0,)


@given(
    st.integers(1, 40),
    st.integers(1, 30),
    chains(4, 6, st.floats(0.0, 0.99)),
)
def test_fewer_drafts_as_more_sequences_decode(
    flat_until: int, per_token: int, survivals: list[list[float]]
) -> None:
    """For a roofline: flat, then a line. It is no law of every convex T."""
    cost = table(lambda n: 100.0 + per_token * max(0, n - flat_until) / 10)
    before = sum(plan_depths(cost, 1, 1, survivals))
    for load in range(2, 40):
        plan = plan_depths(cost, load, load, survivals)
        if sum(plan) > before:  # only between equals
            lower = sorted((s for chain in survivals for s in chain), reverse=True)[:before]
            assert (load + sum(lower)) / cost(load + before) == pytest.approx(
                goodput(cost, load, load, survivals, plan)
            )
        before = sum(plan)


def test_a_joining_prompt_counts_in_time_alone() -> None:
    drafts = [[0.9, 0.8, 0.7]]
    assert plan_depths(table(lambda n: 30.0), 1, 1, drafts) == (3,)
    assert plan_depths(table(lambda n: 30.0), 33, 1, drafts) == (3,)
    cliff = table(lambda n: 30.0 if n <= 32 else 300.0)
    assert plan_depths(cliff, 30, 1, drafts) == (2,)
    assert plan_depths(cliff, 32, 1, drafts) == (0,)
    assert plan_depths(cliff, 33, 1, drafts) == (3,)  # the long step is paid anyway


# --- acceptance --------------------------------------------------------------------------------


def observe(
    acceptance: Acceptance, rng: random.Random, rate: float, confidence: float, steps: range
) -> None:
    """Verify a chain of four in each step, of which each next is accepted at `rate`."""
    for step in steps:
        num_accepted = next((i for i in range(4) if rng.random() >= rate), 4)
        acceptance.record(KEY, [confidence] * 4, num_accepted, step)


def test_acceptance_starts_with_the_drafters_word() -> None:
    acceptance = Acceptance()
    assert acceptance.conditional(KEY, 0.7, 0) == pytest.approx(0.7)
    assert acceptance.survivals(KEY, [0.7, 0.5], 0) == pytest.approx((0.7, 0.35))
    assert acceptance.survivals(KEY, [], 0) == ()


@pytest.mark.parametrize(("confidence", "rate"), [(0.95, 0.4), (0.3, 0.8), (1.0, 0.97)])
def test_acceptance_converges_forgets_and_returns_to_its_prior(
    confidence: float, rate: float
) -> None:
    acceptance, rng = Acceptance(), random.Random(1)
    observe(acceptance, rng, rate, confidence, range(600))
    assert acceptance.conditional(KEY, confidence, 600) == pytest.approx(rate, abs=0.08)
    assert acceptance.conditional("another", confidence, 600) == pytest.approx(
        confidence, abs=0.011
    )
    observe(acceptance, rng, 1.0 - rate, confidence, range(600, 1_800))
    learnt = acceptance.conditional(KEY, confidence, 1_800)
    assert learnt == pytest.approx(1.0 - rate, abs=0.11)
    assert acceptance.conditional(KEY, confidence, 1_880) == learnt
    assert acceptance.conditional(KEY, confidence, 6_000) == pytest.approx(confidence, abs=0.011)


def test_only_drafts_up_to_the_first_refusal_count() -> None:
    acceptance = Acceptance()
    acceptance.record(KEY, [0.95, 0.75, 0.55], 1, 1)
    assert acceptance.conditional(KEY, 0.95, 1) > 0.95
    assert acceptance.conditional(KEY, 0.75, 1) < 0.75
    assert acceptance.conditional(KEY, 0.55, 1) == pytest.approx(0.55)


@given(
    st.lists(st.floats(0.0, 1.0), min_size=1, max_size=8),
    st.lists(st.integers(0, 8), max_size=40),
)
def test_no_chance_is_ever_certain(confidences: list[float], verdicts: list[int]) -> None:
    acceptance = Acceptance()
    for step, num_accepted in enumerate(verdicts):
        acceptance.record(KEY, confidences, num_accepted, step)
    assert all(0 < acceptance.conditional(KEY, c, 40) < 1 for c in confidences)
    survivals = acceptance.survivals(KEY, confidences, 40)
    assert 0 < survivals[-1] <= survivals[0] < 1
    assert list(survivals) == sorted(survivals, reverse=True)


# --- waiting -----------------------------------------------------------------------------------

FLAT, FULL_CORE = {1: 40.0, 256: 40.0}, {1: 25.0, 2: 32.0, 8: 65.0, 32: 217.0, 64: 425.0}
GIVES_WAY = {1: 45.0, 8: 46.0, 16: 48.0, 24: 52.0, 32: 60.0, 48: 82.0, 64: 106.0, 128: 200.0}
STAIRS = {1: 20.0, 8: 20.0, 9: 30.0, 16: 30.0, 17: 44.0, 32: 44.0, 33: 80.0, 64: 80.0}

values = st.builds(
    lambda first, more, rows: DraftValue(first * (1 + more), first, 1 + more + rows),
    st.floats(0.0, 1.0),
    st.floats(0.0, 6.0),
    st.floats(0.0, 6.0),
)


def waiting_rate(cost: StepCost, num: int, length: int, chance: float, wait_ms: float) -> float:
    """Tokens per ms of `num` sequences that wait for a draft of `length` in each step."""
    accepted = sum(chance**position for position in range(1, length + 1))
    return num * (1 + accepted) / (cost(num + num * length) + wait_ms)


@cache
def odds_of_holding(num: int, chance: float) -> list[float]:
    """Of `num` sequences that never wait, the odds that so many have something at hand: step by
    step until these settle."""
    odds, mean = [1.0] + [0.0] * num, [0.0] * (num + 1)
    for step in range(200):
        following = [0.0] * (num + 1)
        for held, likely in enumerate(odds):
            mean[held] += likely / 100 if step >= 100 else 0.0
            without = num - held
            for hits in range(without + 1):
                ways = math.comb(without, hits) * chance**hits * (1 - chance) ** (without - hits)
                following[hits] += likely * ways
        odds = following
    return mean


def going_rate(cost: StepCost, num: int, length: int, chance: float) -> float:
    """The same without waits; or without drafts, if that is better."""
    odds = odds_of_holding(num, chance)
    accepted = sum(chance**position for position in range(1, length))
    tokens = sum(likely * (num + held * accepted) for held, likely in enumerate(odds))
    ms = sum(likely * cost(num + held * (length - 1)) for held, likely in enumerate(odds))
    return max(tokens / ms, num / cost(num))


@pytest.mark.parametrize(
    ("profile", "least", "least_mean"),
    [(FLAT, 0.999, 1.0), (GIVES_WAY, 0.99, 1.0), (FULL_CORE, 0.97, 0.999), (STAIRS, 0.8, 0.99)],
    ids=["flat", "gives way", "full core", "stairs"],
)
def test_waiting_is_chosen_where_it_is_faster_in_the_long_run(
    profile: dict[int, float], least: float, least_mean: float
) -> None:
    cost, shares, num_waits = StepCost(profile), [], 0
    grid = itertools.product((1, 2, 8, 16), (1, 2, 4, 6), (0.2, 0.5, 0.7, 0.95), (0.5, 5, 10, 30))
    for num, length, chance, wait_ms in grid:
        waiting = waiting_rate(cost, num, length, chance, wait_ms)
        going = going_rate(cost, num, length, chance)
        accepted = sum(chance**position for position in range(1, length + 1))
        due = [DraftValue(accepted, chance, length)] * num
        waits = worth_waiting(cost, num, Drafts(), due, wait_ms)
        shares.append((waiting if waits else going) / max(waiting, going))
        num_waits += waits
    assert 0 < num_waits < len(shares)
    assert min(shares) >= least
    assert statistics.geometric_mean(shares) >= least_mean - 1e-9


def test_drafts_that_come_in_the_meantime_are_not_waited_for_as_if_they_were_lost() -> None:
    """Against a step without drafts the wait would pay, against what late ones bring it does
    not."""
    cost, due = StepCost(FLAT), [DraftValue(expected=1.2, first=0.6, rows=4.0)] * 4
    assert (4 + 4 * 1.2) / (40.0 + 30.0) > 4 / 40.0
    assert not worth_waiting(cost, 4, Drafts(), due, 30.0)
    assert worth_waiting(cost, 4, Drafts(), due, 5.0)


def test_a_longer_step_counts_in_what_a_wait_is_worth() -> None:
    due = [DraftValue(expected=1.2, first=0.6, rows=4.0)] * 8
    assert worth_waiting(StepCost(FLAT), 24, Drafts(), due, 5.0)
    assert not worth_waiting(StepCost(GIVES_WAY), 24, Drafts(), due, 5.0)


@given(st.integers(1, 64), st.lists(values, max_size=8), st.floats(0.0, 100.0))
def test_waiting(num_decoding: int, due: list[DraftValue], wait_ms: float) -> None:
    cost, nothing = StepCost(GIVES_WAY), DraftValue(0.0, 0.0, 0.0)
    assert not worth_waiting(cost, num_decoding, Drafts(), [nothing] * len(due), wait_ms)
    if worth_waiting(cost, num_decoding, Drafts(), due, wait_ms):
        assert worth_waiting(cost, num_decoding, Drafts(), due, wait_ms / 2)
        assert sum(value.expected for value in due) > 0
        assert wait_ms < 64 * StepCost(GIVES_WAY)(1)


def test_what_is_at_hand_is_not_expected_twice() -> None:
    value = DraftValue(expected=2.0, first=0.8, rows=3.0)
    assert value.beyond(Drafts()) == value
    assert value.beyond(Drafts(1.5, 2.0)) == DraftValue(0.5, 0.5, 1.0)
    assert value.beyond(Drafts(1.5, 3.0)) == DraftValue(0.0, 0.0, 0.0)


def test_a_new_sequence_is_tried_given_up_and_probed() -> None:
    policy, value, cost = WaitPolicy(), DraftValue(), StepCost(FLAT)
    assert policy.waits(1, cost, 1, Drafts(), [value])
    for _ in range(20):
        policy.observe_wait(10.0)
        value.observe(0, 4)
    assert policy.wait_ms == pytest.approx(10.0)

    def waited(steps: range) -> list[int]:
        return [step for step in steps if policy.waits(step, cost, 1, Drafts(), [value])]

    assert waited(range(2, 66)) == [16, 32, 48, 64]
    assert waited(range(64, 65)) == [64]  # a step that probes may be asked about again
    assert not policy.waits(65 + PROBE_EVERY, cost, 1, Drafts(), [])
    policy.observe_verdict(70)  # what drafts are worth is seen without a probe
    assert waited(range(71, 90)) == [70 + PROBE_EVERY]
    value.observe(4, 4)  # the probe found that the text repeats itself
    assert policy.waits(91, cost, 1, Drafts(), [value])


def test_waits_that_grow_are_noticed() -> None:
    policy, cost, due = WaitPolicy(), StepCost(FLAT), [DraftValue(1.5, 0.7, 4.0)]
    policy.observe_wait(5.0)
    assert policy.waits(1, cost, 2, Drafts(), due)
    for _ in range(30):
        policy.observe_wait(40.0)
    assert not policy.waits(1, cost, 2, Drafts(), due)
