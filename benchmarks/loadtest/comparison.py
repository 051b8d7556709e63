"""Two runs side by side: ratios of what both did."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from benchmarks.loadtest.profile import Slo
from benchmarks.loadtest.record import Outcome, RequestRecord
from benchmarks.loadtest.results import GroupResult, Results
from benchmarks.loadtest.statistics import Estimate, ratio_of_means, ratio_of_percentiles
from benchmarks.loadtest.window import good_rates, slice_rates

Run = tuple[Results, list[RequestRecord]]


@dataclass(frozen=True, slots=True)
class ComparedGroup:
    """A level and arm that both runs had. Every ratio is of this run over the other."""

    level: str
    arm: str
    group: GroupResult
    other: GroupResult
    tokens_per_s: Estimate | None
    ttft_p50: Estimate | None
    ttft_p99: Estimate | None
    tpot_p50: Estimate | None
    e2e_p50: Estimate | None
    goodput: Estimate | None


@dataclass(frozen=True, slots=True)
class Comparison:
    """What two runs say of one another."""

    other: Results
    groups: tuple[ComparedGroup, ...]
    only_here: tuple[str, ...]
    """Levels and arms without a counterpart."""
    only_there: tuple[str, ...]
    differences: tuple[str, ...]
    """Settings that differ, so that ratios may come from them."""


def compare(run: Run, other: Run) -> Comparison:
    """Match groups by level and arm."""
    here, there = _groups(run[0]), _groups(other[0])
    shared = [key for key in here if key in there]
    return Comparison(
        other=other[0],
        groups=tuple(_compared(key, run, other, here[key], there[key]) for key in shared),
        only_here=tuple(", ".join(key) for key in here if key not in there),
        only_there=tuple(", ".join(key) for key in there if key not in here),
        differences=tuple(_differences(run[0], other[0])),
    )


def _groups(results: Results) -> dict[tuple[str, str], GroupResult]:
    return {(group.level, group.arm): group for group in results.groups}


def _compared(
    key: tuple[str, str], run: Run, other: Run, group: GroupResult, other_group: GroupResult
) -> ComparedGroup:
    ok, other_ok = _ok(run, key), _ok(other, key)

    def latency(name: str, percentile: float) -> Estimate | None:
        return ratio_of_percentiles(_values(ok, name), _values(other_ok, name), percentile)

    return ComparedGroup(
        level=key[0],
        arm=key[1],
        group=group,
        other=other_group,
        tokens_per_s=ratio_of_means(_token_rates(run, key), _token_rates(other, key)),
        ttft_p50=latency("ttft_s", 50),
        ttft_p99=latency("ttft_s", 99),
        tpot_p50=latency("tpot_s", 50),
        e2e_p50=latency("e2e_s", 50),
        goodput=_goodput(run, other, key),
    )


def _ok(run: Run, key: tuple[str, str]) -> list[RequestRecord]:
    return [r for records, _ in _cells(run, key) for r in records if r.outcome is Outcome.OK]


def _values(records: Sequence[RequestRecord], name: str) -> list[float]:
    values = (getattr(record, name) for record in records)
    return [value for value in values if value is not None]


def _cells(run: Run, key: tuple[str, str]) -> list[tuple[list[RequestRecord], float]]:
    """Records and window of each."""
    return [
        ([record for record in run[1] if record.cell == cell.index], cell.window_s)
        for cell in run[0].cells
        if (cell.level, cell.arm) == key
    ]


def _token_rates(run: Run, key: tuple[str, str]) -> list[float]:
    return [rate for records, s in _cells(run, key) for rate in slice_rates(records, s)]


def _goodput(run: Run, other: Run, key: tuple[str, str]) -> Estimate | None:
    """By this run's SLO on both. None without one."""
    slo = run[0].slo
    if slo == Slo():
        return None
    here, there = (
        [rate for records, s in _cells(side, key) for rate in good_rates(records, s, slo)]
        for side in (run, other)
    )
    return ratio_of_means(here, there)


def _differences(here: Results, there: Results) -> list[str]:
    found = []
    for name in sorted(here.run.profile.keys() | there.run.profile.keys()):
        ours, theirs = here.run.profile.get(name), there.run.profile.get(name)
        if ours != theirs and name != "description":
            found.append(f"{name}: {ours} here, {theirs} there")
    ours, theirs = (side.run.server["model"] for side in (here, there))
    if ours != theirs:
        found.append(f"served model: {ours} here, {theirs} there")
    if here.run.machine != there.run.machine:
        found.append(f"load from: {here.run.machine} here, {there.run.machine} there")
    return found
