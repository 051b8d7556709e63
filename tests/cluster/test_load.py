"""How often verifiers report, and what their reports tell together."""

from __future__ import annotations

import pytest

from cluster.load import (
    MAX_REPORTS_PER_S,
    Aged,
    ClusterLoad,
    DrafterLoad,
    DrafterState,
    VerifierLoad,
    cluster_load,
    report_interval_s,
)


@pytest.mark.parametrize(("num_verifiers", "interval_s"), [(0, 1), (1, 1), (50, 1), (51, 2)])
def test_a_small_fleet_reports_every_second(num_verifiers: int, interval_s: float) -> None:
    assert report_interval_s(num_verifiers) == interval_s


def test_a_large_fleet_reports_no_more_than_a_router_can_take() -> None:
    intervals = [report_interval_s(count) for count in range(2_000)]
    assert all(count / s <= MAX_REPORTS_PER_S for count, s in enumerate(intervals))
    assert intervals == sorted(intervals)


READY, LOST, CONNECTING = DrafterState.READY, DrafterState.LOST, DrafterState.CONNECTING


def seen(*views: tuple[float, DrafterLoad]) -> Aged[DrafterLoad]:
    """One drafter, as verifiers tell of it in reports of these ages."""
    reports = {
        f"verifier-{index}": Aged(VerifierLoad(drafters=(drafter,)), age_s)
        for index, (age_s, drafter) in enumerate(views)
    }
    told = cluster_load(reports)
    assert told.verifiers == reports
    return told.drafters["d"]


def test_nothing_is_known_without_reports() -> None:
    assert cluster_load({}) == ClusterLoad()


def test_what_each_verifier_counts_itself_adds_up() -> None:
    one = DrafterLoad("d", READY, 2, 100.0, 5.0, 1.0, 10, 7, "ngram")
    other = DrafterLoad("d", READY, 3, 120.0, 4.0, 9.0, 30, 4, "ngram")
    expected = DrafterLoad("d", READY, 5, 120.0, 4.0, 9.0, 40, 11, "ngram")
    assert seen((0.5, one), (0.1, other)) == Aged(expected, 0.1)
    assert seen((0.5, one)) == Aged(one, 0.5)


@pytest.mark.parametrize("other", [LOST, CONNECTING])
def test_a_drafter_is_ready_if_it_is_for_one_and_as_old_as_that_report(other: DrafterState) -> None:
    told = seen((0.1, DrafterLoad("d", other)), (7.0, DrafterLoad("d", READY)))
    assert (told.value.state, told.age_s) == (READY, 7.0)
    assert seen((3.0, DrafterLoad("d", other)), (4.0, DrafterLoad("d", LOST))).age_s == 3.0
