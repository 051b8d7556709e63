"""From records to results, against figures made by hand."""

from __future__ import annotations

from dataclasses import replace

import pytest

from benchmarks.loadtest.record import Outcome
from benchmarks.loadtest.server import ServerSample
from tests.benchmarks.loadtest.records import (
    closed_run,
    make_profile,
    ok,
    open_run,
    refused,
    results,
    speculated,
)

SLO = {"ttft_ms": 600.0}


def test_rates_count_what_came_within_the_window() -> None:
    # 3 tokens at 1 and 4 at 2 s; 3 at 9.5, and 4 at 11 s, after the end of the window.
    records = [ok(0.0, 2.0), ok(8.0, 11.0), ok(3.0, 4.0, outcome=Outcome.BROKEN)]
    (group,) = results([closed_run(records, wall_s=11.0)]).groups
    assert group.output_tokens_per_s is not None
    assert group.output_tokens_per_s.value == pytest.approx((7 + 3) / 10)
    assert group.completed_rps == pytest.approx(0.2)
    assert group.offered_rps == pytest.approx(0.3)
    assert group.concurrency == pytest.approx((2 + 2 + 1) / 10)
    assert group.outcomes == {"ok": 2, "broken": 1}


def test_the_last_token_of_a_counted_level_is_within_its_window() -> None:
    run = closed_run([ok(0.0, 2.0), ok(2.0, 4.0)], duration_s=float("inf"))
    offer = replace(run.cell.level.offer, num_requests=2)
    run.cell = replace(run.cell, level=replace(run.cell.level, offer=offer))
    run.wall_s = 4.1
    (group,) = results([run]).groups
    assert group.window_s == 4.0
    assert group.output_tokens_per_s is not None
    assert group.output_tokens_per_s.value == pytest.approx(14 / 4)


def test_goodput_counts_all_that_were_due() -> None:
    # TTFTs of 0.5, 0.5 and 1 s; one refused, one broken, one that Ctrl-C ended.
    records = [ok(0.0, 1.0), ok(2.0, 3.0), ok(4.0, 6.0), refused(5.0)]
    records += [ok(6.0, 7.0, outcome=Outcome.BROKEN), ok(7.0, 8.0, outcome=Outcome.CANCELLED)]
    (group,) = results([open_run(records)], make_profile(slo=SLO)).groups
    assert group.attainment is not None
    assert group.goodput_rps is not None
    assert group.attainment.value == pytest.approx(2 / 5)
    assert group.goodput_rps.value == pytest.approx(2 / 10)


def test_without_an_slo_there_is_no_goodput() -> None:
    (group,) = results([open_run([ok()])]).groups
    assert group.attainment is group.goodput_rps is None


def test_acceptance_is_pooled_over_tokens() -> None:
    # Steps that accepted 0, 1, 2: one, none, three; and two, one, none. Plain requests add nothing.
    records = [speculated([1, 0, 3], 8), speculated([2, 1], 5), speculated([], 0, path="plain")]
    (group,) = results([closed_run(records)]).groups
    told = group.acceptance
    assert told is not None
    assert told.histogram == (3, 1, 3)
    assert told.rate == pytest.approx(7 / 13)
    assert told.length == pytest.approx(1 + 7 / 7)
    assert told.per_position == pytest.approx((4 / 7, 3 / 7))
    assert group.paths == {"speculative": 2, "plain": 1}
    assert group.reasons == {"auto: N running per verifier, below N": 3}


def test_a_server_that_says_nothing_of_speculation() -> None:
    (group,) = results([closed_run([ok()])]).groups
    assert group.acceptance is None
    assert group.paths == {"unknown": 1}


def test_refusals_by_code_with_their_latency() -> None:
    records = [
        refused(0.0, 0.010),
        refused(1.0, 0.030, retry_after_s=None),
        refused(2.0, 0.020, status=429, code="tenant"),
        ok(),
    ]
    (group,) = results([open_run(records)]).groups
    assert group.refusals is not None
    assert group.refusals.count == 3
    assert group.refusals.by_code == {"503 overloaded": 2, "429 tenant": 1}
    assert group.refusals.with_retry_after == 2
    assert group.refusals.latency_ms.p50.value == pytest.approx(20.0)


