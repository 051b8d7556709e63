"""The figures of a report. Each has its numbers in a table, and says so if there are none."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from html import escape
from itertools import groupby

import numpy as np

from benchmarks.loadtest.plot import (
    Axis,
    Key,
    Line,
    Point,
    Series,
    Span,
    area_plot,
    bar_plot,
    legend,
    line_plot,
)
from benchmarks.loadtest.record import Outcome, RequestRecord
from benchmarks.loadtest.results import CellInfo, GroupResult, Results
from benchmarks.loadtest.statistics import Distribution, Estimate
from benchmarks.loadtest.text import details, estimate, number, percent, table

MOST_CURVES = 6
CDF_POINTS = 101
OUTCOME_COLOURS = {
    Outcome.OK: 2, Outcome.REFUSED: 4, Outcome.ERROR: 1, Outcome.BROKEN: 3,
    Outcome.TIMEOUT: 0, Outcome.UNREACHABLE: 5, Outcome.CANCELLED: 5,
}  # fmt: skip
PATH_COLOURS = {"speculative": 0, "plain": 1, "": 5}
NO_SPECULATION = (
    "The server said nothing of speculation: its replies have no `speculation` object and no "
    "`metrics.speculative_decoding`."
)

Rows = list[list[str]]


def figure(title: str, caption: str, plot: str, keys: str, head: Sequence[str], rows: Rows) -> str:
    """A plot, what it shows, and its numbers."""
    if not plot:
        return (
            f"<figure><h3>{escape(title)}</h3><figcaption>{escape(caption)}</figcaption></figure>"
        )
    return (
        f"<figure><h3>{escape(title)}</h3><figcaption>{escape(caption)}</figcaption>{keys}{plot}"
        f"{details('Numbers', table(head, rows))}</figure>"
    )


def with_numbers(drawn: str, head: Sequence[str], rows: Rows) -> str:
    """A figure without a plot whose numbers tell something all the same."""
    return drawn.replace("</figure>", details("Numbers", table(head, rows)) + "</figure>")


class Figures:
    """Of one load test."""

    def __init__(self, results: Results, records: Sequence[RequestRecord]) -> None:
        self._results = results
        self._records = records
        named = [str(arm["name"]) for arm in results.run.profile["arms"]]
        self._arms = [arm for arm in named if any(g.arm == arm for g in results.groups)]
        self._groups = sorted(results.groups, key=lambda g: (g.level_value, named.index(g.arm)))
        self._level_axis = _level_axis(results)

    def all(self) -> list[str]:
        """In the order of reading."""
        slo = self._results.slo
        return [
            self._pareto(),
            self._throughput(),
            self._speedup(),
            self._latency("Time to first token", "ttft_ms", slo.ttft_ms),
            self._latency("Time per output token", "tpot_ms", slo.tpot_ms),
            self._latency("Gap between chunks", "inter_chunk_ms", None),
            self._latency("End to end", "e2e_ms", slo.e2e_ms),
            self._goodput(),
            self._cdf("First token: all requests", "TTFT, ms", _ttft_ms),
            self._cdf("Output tokens: all requests", "TPOT, ms", _tpot_ms),
            self._paths_over_time(),
            self._tokens_over_time(),
            self._acceptance(),
            self._families(),
            self._outcomes(),
            self._refusals(),
        ]

    def _pareto(self) -> str:
        series = []
        for place, arm in enumerate(self._arms):
            members = [
                g for g in self._of(arm) if g.tokens_per_s_per_user and g.output_tokens_per_s
            ]
            points = tuple(_pareto_point(group) for group in members)
            series.append(Series(arm, points, place))
        plot = line_plot(
            series, Axis("output tokens/s of one user, median"), Axis("output tokens/s of all")
        )
        caption = (
            "Up is more for all, right is more for each. Marks are levels, lines join an arm's."
        )
        if not plot:
            caption = "No output tokens were counted at any level."
        rows = [
            [
                group.level,
                group.arm,
                estimate(group.tokens_per_s_per_user),
                estimate(group.output_tokens_per_s),
                "yes" if _on_frontier(group, self._groups) else "no",
            ]
            for group in self._groups
        ]
        head = ["level", "arm", "tok/s of a user", "tok/s of all", "on the frontier"]
        return figure("Throughput against interactivity", caption, plot, self._legend(), head, rows)

    def _throughput(self) -> str:
        series = self._by_level(lambda group: group.output_tokens_per_s)
        plot = line_plot(series, self._level_axis, Axis("output tokens/s"))
        rows = [
            [
                group.level,
                group.arm,
                estimate(group.output_tokens_per_s),
                number(group.completed_rps),
                number(group.concurrency),
            ]
            for group in self._groups
        ]
        head = ["level", "arm", "output tok/s", "requests/s ended well", "mean under way"]
        return figure(
            "Throughput",
            "Output tokens of requests that ended well, within the time in which load was offered.",
            plot,
            self._legend(),
            head,
            rows,
        )

    def _speedup(self) -> str:
        baseline = self._results.run.profile.get("baseline")
        if baseline is None:
            return ""
        series = [s for s in self._by_level(lambda group: group.speedup) if s.name != baseline]
        plot = line_plot(
            series,
            self._level_axis,
            Axis(f"output tokens/s over {baseline}"),
            [Line(1.0, baseline)],
        )
        rows = [[g.level, g.arm, estimate(g.speedup)] for g in self._groups if g.arm != baseline]
        caption = (
            f"Output tokens/s over those of {baseline!r} at the same level, with the same requests."
        )
        return figure(
            "Speed-up", caption, plot, self._legend(baseline), ["level", "arm", "speed-up"], rows
        )

    def _latency(self, title: str, name: str, bound_ms: float | None) -> str:
        def of(group: GroupResult) -> Distribution | None:
            found: Distribution | None = getattr(group, name)
            return found

        series = self._by_level(lambda group: d.p50 if (d := of(group)) else None)
        series += self._by_level(lambda group: d.p95 if (d := of(group)) else None, dashed=True)
        lines = [] if bound_ms is None else [Line(bound_ms, f"SLO {number(bound_ms)} ms")]
        plot = line_plot(series, self._level_axis, Axis("ms", log=True), lines)
        rows = [[group.level, group.arm, *_latency_cells(of(group))] for group in self._groups]
        head = ["level", "arm", "P50 ms", "P90", "P95", "P99", "max", "mean", "count"]
        caption = "Median (solid) and P95 (dashed) of requests that ended well."
        return figure(title, caption, plot, self._legend(), head, rows)

    def _goodput(self) -> str:
        if not any(group.attainment for group in self._groups):
            return figure("Goodput", "The profile sets no SLO.", "", "", [], [])
        series = self._by_level(lambda group: group.goodput_rps)
        offered = self._by_level(
            lambda g: Estimate(value=g.offered_rps, low=0, high=0), dashed=True
        )
        offered = [Series(s.name, _without_intervals(s), s.colour, True, False) for s in offered]
        plot = line_plot([*series, *offered], self._level_axis, Axis("requests/s"))
        rows = [
            [
                group.level,
                group.arm,
                number(group.offered_rps),
                estimate(group.goodput_rps),
                percent(group.attainment.value if group.attainment else None),
            ]
            for group in self._groups
        ]
        caption = (
            f"Requests per second that met {slo_text(self._results)} (solid), and all (dashed)."
        )
        head = ["level", "arm", "due req/s", "good req/s", "met the SLO"]
        return figure("Goodput", caption, plot, self._legend(), head, rows)

    def _cdf(self, title: str, label: str, measure: Callable[[RequestRecord], float | None]) -> str:
        series, rows = [], []
        shown = self._shown_groups()
        shares = np.linspace(0, 100, CDF_POINTS)
        for place, group in enumerate(shown):
            values = [v for record in self._ok(group) if (v := measure(record)) is not None]
            if not values:
                continue
            at = np.percentile(values, shares)
            points = tuple(Point(float(v), float(s)) for v, s in zip(at, shares, strict=True))
            series.append(Series(_name(group), points, place, marked=False))
            rows.append(
                [_name(group), *(number(float(at[share])) for share in (5, 25, 50, 75, 95))]
            )
        plot = line_plot(series, Axis(label, log=True), Axis("% of requests", end=100.0))
        keys = legend(((each.name, each.colour) for each in series), Key.LINE)
        caption = "Share of requests that took no longer."
        if len(shown) < len(self._groups):
            caption += " Lowest and highest level only."
        return figure(title, caption, plot, keys, ["", "5 %", "25 %", "50 %", "75 %", "95 %"], rows)

    def _paths_over_time(self) -> str:
        line = self._results.timeline
        times = [line.step_s * step for step in range(len(line.plain))]
        layers = [
            _over_time("speculative", PATH_COLOURS["speculative"], times, line.speculative),
            _over_time("plain", PATH_COLOURS["plain"], times, line.plain),
        ]
        told = any(line.speculative) or any(line.plain)
        if any(line.unknown):
            layers.append(_over_time("path not told", PATH_COLOURS[""], times, line.unknown))
        modes = _modes(self._results, times)
        spans = [*_cell_starts(self._results), *modes]
        plot = area_plot(layers, Axis("s since the start"), Axis("requests under way"), spans)
        caption = "Requests under way, by the path that the server told at their end."
        if not told:
            caption += " It told none."
        caption += " Dotted rules: a cell begins."
        if modes:
            caption += (
                " Strip on top: mode of the cluster, in the same colours; it changed "
                f"{len(modes) - 1} times, as seen once a second."
            )
        keys = legend(((layer.name, layer.colour) for layer in layers), Key.AREA)
        head = [
            "seconds",
            "cell",
            "speculative",
            "plain",
            "not told",
            "mode of the cluster",
            "running",
        ]
        rows = [
            [
                f"{times[first]:.0f} to {times[last] + line.step_s:.0f}",
                _cell_at(self._results.cells, times[first]),
                *(number(float(np.mean(values[first : last + 1]))) for values in
                  (line.speculative, line.plain, line.unknown)),
                line.mode[first] or "not seen",
                _mean_known(line.running[first : last + 1]),
            ]
            for first, last in _stretches(self._results, times)
        ]  # fmt: skip
        return figure("Path over time", caption, plot, keys, head, rows)

    def _tokens_over_time(self) -> str:
        line = self._results.timeline
        times = [line.step_s * step for step in range(len(line.plain))]
        series = [_over_time("output tokens/s", 2, times, line.output_tokens_per_s)]
        running = [
            Point(time_s, value)
            for time_s, value in zip(times, line.running, strict=True)
            if value is not None
        ]
        if running:
            series.append(Series("sequences running", tuple(running), 3, marked=False))
        refused = [count / line.step_s for count in line.refused]
        if any(refused):
            series.append(_over_time("refusals/s", 4, times, refused))
        plot = line_plot(
            series,
            Axis("s since the start"),
            Axis("per second, or sequences"),
            spans=_cell_starts(self._results),
        )
        keys = legend(((each.name, each.colour) for each in series), Key.LINE)
        rows = [
            [
                f"{cell.started_s:.0f} to {cell.started_s + cell.wall_s:.0f}",
                f"{cell.level}, {cell.arm}",
                number(cell.window_s),
                percent(cell.client_cpu_share),
            ]
            for cell in self._results.cells
        ]
        head = ["seconds", "cell", "window s", "CPU of the load generator"]
        return figure("Tokens over time", "The cells, one after another.", plot, keys, head, rows)

    def _acceptance(self) -> str:
        series, rows = [], []
        for place, group in enumerate(self._shown_groups()):
            told = group.acceptance
            if told is None or not told.num_draft_tokens:
                continue
            points = tuple(Point(j + 1, 100 * share) for j, share in enumerate(told.per_position))
            series.append(Series(_name(group), points, place))
        for group in self._groups:
            if (told := group.acceptance) is not None:
                rows.append(
                    [
                        _name(group),
                        percent(told.rate),
                        number(told.length),
                        str(told.num_draft_tokens),
                        " ".join(f"{100 * share:.0f}" for share in told.per_position) or "none",
                        " ".join(map(str, told.histogram)) or "none",
                    ]
                )
        deepest = max((len(each.points) for each in series), default=0)
        ticks = tuple(float(position) for position in range(1, deepest + 1))
        plot = line_plot(
            series,
            Axis("position in the draft", ticks=ticks),
            Axis("% of steps with drafts", end=100.0),
        )
        caption = "Share of the steps with drafts in which the position was accepted."
        if not plot:
            caption = NO_SPECULATION if not rows else "No drafts were verified at these levels."
        head = ["", "accepted of drafted", "tokens per step", "drafted", "% by position",
                "steps by accepted 0, 1, .."]  # fmt: skip
        keys = legend((each.name, each.colour) for each in series)
        drawn = figure("Acceptance by position", caption, plot, keys, head, rows)
        return with_numbers(drawn, head, rows) if rows and not plot else drawn

    def _families(self) -> str:
        rows: Rows = []
        for group in self._groups:
            for family in group.families:
                told = family.acceptance
                rows.append(
                    [
                        f"{_name(group)}: {family.family}",
                        str(family.requests_ok),
                        number(family.output_tokens),
                        number(family.tpot_p50_ms),
                        percent(told.rate if told else None),
                        number(told.length if told else None),
                    ]
                )
        head = ["", "requests", "output tokens", "TPOT P50 ms", "accepted", "tokens per step"]
        shares = _accepted_by_family(self._groups)
        plot = bar_plot(
            list(shares), [("accepted", 0, list(shares.values()))], Axis("% of drafted")
        )
        caption = "Draft tokens accepted, over all levels: how well such an answer can be foreseen."
        if not plot:
            caption = "No drafts were verified, or the server did not say."
        drawn = figure("By kind of prompt", caption, plot, "", head, rows)
        return drawn if plot else with_numbers(drawn, head, rows)

    def _outcomes(self) -> str:
        present = [o for o in Outcome if any(o.value in g.outcomes for g in self._groups)]
        layers = [
            (o.value, OUTCOME_COLOURS[o], [float(g.outcomes.get(o.value, 0)) for g in self._groups])
            for o in present
        ]
        plot = bar_plot([_name(group) for group in self._groups], layers, Axis("requests"))
        rows = [
            [_name(group), *(str(group.outcomes.get(outcome.value, 0)) for outcome in present)]
            for group in self._groups
        ]
        keys = legend(((outcome.value, OUTCOME_COLOURS[outcome]) for outcome in present), Key.AREA)
        return figure(
            "Outcomes", "How requests ended.", plot, keys, ["", *(o.value for o in present)], rows
        )

    def _refusals(self) -> str:
        rows = [
            [
                _name(group),
                str(refusals.count),
                ", ".join(f"{code}: {count}" for code, count in refusals.by_code.items()),
                percent(refusals.with_retry_after / refusals.count),
                *_latency_cells(refusals.latency_ms)[:5],
            ]
            for group in self._groups
            if (refusals := group.refusals) is not None
        ]
        if not rows:
            return figure("Refusals", "None: no request got 429 or 503.", "", "", [], [])
        series = self._by_level(lambda group: r.latency_ms.p50 if (r := group.refusals) else None)
        series += self._by_level(
            lambda group: r.latency_ms.p99 if (r := group.refusals) else None, dashed=True
        )
        plot = line_plot(series, self._level_axis, Axis("ms until refused", log=True))
        head = [
            "",
            "refused",
            "status and code",
            "with Retry-After",
            "P50 ms",
            "P90",
            "P95",
            "P99",
            "max",
        ]
        caption = (
            "429 and 503: how long a client waited to be told. Median (solid) and P99 (dashed)."
        )
        return figure("Refusals", caption, plot, self._legend(), head, rows)

    def _of(self, arm: str) -> list[GroupResult]:
        return [group for group in self._groups if group.arm == arm]

    def _by_level(
        self, measure: Callable[[GroupResult], Estimate | None], dashed: bool = False
    ) -> list[Series]:
        series = []
        for place, arm in enumerate(self._arms):
            points = tuple(
                Point(group.level_value, found.value, found.low, found.high)
                for group in self._of(arm)
                if (found := measure(group)) is not None
            )
            series.append(Series(arm, points, place, dashed))
        return series

    def _legend(self, without: str | None = None) -> str:
        shown = [(arm, place) for place, arm in enumerate(self._arms) if arm != without]
        return legend(shown) if len(self._arms) > 1 else ""

    def _shown_groups(self) -> list[GroupResult]:
        """No more than can be told apart: all, or those of the outermost levels."""
        if len(self._groups) <= MOST_CURVES:
            return self._groups
        levels = [group.level for group in self._groups]
        outer = [group for group in self._groups if group.level in (levels[0], levels[-1])]
        return outer[-MOST_CURVES:]

    def _ok(self, group: GroupResult) -> list[RequestRecord]:
        cells = {
            cell.index
            for cell in self._results.cells
            if (cell.level, cell.arm) == (group.level, group.arm)
        }
        return [r for r in self._records if r.cell in cells and r.outcome is Outcome.OK]


def slo_text(results: Results) -> str:
    """The bounds in words."""
    names = {"ttft_ms": "TTFT", "tpot_ms": "TPOT", "e2e_ms": "E2E"}
    bounds = {name: bound for name, bound in results.slo.model_dump().items() if bound is not None}
    told = [f"{names[name]} at most {number(bound)} ms" for name, bound in bounds.items()]
    return ", ".join(told) or "no SLO"


def _level_axis(results: Results) -> Axis:
    kind = results.run.profile["load"]["kind"]
    label = {
        "closed": "users at once",
        "swing": "users at the top",
        "open": "requests/s due",
        "replay": "speed of the trace",
    }[kind]
    values = tuple(sorted({group.level_value for group in results.groups}))
    # A single level stands in the middle of a logarithmic axis, and at the end of a linear one.
    is_log = bool(values) and values[0] > 0 and not 1 < values[-1] / values[0] <= 4
    return Axis(label, log=is_log, ticks=values)


def _pareto_point(group: GroupResult) -> Point:
    assert group.tokens_per_s_per_user is not None
    assert group.output_tokens_per_s is not None
    all_users = group.output_tokens_per_s
    return Point(
        group.tokens_per_s_per_user.value,
        all_users.value,
        all_users.low,
        all_users.high,
        number(group.level_value),
    )


def _on_frontier(group: GroupResult, groups: Sequence[GroupResult]) -> bool:
    """Whether no other is better in both ways."""
    here = _both(group)
    others = (_both(other) for other in groups if other is not group)
    return not any(o[0] >= here[0] and o[1] >= here[1] and o != here for o in others)


def _both(group: GroupResult) -> tuple[float, float]:
    user, everyone = group.tokens_per_s_per_user, group.output_tokens_per_s
    return (user.value if user else 0.0, everyone.value if everyone else 0.0)


def _accepted_by_family(groups: Sequence[GroupResult]) -> dict[str, float]:
    """Percent, of families with drafts."""
    drafted: Counter[str] = Counter()
    accepted: Counter[str] = Counter()
    for group in groups:
        for family in group.families:
            if family.acceptance is not None:
                drafted[family.family] += family.acceptance.num_draft_tokens
                accepted[family.family] += family.acceptance.num_accepted_tokens
    return {name: 100 * accepted[name] / count for name, count in drafted.items() if count}


def _latency_cells(found: Distribution | None) -> list[str]:
    if found is None:
        return [number(None)] * 7
    estimates = [estimate(each) for each in (found.p50, found.p90, found.p95, found.p99)]
    return [*estimates, number(found.max), number(found.mean), str(found.count)]


def _without_intervals(series: Series) -> tuple[Point, ...]:
    return tuple(Point(point.x, point.y) for point in series.points)


def _over_time(name: str, colour: int, times: Sequence[float], values: Sequence[float]) -> Series:
    points = tuple(Point(time_s, value) for time_s, value in zip(times, values, strict=True))
    return Series(name, points, colour, marked=False)


def _cell_starts(results: Results) -> list[Span]:
    return [
        Span(cell.started_s, cell.started_s + cell.wall_s, f"{cell.level}, {cell.arm}")
        for cell in results.cells
    ]


def _modes(results: Results, times: Sequence[float]) -> list[Span]:
    """Where the cluster's mode was seen."""
    step_s, modes = results.timeline.step_s, _known_modes(results)
    stretches = groupby(zip(times, modes, strict=True), key=lambda pair: pair[1])
    spans = []
    for mode, members in stretches:
        seen_at = [time_s for time_s, _ in members]
        if mode:
            colour = PATH_COLOURS.get(mode, PATH_COLOURS[""])
            spans.append(Span(seen_at[0], seen_at[-1] + step_s, f"mode: {mode}", colour))
    return spans


