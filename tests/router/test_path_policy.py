"""Laws of the path policy."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cluster.config import PathPolicyConfig
from cluster.load import Aged, ClusterLoad, DrafterLoad, DrafterState, VerifierLoad
from cluster.types import Path
from router.path_policy import PathPolicy, SpeculationMode

CONFIG = PathPolicyConfig(plain_above_running=16, speculative_below_running=12, min_dwell_s=2.0)
AUTO, ON, OFF = SpeculationMode.AUTO, SpeculationMode.ON, SpeculationMode.OFF


def load(
    *running: int, age_s: float = 0.0, drafter: DrafterState | None = DrafterState.READY
) -> ClusterLoad:
    verifiers = {
        f"v{index}": Aged(VerifierLoad(running=count), age_s) for index, count in enumerate(running)
    }
    drafters = {"d": Aged(DrafterLoad("d", drafter), age_s)} if drafter else {}
    return ClusterLoad(verifiers, drafters)


loads = st.builds(
    lambda running, age_s, drafter: load(*running, age_s=age_s, drafter=drafter),
    st.lists(st.integers(0, 40), max_size=3),
    st.sampled_from([0.0, 1.0, 5.0]),
    st.sampled_from([None, *DrafterState]),
)
histories = st.lists(st.tuples(st.floats(0, 3), loads, st.sampled_from(SpeculationMode)))


@given(history=histories)
def test_a_request_that_says_on_or_off_gets_it(history: list) -> None:
    policy, now = PathPolicy(CONFIG, 0.0), 0.0
    for pause_s, report, mode in history:
        now += pause_s
        path = policy.decide(report, mode, now).path
        assert mode is not ON or path is Path.SPECULATIVE
        assert mode is not OFF or path is Path.PLAIN


@given(history=histories)
def test_auto_is_plain_without_fresh_load_or_a_ready_drafter(history: list) -> None:
    policy, now = PathPolicy(CONFIG, 0.0), 0.0
    for pause_s, report, _ in history:
        now += pause_s
        decision = policy.decide(report, AUTO, now)
        fresh = any(aged.age_s <= CONFIG.max_load_age_s for aged in report.verifiers.values())
        ready = any(a.value.state is DrafterState.READY for a in report.drafters.values())
        assert (fresh and ready) or decision.path is Path.PLAIN
        assert decision.reason


@given(history=histories)
def test_switches_by_load_keep_the_dwell(history: list) -> None:
    policy, now, last_switch = PathPolicy(CONFIG, 0.0), 0.0, None
    for pause_s, report, _ in history:
        now += pause_s
        if policy.observe(report, now):
            urgent = policy.mode is Path.PLAIN and "running" not in policy.reason
            assert urgent or last_switch is None or now - last_switch >= CONFIG.min_dwell_s
            last_switch = now
        assert policy.since_s(now) >= 0


@given(history=histories)
def test_the_same_history_gives_the_same_decisions(history: list) -> None:
    one, other, now = PathPolicy(CONFIG, 0.0), PathPolicy(CONFIG, 0.0), 0.0
    for pause_s, report, mode in history:
        now += pause_s
        assert one.decide(report, mode, now) == other.decide(report, mode, now)


@given(runnings=st.lists(st.integers(12, 16), min_size=1))
def test_between_the_thresholds_the_mode_stays(runnings: list[int]) -> None:
    for first in (load(0), load(40)):
        policy = PathPolicy(CONFIG, 0.0)
        policy.observe(first, 0.0)
        mode = policy.mode
        for index, running in enumerate(runnings):
            policy.observe(load(running), 10.0 * (index + 1))
            assert policy.mode is mode


def test_l2_an_oscillating_load_switches_once_per_dwell() -> None:
    policy, switches = PathPolicy(CONFIG, 0.0), 0
    for tick in range(300):  # 60 s, back and forth every 200 ms
        switches += policy.observe(load(17 if tick % 2 else 11), 0.2 * tick)
    assert switches <= 60 / CONFIG.min_dwell_s + 1


def test_the_first_load_report_does_not_wait_for_the_dwell() -> None:
    policy = PathPolicy(CONFIG, 0.0)
    assert policy.decide(load(3), AUTO, 0.1).path is Path.SPECULATIVE


@pytest.mark.parametrize(
    ("report", "words"),
    [
        (load(20, 15), "17.5 running per verifier, over 16"),
        (load(3), "3.0 running per verifier, below 12"),
        (load(3, age_s=3.2), "3.2 s old, over 2 s"),
        (load(3, drafter=DrafterState.LOST), "0 of 1 drafters are ready"),
        (load(3, drafter=None), "0 of 0 drafters are ready"),
        (load(), "no verifier has reported"),
    ],
)
def test_reasons_have_the_numbers(report: ClusterLoad, words: str) -> None:
    assert words in PathPolicy(CONFIG, 0.0).decide(report, AUTO, 1.0).reason


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
