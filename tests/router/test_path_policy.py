"""Laws of the path policy."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from cluster.config import PathPolicyConfig
from cluster.load import (
    Aged,
    ClusterLoad,
    DrafterLoad,
    DrafterState,
    LocalDrafterLoad,
    VerifierLoad,
)
from cluster.types import Path
from router.path_policy import (
    PROBE_EVERY,
    PathDecision,
    PathPolicy,
    PathReason,
    ServiceTier,
    SpeculationMode,
    with_probes,
)

CONFIG = PathPolicyConfig()
LIMITED = PathPolicyConfig(plain_above_running=16, speculative_below_running=12)
AUTO, ON, OFF = SpeculationMode.AUTO, SpeculationMode.ON, SpeculationMode.OFF
CHEAP, DEAR = 0.2, 0.9


def load(
    *running: int,
    price: float = CHEAP,
    gain: float | None = None,
    age_s: float = 0.0,
    drafter: DrafterState | None = DrafterState.READY,
) -> ClusterLoad:
    verifiers = {
        f"v{index}": Aged(VerifierLoad(running=count, draft_price=price, draft_gain=gain), age_s)
        for index, count in enumerate(running)
    }
    drafters = {"d": Aged(DrafterLoad("d", drafter), age_s)} if drafter else {}
    return ClusterLoad(verifiers, drafters)


loads = st.builds(
    lambda running, price, gain, age_s, drafter: load(
        *running, price=price, gain=gain, age_s=age_s, drafter=drafter
    ),
    st.lists(st.integers(0, 40), max_size=3),
    st.floats(0, 2),
    st.none() | st.floats(-1, 4),
    st.sampled_from([0.0, 1.0, 5.0]),
    st.sampled_from([None, *DrafterState]),
)
histories = st.lists(st.tuples(st.floats(0, 3), loads, st.sampled_from(SpeculationMode)))


def settled(report: ClusterLoad, config: PathPolicyConfig = CONFIG) -> PathPolicy:
    """A policy that has seen this load first."""
    policy = PathPolicy(config, 0.0)
    policy.observe(report, 0.0)
    return policy


@given(history=histories)
def test_a_request_that_says_on_or_off_gets_it(history: list) -> None:
    policy, now = PathPolicy(CONFIG, 0.0), 0.0
    for pause_s, report, mode in history:
        now += pause_s
        for tier in ServiceTier:
            path = policy.decide(report, mode, now, tier=tier).path
            assert mode is not ON or path is Path.SPECULATIVE
            assert mode is not OFF or path is Path.PLAIN


@given(history=histories)
def test_auto_is_plain_without_fresh_load_or_a_ready_drafter(history: list) -> None:
    policy, now = PathPolicy(CONFIG, 0.0), 0.0
    for pause_s, report, _ in history:
        now += pause_s
        fresh = any(aged.age_s <= CONFIG.max_load_age_s for aged in report.verifiers.values())
        ready = any(a.value.state is DrafterState.READY for a in report.drafters.values())
        for tier in ServiceTier:
            decision = policy.decide(report, AUTO, now, tier=tier)
            assert (fresh and ready) or with_probes([decision])[0].path is Path.PLAIN
            assert decision.reason


@given(history=histories)
def test_switches_by_load_keep_the_dwell(history: list) -> None:
    policy, now, last_switch = PathPolicy(CONFIG, 0.0), 0.0, None
    for pause_s, report, _ in history:
        now += pause_s
        before = policy.mode
        policy.observe(report, now)
        if policy.mode is not before:
            urgent = policy.decision.code in (
                PathReason.NO_REPORT,
                PathReason.STALE_REPORT,
                PathReason.NO_DRAFTER,
            )
            assert urgent or last_switch is None or now - last_switch >= CONFIG.min_dwell_s
            last_switch = now
        assert policy.since_s(now) >= 0


@given(history=histories)
def test_the_same_history_gives_the_same_decisions(history: list) -> None:
    one, other, now = PathPolicy(CONFIG, 0.0), PathPolicy(CONFIG, 0.0), 0.0
    for pause_s, report, mode in history:
        now += pause_s
        assert one.decide(report, mode, now) == other.decide(report, mode, now)


# --- by value ---------------------------------------------------------------------------------


@pytest.mark.parametrize("gain", [None, -0.005, 0.0, 5.0])
@pytest.mark.parametrize("running", [1, 64])
def test_where_drafts_are_cheap_requests_speculate(gain: float | None, running: int) -> None:
    assert settled(load(running, price=CHEAP, gain=gain)).mode is Path.SPECULATIVE


def test_where_making_drafts_loses_more_than_they_bring_requests_go_plain_though_they_are_cheap():
    policy = settled(load(16))
    policy.observe(load(16, gain=-0.04), 10.0)
    assert (policy.mode, policy.decision.code) == (Path.PLAIN, PathReason.DRAFTS_COST)
    policy.observe(load(16, gain=-0.015), 20.0)
    assert policy.mode is Path.PLAIN, "not much better yet"
    policy.observe(load(2, gain=-0.005), 30.0)
    assert policy.mode is Path.SPECULATIVE


@pytest.mark.parametrize(("gain", "path"), [(-0.1, Path.PLAIN), (0.02, Path.PLAIN), (0.5, None)])
def test_where_drafts_are_dear_their_gain_decides(gain: float, path: Path | None) -> None:
    policy = settled(load(4))
    policy.observe(load(32, price=DEAR, gain=gain), 10.0)
    assert policy.mode is (path or Path.SPECULATIVE)


def test_the_gain_of_probes_brings_speculation_back() -> None:
    policy = settled(load(32, price=DEAR, gain=0.0))
    assert policy.mode is Path.PLAIN
    assert policy.observe(load(32, price=DEAR, gain=0.4), 10.0)
    assert policy.mode is Path.SPECULATIVE
    assert "gain a sequence 0.40 tokens a step at 32.0 running" in policy.reason


@given(
    reports=st.lists(
        st.tuples(
            st.floats(CONFIG.speculative_below_price + 0.01, 2.0),
            st.none() | st.floats(CONFIG.plain_below_gain, CONFIG.speculative_above_gain),
        )
    )
)
def test_between_the_thresholds_the_mode_stays(reports: list) -> None:
    for first in (load(1), load(40, price=DEAR, gain=0.0)):
        policy = settled(first)
        mode = policy.mode
        for index, (price, gain) in enumerate(reports):
            policy.observe(load(9, price=price, gain=gain), 10.0 * (index + 1))
            assert policy.mode is mode


def test_busy_verifiers_weigh_more_than_idle_ones() -> None:
    busy = VerifierLoad(running=60, draft_price=DEAR, draft_gain=0.0)
    idle = VerifierLoad(running=0, draft_price=0.1)
    fleet = {"busy": Aged(busy, 0.0), "idle": Aged(idle, 0.0)}
    drafters = {"d": Aged(DrafterLoad("d", DrafterState.READY), 0.0)}
    assert settled(ClusterLoad(fleet, drafters)).mode is Path.PLAIN


def test_a_drafter_inside_a_verifier_is_enough() -> None:
    drafts = VerifierLoad(running=1, draft_price=0.1, local_drafters=(LocalDrafterLoad("suffix"),))
    assert settled(ClusterLoad({"v": Aged(drafts, 0.0)})).mode is Path.SPECULATIVE
    predicts = VerifierLoad(running=1, local_drafters=(LocalDrafterLoad("prediction"),))
    assert settled(ClusterLoad({"v": Aged(predicts, 0.0)})).mode is Path.PLAIN


def test_flex_goes_plain_first_and_priority_last() -> None:
    policy = PathPolicy(CONFIG, 0.0)
    for tick in range(1, 300):  # drafts gain less and less
        gain = 0.6 * math.exp(-tick / 50)
        report = load(30, price=0.7, gain=gain)
        policy.observe(report, 3.0 * tick)
        flex, default, priority = (
            policy.of_tier(tier).path is Path.SPECULATIVE
            for tier in (ServiceTier.FLEX, ServiceTier.DEFAULT, ServiceTier.PRIORITY)
        )
        assert priority >= default >= flex
    assert (flex, default, priority) == (False, False, True)
    seen = {policy.of_tier(tier).reason for tier in ServiceTier}
    assert len(seen) == 3, "each with the thresholds it was measured by"


# --- probes -----------------------------------------------------------------------------------

PLAIN_BY_VALUE = PathDecision(Path.PLAIN, "they cost more", PathReason.DRAFTS_COST)
PLAIN_BY_LIMIT = PathDecision(Path.PLAIN, "too many", PathReason.HIGH_LOAD)


@given(
    num_new=st.integers(1, 64), num_others=st.integers(0, 100), num_speculating=st.integers(0, 5)
)
def test_one_of_sixteen_is_a_probe(num_new: int, num_others: int, num_speculating: int) -> None:
    decisions = with_probes([PLAIN_BY_VALUE] * num_new, num_others, num_speculating)
    probes = [decision for decision in decisions if decision.code is PathReason.PROBE]
    wanted = math.ceil((num_new + num_others) / PROBE_EVERY)
    assert len(probes) == min(num_new, max(0, wanted - num_speculating))
    assert decisions[: len(probes)] == probes, "the oldest"
    assert all(probe.path is Path.SPECULATIVE for probe in probes)
    assert all("they cost more" in probe.reason for probe in probes)


def test_a_request_alone_is_always_drafted_for_where_it_may_be() -> None:
    assert with_probes([PLAIN_BY_VALUE])[0].path is Path.SPECULATIVE


@pytest.mark.parametrize(
    "policy",
    [
        settled(load(3, drafter=None)),
        settled(load(3, age_s=9.0)),
        settled(load()),
        settled(load(3), PathPolicyConfig(mode="off")),
        settled(load(30), LIMITED),
    ],
)
def test_where_it_may_not_be_there_are_no_probes(policy: PathPolicy) -> None:
    assert with_probes([policy.decision] * 40) == [policy.decision] * 40


# --- the limit on running sequences -----------------------------------------------------------


@given(runnings=st.lists(st.integers(12, 16), min_size=1))
def test_between_the_limits_the_mode_stays(runnings: list[int]) -> None:
    for first in (load(0), load(40)):
        policy = settled(first, LIMITED)
        mode = policy.mode
        for index, running in enumerate(runnings):
            policy.observe(load(running), 10.0 * (index + 1))
            assert policy.mode is mode


def test_over_the_limit_nothing_drafts_however_cheap_it_is() -> None:
    policy = settled(load(3), LIMITED)
    assert policy.mode is Path.SPECULATIVE
    policy.observe(load(17, price=0.0, gain=9.0), 10.0)
    assert (policy.mode, policy.decision.code) == (Path.PLAIN, PathReason.HIGH_LOAD)
    policy.observe(load(11), 20.0)
    assert policy.mode is Path.SPECULATIVE


# --- the rest ---------------------------------------------------------------------------------


def test_an_oscillating_load_switches_once_per_dwell() -> None:
    policy, switches = PathPolicy(CONFIG, 0.0), 0
    for tick in range(300):  # 60 s, back and forth every 200 ms
        dear = load(9, price=DEAR, gain=0.0)
        switches += policy.observe(dear if tick % 2 else load(7), 0.2 * tick)
    assert 2 <= switches <= len(ServiceTier) * (60 / CONFIG.min_dwell_s + 1)
    assert policy.switches.total() <= 60 / CONFIG.min_dwell_s + 1


@pytest.mark.parametrize(
    ("before", "marginal", "clear", "path"),
    [
        (load(9, price=DEAR, gain=0.0), load(3, price=0.45), load(1, price=0.1), Path.SPECULATIVE),
        (
            load(9, price=DEAR, gain=0.0),
            load(9, price=DEAR, gain=0.2),
            load(9, price=DEAR, gain=0.3),
            Path.SPECULATIVE,
        ),
        (load(3), load(9, price=0.7, gain=0.0), load(9, price=0.95, gain=0.0), Path.PLAIN),
    ],
    ids=["drafts are free", "drafts gain much", "drafts cost a step"],
)
def test_what_is_clear_waits_for_one_dwell_and_what_is_not_for_longer(
    before: ClusterLoad, marginal: ClusterLoad, clear: ClusterLoad, path: Path
) -> None:
    def after_to_and_fro() -> tuple[PathPolicy, float]:
        policy, now = settled(before), 0.0
        others = load(3) if path is Path.SPECULATIVE else load(9, price=DEAR, gain=0.0)
        for _ in range(3):  # The dwell is eight times as long after these.
            for report in (others, before):
                while policy.observe(report, now) is False:
                    now += 0.1
        return policy, now

    for report, is_followed in ((marginal, False), (clear, True)):
        policy, now = after_to_and_fro()
        policy.observe(report, now + CONFIG.min_dwell_s + 0.1)
        assert (policy.mode is path) is is_followed
        policy.observe(report, now + 8 * CONFIG.min_dwell_s + 0.1)
        assert policy.mode is path


def test_the_first_load_report_does_not_wait_for_the_dwell() -> None:
    policy = PathPolicy(CONFIG, 0.0)
    assert policy.decide(load(3), AUTO, 0.1).path is Path.SPECULATIVE


@pytest.mark.parametrize(
    ("config", "report", "words"),
    [
        (LIMITED, load(20, 15), "17.5 running per verifier, over 16"),
        (CONFIG, load(3), "lengthens a step by 20% at 3.0 running, which is cheap"),
        (CONFIG, load(31, price=DEAR, gain=0.01), "gain a sequence 0.01 tokens a step at 31.0"),
        (CONFIG, load(31, price=DEAR), "drafts' gain is not known: stays plain"),
        (CONFIG, load(3, age_s=3.2), "3.2 s old, over 2 s"),
        (CONFIG, load(3, drafter=DrafterState.LOST), "0 of 1 drafters are ready"),
        (CONFIG, load(3, drafter=None), "0 of 0 drafters are ready"),
        (CONFIG, load(), "no verifier has reported"),
    ],
)
def test_reasons_have_the_numbers(
    config: PathPolicyConfig, report: ClusterLoad, words: str
) -> None:
    assert words in PathPolicy(config, 0.0).decide(report, AUTO, 1.0).reason


def test_the_configured_mode_decides_for_auto_only() -> None:
    on = PathPolicy(PathPolicyConfig(mode="on"), 0.0)
    assert on.decide(load(40, drafter=None), AUTO, 1.0).path is Path.SPECULATIVE
    assert on.decide(load(0), OFF, 1.0).path is Path.PLAIN
    off = PathPolicy(PathPolicyConfig(mode="off"), 0.0)
    assert off.decide(load(0), AUTO, 1.0).path is Path.PLAIN
    assert off.decide(load(40, drafter=None), ON, 1.0).path is Path.SPECULATIVE


def test_a_new_configuration_applies_at_once() -> None:
    policy = PathPolicy(CONFIG, 0.0)
    policy.observe(load(3), 0.1)
    policy.reconfigure(PathPolicyConfig(mode="off"))
    assert policy.decide(load(3), AUTO, 0.2).path is Path.PLAIN


@pytest.mark.parametrize(
    "fields",
    [
        {"plain_above_price": 0.2, "speculative_below_price": 0.3},
        {"plain_below_gain": 0.2, "speculative_above_gain": 0.1},
        {"plain_above_running": 3, "speculative_below_running": 4},
        {"speculative_below_running": 4},
    ],
)
def test_thresholds_that_contradict_each_other_are_refused(fields: dict) -> None:
    with pytest.raises(ValidationError, match="must not be over"):
        PathPolicyConfig(**fields)