def _known_modes(results: Results) -> list[str]:
    """At each step the one that was seen last."""
    modes: list[str] = []
    for seen in results.timeline.mode:
        modes.append(seen or (modes[-1] if modes else ""))
    return modes


def _stretches(results: Results, times: Sequence[float]) -> list[tuple[int, int]]:
    """First and last step of each stretch with one cell and one mode of the cluster."""
    keys = [
        (_cell_at(results.cells, t), mode)
        for t, mode in zip(times, _known_modes(results), strict=True)
    ]
    stretches, start = [], 0
    for _, members in groupby(keys):
        length = len(list(members))
        stretches.append((start, start + length - 1))
        start += length
    return stretches


def _cell_at(cells: Sequence[CellInfo], time_s: float) -> str:
    begun = [cell for cell in cells if cell.started_s <= time_s]
    return f"{begun[-1].level}, {begun[-1].arm}" if begun else "before the first"


def _mean_known(values: Sequence[float | None]) -> str:
    known = [value for value in values if value is not None]
    return number(sum(known) / len(known)) if known else number(None)


def _name(group: GroupResult) -> str:
    return f"{group.level}, {group.arm}"


def _ttft_ms(record: RequestRecord) -> float | None:
    return None if record.ttft_s is None else record.ttft_s * 1_000


def _tpot_ms(record: RequestRecord) -> float | None:
    return None if (tpot_s := record.tpot_s) is None else tpot_s * 1_000
