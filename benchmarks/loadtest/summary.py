"""From records to results: pure arithmetic."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from itertools import pairwise

import numpy as np

from benchmarks.loadtest import statistics, validity
from benchmarks.loadtest.cell_run import CellRun
from benchmarks.loadtest.profile import Profile, Slo
from benchmarks.loadtest.record import Outcome, RequestRecord
from benchmarks.loadtest.results import (
    Acceptance,
    CellInfo,
    FamilyResult,
    GroupResult,
    Refusals,
    Results,
    RunInfo,
    Timeline,
)
from benchmarks.loadtest.statistics import Distribution, Estimate
from benchmarks.loadtest.window import (
    good_rates,
    mean_under_way,
    slice_rates,
    token_rates,
    under_way,
)

MOST_REASONS = 6
MOST_TIMELINE_STEPS = 240
SHORTEST_STEP_S = 0.5


def summarise(
    info: RunInfo, profile: Profile, runs: Sequence[CellRun], capacity_rps: float | None
) -> Results:
    """Results of the cells that were run, the last perhaps in part."""
    groups: dict[tuple[str, str], list[CellRun]] = {}
    for run in runs:
        groups.setdefault((run.cell.level.label, run.cell.arm.name), []).append(run)
    return Results(
        run=info,
        slo=profile.slo,
        capacity_rps=capacity_rps,
        groups=tuple(
            _group(members, profile.slo, groups.get((level, profile.baseline or "")))
            for (level, _), members in groups.items()
        ),
        cells=tuple(map(_cell, runs)),
        timeline=_timeline(runs),
        warnings=tuple(_warnings(runs)),
    )


def _warnings(runs: Sequence[CellRun]) -> list[str]:
    faults = [f"{run.cell.title}: {fault}" for run in runs for fault in validity.faults(run)]
    return faults + [warning for run in runs for warning in validity.warnings(run)]


def _cell(run: CellRun) -> CellInfo:
    return CellInfo(
        index=run.cell.index,
        repeat=run.cell.repeat,
        level=run.cell.level.label,
        arm=run.cell.arm.name,
        started_s=run.started_s,
        wall_s=run.wall_s,
        window_s=run.window_s,
        client_cpu_share=run.client_cpu_share,
        faults=tuple(validity.faults(run)),
    )


def _group(runs: Sequence[CellRun], slo: Slo, baseline: Sequence[CellRun] | None) -> GroupResult:
    level = runs[0].cell.level
    records = [record for run in runs for record in run.records]
    ok = [record for record in records if record.outcome is Outcome.OK]
    window_s = sum(run.window_s for run in runs)
    under_way_s = sum(mean_under_way(r.records, 0.0, r.window_s) * r.window_s for r in runs)
    due = [record for record in records if record.outcome is not Outcome.CANCELLED]
    attainment = _attainment(due, slo)
    rates = _slices(runs)
    return GroupResult(
        level=level.label,
        level_value=level.value,
        arm=runs[0].cell.arm.name,
        window_s=window_s,
        offered_rps=_over(len(due), window_s),
        outcomes=dict(Counter(record.outcome.value for record in records)),
        concurrency=_over(under_way_s, window_s),
        completed_rps=_over(len(ok), window_s),
        output_tokens_per_s=statistics.mean(rates),
        tokens_per_s_per_user=_interactivity(ok),
        ttft_ms=_ms(record.ttft_s for record in ok),
        tpot_ms=_ms(record.tpot_s for record in ok),
        inter_chunk_ms=_ms(gap for record in ok for gap in _gaps(record)),
        e2e_ms=_ms(record.e2e_s for record in ok),
        schedule_delay_ms=_ms(record.schedule_delay_s for record in records),
        prompt_tokens=_mean(record.prompt_tokens for record in ok),
        cached_share=_cached_share(ok),
        output_tokens=_mean(record.output_tokens for record in ok),
        attainment=attainment,
        goodput_rps=_goodput(runs, slo),
        speedup=None if baseline is None else statistics.ratio_of_means(rates, _slices(baseline)),
        acceptance=acceptance(ok),
        paths=dict(Counter(record.path for record in ok)),
        reasons=_reasons(ok),
        families=tuple(_families(ok)),
        refusals=_refusals(records),
        errors=_errors(records),
    )


def _slices(runs: Sequence[CellRun]) -> list[float]:
    return [rate for run in runs for rate in slice_rates(run.records, run.window_s)]


def _attainment(due: Sequence[RequestRecord], slo: Slo) -> Estimate | None:
    if slo == Slo():
        return None
    return statistics.share(sum(record.meets(slo) for record in due), len(due))


def _goodput(runs: Sequence[CellRun], slo: Slo) -> Estimate | None:
    if slo == Slo():
        return None
    return statistics.mean(
        [rate for run in runs for rate in good_rates(run.records, run.window_s, slo)]
    )


def _interactivity(ok: Sequence[RequestRecord]) -> Estimate | None:
    tpots_s = [tpot_s for record in ok if (tpot_s := record.tpot_s)]
    return statistics.percentile([1 / tpot_s for tpot_s in tpots_s], 50)


def _gaps(record: RequestRecord) -> Iterable[float]:
    return (later - earlier for earlier, later in pairwise(record.chunk_s))


def _ms(seconds: Iterable[float | None]) -> Distribution | None:
    return statistics.distribution([value * 1_000 for value in seconds if value is not None])


def _mean(values: Iterable[int | None]) -> float | None:
    known = [value for value in values if value is not None]
    return sum(known) / len(known) if known else None


def _over(amount: float, seconds: float) -> float:
    return amount / seconds if seconds > 0 else 0.0


def _cached_share(ok: Sequence[RequestRecord]) -> float | None:
    told = [record for record in ok if record.cached_tokens is not None and record.prompt_tokens]
    if not told:
        return None
    cached = sum(record.cached_tokens or 0 for record in told)
    return cached / sum(record.prompt_tokens or 0 for record in told)


def acceptance(ok: Sequence[RequestRecord]) -> Acceptance | None:
    """Pooled over requests. From the histogram of steps where the server sends it, else from the
    counts alone; None where it sends neither."""
    told = [record for record in ok if record.speculation or record.accepted_histogram]
    if not told:
        return None
    pooled: Counter[int] = Counter()
    for record in told:
        pooled.update(dict(enumerate(record.accepted_histogram)))
    histogram = [pooled[count] for count in range(max(pooled, default=-1) + 1)]
    steps = sum(histogram)
    drafted = sum(_count(record, "num_draft_tokens") for record in told)
    accepted = sum(_count(record, "num_accepted_tokens") for record in told)
    reached = [sum(histogram[position + 1 :]) for position in range(len(histogram) - 1)]
    return Acceptance(
        num_draft_tokens=drafted,
        num_accepted_tokens=accepted,
        rate=accepted / drafted if drafted else None,
        length=1 + sum(reached) / steps if steps else None,
        histogram=tuple(histogram),
        per_position=tuple(count / steps for count in reached) if steps else (),
    )


def _count(record: RequestRecord, name: str) -> int:
    return int((record.speculation or {}).get(name) or 0)


def _reasons(ok: Sequence[RequestRecord]) -> dict[str, int]:
    told = (str(record.speculation.get("reason", "")) for record in ok if record.speculation)
    return dict(
        Counter(re.sub(r"\d+(\.\d+)?", "N", reason) for reason in told).most_common(MOST_REASONS)
    )


def _errors(records: Sequence[RequestRecord]) -> dict[str, int]:
    fine = (Outcome.OK, Outcome.REFUSED, Outcome.CANCELLED)
    told = Counter(
        " ".join(filter(None, (record.outcome.value, str(record.status or ""), record.message)))
        for record in records
        if record.outcome not in fine
    )
    return dict(told.most_common(MOST_REASONS))


def _families(ok: Sequence[RequestRecord]) -> Iterable[FamilyResult]:
    for family in sorted({record.family for record in ok}):
        members = [record for record in ok if record.family == family]
        tpots_ms = [tpot_s * 1_000 for record in members if (tpot_s := record.tpot_s) is not None]
        yield FamilyResult(
            family=family,
            requests_ok=len(members),
            output_tokens=_mean(record.output_tokens for record in members) or 0.0,
            tpot_p50_ms=float(np.median(tpots_ms)) if tpots_ms else None,
            acceptance=acceptance(members),
        )


def _refusals(records: Sequence[RequestRecord]) -> Refusals | None:
    refused = [record for record in records if record.outcome is Outcome.REFUSED]
    latency_ms = _ms(record.e2e_s for record in refused)
    if latency_ms is None:
        return None
    return Refusals(
        count=len(refused),
        by_code=dict(Counter(f"{record.status} {record.code}".strip() for record in refused)),
        with_retry_after=sum(record.retry_after_s is not None for record in refused),
        latency_ms=latency_ms,
    )


def _timeline(runs: Sequence[CellRun]) -> Timeline:
    end_s = max((run.started_s + run.wall_s for run in runs), default=0.0)
    step_s = max(SHORTEST_STEP_S, end_s / MOST_TIMELINE_STEPS)
    num_steps = max(1, round(end_s / step_s + 0.5))
    busy = {name: np.zeros(num_steps) for name in ("speculative", "plain", "unknown")}
    tokens = np.zeros(num_steps)
    refused = np.zeros(num_steps, dtype=np.int64)
    modes = [""] * num_steps
    running: list[float | None] = [None] * num_steps
    for run in runs:
        shifted = [_shifted(record, run.started_s) for record in run.records]
        for name, of_path in _by_path(shifted).items():
            busy[name] += under_way(of_path, step_s * num_steps, num_steps)
        tokens += token_rates(shifted, step_s * num_steps, num_steps)
        for record in shifted:
            refused[min(num_steps - 1, int(record.end_s / step_s))] += (
                record.outcome is Outcome.REFUSED
            )
        for sample in run.samples:
            place = min(num_steps - 1, int((run.started_s + sample.time_s) / step_s))
            modes[place], running[place] = sample.mode, float(sample.running)
    return Timeline(
        step_s=step_s,
        speculative=_rounded(busy["speculative"]),
        plain=_rounded(busy["plain"]),
        unknown=_rounded(busy["unknown"]),
        output_tokens_per_s=_rounded(tokens),
        refused=tuple(map(int, refused)),
        mode=tuple(modes),
        running=tuple(running),
    )


def _by_path(records: Sequence[RequestRecord]) -> Mapping[str, list[RequestRecord]]:
    by_path: dict[str, list[RequestRecord]] = {}
    for record in records:
        path = record.path if record.path in ("speculative", "plain") else "unknown"
        by_path.setdefault(path, []).append(record)
    return by_path


def _rounded(values: Iterable[float]) -> tuple[float, ...]:
    return tuple(round(float(value), 3) for value in values)


def _shifted(record: RequestRecord, by_s: float) -> RequestRecord:
    """On the clock of the whole run."""
    return replace(
        record,
        scheduled_s=record.scheduled_s + by_s,
        sent_s=record.sent_s + by_s,
        end_s=record.end_s + by_s,
        chunk_s=tuple(time_s + by_s for time_s in record.chunk_s),
    )
