"""report.html: one file, no script, nothing loaded from elsewhere."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape

import yaml

from benchmarks.loadtest.plot import Axis, Key, Point, Series, area_plot, legend, line_plot
from benchmarks.loadtest.profile import Slo
from benchmarks.loadtest.report import STYLE
from benchmarks.loadtest.text import details, number, percent, table
from benchmarks.simulation.results import ArmResult, Results

DEFINITIONS = {
    "Arm": "A way to run the cluster. All arms serve the same requests, at the same times.",
    "TTFT": "Time to first token: from a request's arrival to its first token at the client.",
    "TPOT": "Time per output token: from the first token to the last, over the tokens in between.",
    "Goodput": (
        "Requests that ended within every bound of the SLO, per second. Refused requests and "
        "those that still run at the end are not good."
    ),
    "Speculative": (
        "Share of the requests that began on the speculative path. On the plain path a few do, as "
        "probes."
    ),
    "Accepted": "Draft tokens that became output over draft tokens verified.",
    "Tokens per step": "Of a sequence, in steps that verified drafts of it.",
    "Waiting": "Share of the verifiers' time in which a step waited for drafts.",
    "Drafters busy": (
        "Share of the drafters' time spent on drafts that a verifier was owed and on reading "
        "prompts. What they draft ahead in the rest is not counted."
    ),
    "Switches": "Changes of the mode, of all routers together, the first one included.",
}


def render(results: Results) -> str:
    """The page."""
    title = f"Simulation: {results.name}"
    scenario = results.scenario
    body = [
        f"<h1>{escape(title)}</h1><p>{escape(scenario['description'])}</p>",
        f'<p class="faint">{_size(results)}, SLO: {escape(_slo_text(results))}, '
        f"seed {scenario['seed']}</p>",
        _tiles(results),
        f"<h2>Arms</h2>{_arms(results)}",
        f'<h2>Figures</h2><div class="figures">{"".join(_figures(results))}</div>',
        f"<h2>Kinds of traffic</h2>{_kinds(results)}",
        f"<h2>Why the mode changed</h2>{_switches(results)}",
        f"<h2>Definitions</h2>{_definitions()}",
        "<h2>How it was run</h2>"
        + details("Scenario", f"<pre>{escape(yaml.safe_dump(scenario, sort_keys=False))}</pre>"),
    ]
    return (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8"/>'
        '<meta name="viewport" content="width=device-width, initial-scale=1"/>'
        f"<title>{escape(title)}</title><style>{STYLE.read_text()}</style></head>"
        f"<body>{''.join(body)}</body></html>\n"
    )


def _size(results: Results) -> str:
    scenario = results.scenario
    num_requests = sum(results.arms[0].outcomes.values())
    return (
        f"{scenario['verifiers']['count']} verifiers, {scenario['drafters']['count']} drafters, "
        f"{scenario['routers']['count']} routers, {number(scenario['duration_s'])} simulated "
        f"seconds, {num_requests} requests"
    )


def _slo_text(results: Results) -> str:
    slo = Slo.model_validate(results.scenario["slo"])
    bounds = (("TTFT", slo.ttft_ms), ("TPOT", slo.tpot_ms), ("E2E", slo.e2e_ms))
    told = [f"{name} up to {number(limit)} ms" for name, limit in bounds if limit is not None]
    return ", ".join(told) or "none"


def _tiles(results: Results) -> str:
    best = max(results.arms, key=lambda arm: arm.goodput_rps)
    tiles = []
    for arm in results.arms:
        against = "the most" if arm is best else f"{percent(_ratio(arm, best))} of the most"
        tiles.append(
            f'<div class="tile"><b>{escape(number(arm.goodput_rps))} good req/s</b>'
            f"<span>{escape(arm.name)}: {escape(against)}, at "
            f"{escape(number(arm.output_tokens_per_s))} tok/s</span></div>"
        )
    return f'<div class="tiles">{"".join(tiles)}</div>'


def _ratio(arm: ArmResult, best: ArmResult) -> float | None:
    return arm.goodput_rps / best.goodput_rps if best.goodput_rps else None


def _arms(results: Results) -> str:
    head = ["arm", "mode", "planner", "done", "refused", "running", "output tok/s", "good req/s",
            "met SLO", "TTFT P50 ms", "P99", "TPOT P50 ms", "P99", "E2E P50 ms", "P99",
            "speculative", "accepted", "tokens per step", "waiting", "verifiers busy",
            "drafters busy", "switches", "preempted", "oldest report s", "CPU s"]  # fmt: skip
    return table(head, [_arm_row(arm) for arm in results.arms])


def _arm_row(arm: ArmResult) -> list[str]:
    latencies = []
    for found in (arm.ttft_ms, arm.tpot_ms, arm.e2e_ms):
        latencies += [
            number(found.p50.value if found else None),
            number(found.p99.value if found else None),
        ]
    return [
        arm.name,
        arm.mode,
        arm.planner,
        *(str(arm.outcomes[how]) for how in ("done", "refused", "running")),
        number(arm.output_tokens_per_s),
        number(arm.goodput_rps),
        percent(arm.attainment),
        *latencies,
        percent(arm.speculative_share),
        percent(arm.accepted_share),
        number(arm.tokens_per_step),
        percent(arm.waited_share),
        percent(arm.verifiers_busy),
        percent(arm.drafters_busy),
        str(sum(arm.switches.values())),
        str(arm.num_preemptions),
        number(arm.oldest_report_s),
        number(arm.cpu_s),
    ]


def _figures(results: Results) -> list[str]:
    arms = results.arms
    shown = [
        _good(arms),
        _lines(
            "Throughput over time",
            "What the verifiers drew.",
            "output tokens per second",
            [(arm, arm.timeline.output_tokens_per_s) for arm in arms],
        ),
        _lines(
            "Drafters over time",
            "Where this is near 100 %, drafts come late.",
            "busy drafters, %",
            [(arm, [100 * busy for busy in arm.timeline.drafters_busy]) for arm in arms],
        ),
        _lines(
            "Refused over time",
            "Routers refuse at once what they cannot take.",
            "refused requests per second",
            [(arm, arm.timeline.refused_per_s) for arm in arms],
        ),
        *(_paths(arm) for arm in arms if arm.mode == "auto"),
        *(_replicas(arm) for arm in arms if arm.mode == "auto"),
    ]
    return [figure for figure in shown if figure]


def _good(arms: Sequence[ArmResult]) -> str:
    arrived = Series("arrivals", _points(arms[0], arms[0].timeline.arrived_per_s), 5, marked=False)
    series = [arrived] + [
        Series(arm.name, _points(arm, arm.timeline.good_per_s), colour, marked=False)
        for colour, arm in enumerate(arms)
    ]
    plot = line_plot(series, Axis("simulated seconds"), Axis("requests per second"))
    return _figure(
        "Load and goodput over time",
        "Requests that came at this time, and those of them that were to keep the SLO.",
        plot,
        legend([(s.name, s.colour) for s in series], Key.LINE),
    )


def _lines(
    title: str, says: str, label: str, values: Sequence[tuple[ArmResult, Sequence[float]]]
) -> str:
    series = [
        Series(arm.name, _points(arm, figures), colour, marked=False)
        for colour, (arm, figures) in enumerate(values)
    ]
    plot = line_plot(series, Axis("simulated seconds"), Axis(label))
    return _figure(title, says, plot, legend([(s.name, s.colour) for s in series], Key.LINE))


def _paths(arm: ArmResult) -> str:
    layers = [
        Series("speculative", _points(arm, arm.timeline.speculative), 0),
        Series("plain", _points(arm, arm.timeline.plain), 1),
    ]
    plot = area_plot(layers, Axis("simulated seconds"), Axis("sequences"))
    return _figure(
        f"Path over time, {arm.name}",
        "Sequences under way by their path.",
        plot,
        legend([(layer.name, layer.colour) for layer in layers], Key.AREA),
    )


def _replicas(arm: ArmResult) -> str:
    series = [
        Series("verifiers", _points(arm, arm.timeline.verifiers), 0, marked=False),
        Series("drafters", _points(arm, arm.timeline.drafters), 1, marked=False),
    ]
    plot = line_plot(series, Axis("simulated seconds"), Axis("replicas"))
    return _figure(
        f"Replicas over time, {arm.name}",
        "Those that take work.",
        plot,
        legend([(s.name, s.colour) for s in series], Key.LINE),
    )


def _points(arm: ArmResult, values: Sequence[float]) -> tuple[Point, ...]:
    return tuple(map(Point, arm.timeline.at_s, values))


def _figure(title: str, says: str, plot: str, key: str) -> str:
    if not plot:
        return ""
    caption = f"<figcaption>{escape(says)}</figcaption>"
    return f"<figure><h3>{escape(title)}</h3>{caption}{key}{plot}</figure>"


def _kinds(results: Results) -> str:
    rows = [
        [
            one.kind,
            arm.name,
            str(one.requests),
            str(one.good),
            number(one.tpot_p50_ms),
            percent(one.accepted_share),
        ]
        for arm in results.arms
        for one in arm.kinds
    ]
    return table(["kind", "arm", "requests", "good", "TPOT P50 ms", "accepted"], rows)


def _switches(results: Results) -> str:
    rows = [
        [arm.name, why, str(count)] for arm in results.arms for why, count in arm.switches.items()
    ]
    return table(["arm", "to which mode and why", "times"], rows)


def _definitions() -> str:
    items = "".join(
        f"<dt>{escape(word)}</dt><dd>{escape(text)}</dd>" for word, text in DEFINITIONS.items()
    )
    return f"<dl>{items}</dl>"