def test_repeats_of_a_cell_are_one_group_and_speed_up_is_against_the_baseline() -> None:
    def steady(per_s: int) -> list[object]:
        return [ok(at / per_s, (at + 1) / per_s) for at in range(10 * per_s)]

    runs = [
        closed_run(steady(1), arm="off", index=0),
        closed_run(steady(2), arm="auto", index=1),
        closed_run(steady(2), arm="auto", index=2),
        closed_run(steady(1), arm="off", index=3),
    ]
    profile = make_profile(arms=[{"name": "auto"}, {"name": "off"}], baseline="off")
    groups = {group.arm: group for group in results(runs, profile).groups}
    assert groups["auto"].window_s == 20.0
    assert groups["auto"].outcomes == {"ok": 40}
    assert groups["auto"].speedup is not None
    assert groups["auto"].speedup.value == pytest.approx(2.0)
    assert groups["off"].speedup is not None
    assert groups["off"].speedup.value == 1.0


def test_families_apart() -> None:
    records = [speculated([0, 4], 4, family="copy"), speculated([3, 1], 4, family="chat")]
    (group,) = results([closed_run(records)]).groups
    rates = {each.family: each.acceptance and each.acceptance.rate for each in group.families}
    assert rates == {"chat": 0.25, "copy": 1.0}


def test_the_timeline_shows_path_tokens_refusals_and_mode() -> None:
    records = [
        speculated([1], 1, scheduled_s=0.0, end_s=4.0),
        speculated([1], 1, path="plain", scheduled_s=4.0, end_s=10.0),
        refused(6.0, 0.5),
    ]
    run = closed_run(records, samples=[ServerSample(4.2, "plain", 3, 0)])
    line = results([run]).timeline
    assert line.step_s == 0.5
    at = [int(second / line.step_s) for second in (1, 5, 9)]
    assert [line.speculative[place] for place in at] == [1.0, 0.0, 0.0]
    assert [line.plain[place] for place in at] == [0.0, 1.0, 1.0]
    assert line.unknown[int(6.0 / line.step_s)] == 1.0
    assert sum(line.refused) == 1
    assert sum(line.output_tokens_per_s) * line.step_s == pytest.approx(14)
    place = int(4.2 / line.step_s)
    assert (line.mode[place], line.running[place]) == ("plain", 3.0)
    assert line.mode[0] == ""
    assert line.running[0] is None


def delayed(delays_s: list[float]) -> list[object]:
    return [ok(float(at), at + 1.0, sent_s=at + delay_s) for at, delay_s in enumerate(delays_s)]


@pytest.mark.parametrize(
    ("delays_s", "told"),
    [
        ([0.001] * 40, None),
        ([0.01 * at for at in range(40)], "ever later"),
        ([0.001] * 30 + [0.3] + [0.001] * 9, "1 of 40 requests were sent over 0.1 s late"),
    ],
)
def test_an_open_load_that_was_late_is_invalid(delays_s: list[float], told: str | None) -> None:
    found = results([open_run(delayed(delays_s), 40.0)])
    assert found.is_valid is (told is None)
    assert all(told is not None and told in fault for fault in found.cells[0].faults)
    assert found.warnings[: len(found.cells[0].faults)] == tuple(
        f"1 req/s, all: {fault}" for fault in found.cells[0].faults
    )


def test_a_load_generator_without_time_to_spare_is_invalid() -> None:
    found = results([closed_run([ok(at, at + 1.0) for at in range(10)], client_cpu_share=0.95)])
    assert not found.is_valid
    assert "95% of a core" in found.warnings[0]


def test_warnings_do_not_make_a_run_invalid() -> None:
    found = results(
        [closed_run([ok(), ok(outcome=Outcome.TIMEOUT), ok(0.0, 9.0)], interrupted=True)]
    )
    assert found.is_valid
    assert "interrupted" in found.warnings[0]
    nothing = results([closed_run([refused()])])
    assert nothing.warnings == ("4 users, all: no request ended well",)
    some = results([closed_run([ok(), ok(outcome=Outcome.TIMEOUT)])])
    assert some.warnings == ("4 users, all: 1 of 2 requests failed",)
