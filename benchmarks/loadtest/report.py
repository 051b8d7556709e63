"""report.html: one file, no script, nothing loaded from elsewhere."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape
from pathlib import Path

import yaml

from benchmarks.loadtest.comparison import ComparedGroup, Comparison
from benchmarks.loadtest.figures import Figures, slo_text
from benchmarks.loadtest.record import Json, Outcome, RequestRecord
from benchmarks.loadtest.results import GroupResult, Results
from benchmarks.loadtest.text import details, estimate, number, percent, table

STYLE = Path(__file__).parent / "report.css"

DEFINITIONS = {
    "Scheduled send": (
        "When a request was due: in an open load at its arrival, whether or not the load generator "
        "was in time; in a closed load when its user was free. Latencies count from here, so that "
        "a server that stalls cannot hide the requests that it held up."
    ),
    "Schedule delay": (
        "Real send minus scheduled send. If it grows, the load was not what it says, and the run "
        "is marked as invalid."
    ),
    "TTFT": "Time to first token: from the scheduled send to the first chunk with text.",
    "E2E": "From the scheduled send to the end of the stream, its [DONE].",
    "TPOT": (
        "Time per output token: (E2E - TTFT) / (output tokens - tokens in the first chunk). Output "
        "tokens are those of the server's usage. If it does not count per chunk, one token is "
        "taken to be in the first."
    ),
    "Gap between chunks": (
        "Between two chunks with text. With speculation a chunk holds the tokens of a whole step, "
        "so this is not a time per token."
    ),
    "Tokens/s of a user": "1 / TPOT, the median over requests.",
    "Output tokens/s": (
        "Tokens of requests that ended well, by the time they came, over the window in which load "
        "was offered. Where a level is a number of requests, the window is the whole level."
    ),
    "Goodput": (
        "Requests that ended well within every bound of the SLO, per second. Refused and failed "
        "requests count as not good."
    ),
    "Accepted of drafted": (
        "Draft tokens that became output over draft tokens verified, over all requests together."
    ),
    "Tokens per step": "1 + accepted draft tokens / steps that carried drafts.",
    "Refused": (
        "429 or 503 before the first byte of an answer. A user of a closed load then waits for "
        "Retry-After, at most 5 s."
    ),
    "Broken": "A stream with an error event, or without [DONE] at its end.",
    "Intervals": (
        "95 %, in brackets: by bootstrap over requests for latencies, over twentieths of the "
        "window for tokens/s and goodput, Wilson's for shares."
    ),
}


def render(
    results: Results, records: Sequence[RequestRecord], comparison: Comparison | None
) -> str:
    """The page."""
    figures = Figures(results, records).all()
    title = f"Load test of {results.run.server['model']}"
    body = [
        _head(title, results),
        _tiles(results),
        _warnings(results),
        "" if comparison is None else _comparison(comparison),
        f"<h2>Levels</h2>{_levels(results)}",
        f'<h2>Figures</h2><div class="figures">{"".join(figures)}</div>',
        f"<h2>What the server said of its choices, and errors</h2>{_reasons(results)}",
        f"<h2>Definitions</h2>{_definitions()}",
        f"<h2>How it was run</h2>{_run(results)}",
    ]
    return (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8"/>'
        '<meta name="viewport" content="width=device-width, initial-scale=1"/>'
        f"<title>{escape(title)}</title><style>{STYLE.read_text()}</style></head>"
        f"<body>{''.join(body)}</body></html>\n"
    )


def _head(title: str, results: Results) -> str:
    run = results.run
    description = run.profile.get("description") or ""
    verdict = '<span class="good">valid</span>'
    if run.interrupted:
        verdict = '<span class="bad">interrupted: a part of it</span>'
    if not results.is_valid:
        verdict = '<span class="bad">invalid: do not use these figures, see below</span>'
    return (
        f"<h1>{escape(title)}</h1><p>{escape(description)}</p>"
        f'<p class="faint">{escape(run.started_at)}, {number(run.seconds)} s, '
        f"{escape(str(run.server['url']))}, SLO: {escape(slo_text(results))}, "
        f"seed {run.profile['seed']} · {verdict}</p>"
    )


def _tiles(results: Results) -> str:
    tiles = [
        *_best_throughput(results),
        *_best_goodput(results),
        *_lightest(results),
        *_speculation(results),
        *_speedups(results),
        _failures(results),
    ]
    return f'<div class="tiles">{"".join(tiles)}</div>'


def _tile(figure: str, meaning: str) -> str:
    return f'<div class="tile"><b>{escape(figure)}</b><span>{escape(meaning)}</span></div>'


def _best_throughput(results: Results) -> list[str]:
    told = [(g.output_tokens_per_s.value, g) for g in results.groups if g.output_tokens_per_s]
    if not told:
        return []
    best, group = max(told, key=lambda pair: pair[0])
    return [_tile(f"{number(best)} tok/s", f"most output tokens per second, at {_name(group)}")]


def _best_goodput(results: Results) -> list[str]:
    told = [(g.goodput_rps.value, g) for g in results.groups if g.goodput_rps]
    if not told:
        return []
    best, group = max(told, key=lambda pair: pair[0])
    met = percent(group.attainment.value if group.attainment else None)
    return [_tile(f"{number(best)} good req/s", f"at {_name(group)}, where {met} met the SLO")]


def _lightest(results: Results) -> list[str]:
    """Latencies where the load is least: what the server can do for one."""
    arms = [arm["name"] for arm in results.run.profile["arms"]]
    lightest = sorted(results.groups, key=lambda g: (g.level_value, arms.index(g.arm)))
    group = next(iter(lightest), None)
    if group is None:
        return []
    tiles = []
    for name, found in (("TTFT", group.ttft_ms), ("TPOT", group.tpot_ms)):
        if found is not None:
            tails = f"P95 {number(found.p95.value)}, P99 {number(found.p99.value)}"
            tiles.append(
                _tile(f"{number(found.p50.value)} ms {name}", f"median at {_name(group)}; {tails}")
            )
    return tiles


def _speculation(results: Results) -> list[str]:
    told = [group.acceptance for group in results.groups if group.acceptance]
    drafted = sum(each.num_draft_tokens for each in told)
    if not told:
        return [_tile("no word", "of speculation from this server")]
    if not drafted:
        return [_tile("no drafts", "were verified for any request")]
    accepted = sum(each.num_accepted_tokens for each in told)
    return [_tile(percent(accepted / drafted), f"of {drafted} draft tokens were accepted")]


def _speedups(results: Results) -> list[str]:
    baseline = results.run.profile.get("baseline")
    told = [(g.speedup.value, g) for g in results.groups if g.speedup and g.arm != baseline]
    if not told:
        return []
    worst, best = (choose(told, key=lambda pair: pair[0]) for choose in (min, max))
    return [
        _tile(
            f"{number(worst[0])} to {number(best[0])} x",
            f"speed-up over {baseline}: least at {_name(worst[1])}, most at {_name(best[1])}",
        )
    ]


def _failures(results: Results) -> str:
    refused = _count(results, Outcome.REFUSED)
    cancelled = _count(results, Outcome.CANCELLED)
    total = sum(sum(group.outcomes.values()) for group in results.groups)
    failed = total - _count(results, Outcome.OK) - refused - cancelled
    return _tile(f"{refused} refused, {failed} failed", f"of {total} requests")


def _count(results: Results, outcome: Outcome) -> int:
    return sum(group.outcomes.get(outcome.value, 0) for group in results.groups)


def _name(group: GroupResult) -> str:
    return f"{group.level}, {group.arm}"


def _warnings(results: Results) -> str:
    if not results.warnings:
        return ""
    faulty = "" if results.is_valid else ' class="bad"'
    items = "".join(f"<li>{escape(warning)}</li>" for warning in results.warnings)
    return f'<h2{faulty}>Before you use these figures</h2><ul class="plain">{items}</ul>'


def _levels(results: Results) -> str:
    rows = [
        [
            group.level,
            group.arm,
            str(group.outcomes.get(Outcome.OK.value, 0)),
            str(sum(group.outcomes.values()) - group.outcomes.get(Outcome.OK.value, 0)),
            number(group.offered_rps),
            number(group.concurrency),
            estimate(group.output_tokens_per_s),
            number(group.tokens_per_s_per_user.value if group.tokens_per_s_per_user else None),
            *_medians(group),
            percent(group.attainment.value if group.attainment else None),
            number(group.prompt_tokens),
            percent(group.cached_share),
            number(group.output_tokens),
            number(group.schedule_delay_ms.p99.value if group.schedule_delay_ms else None),
        ]
        for group in results.groups
    ]
    head = ["level", "arm", "ok", "not ok", "due req/s", "under way", "output tok/s", "tok/s/user",
            "TTFT P50 ms", "P99", "TPOT P50 ms", "P99", "E2E P50 ms", "P99", "met SLO",
            "prompt tokens", "cached", "output tokens", "sent late P99 ms"]  # fmt: skip
    return table(head, rows)


def _medians(group: GroupResult) -> list[str]:
    cells = []
    for found in (group.ttft_ms, group.tpot_ms, group.e2e_ms):
        cells += [
            number(found.p50.value if found else None),
            number(found.p99.value if found else None),
        ]
    return cells


def _reasons(results: Results) -> str:
    rows = [
        [_name(group), kind, text, str(count)]
        for group in results.groups
        for kind, told in (
            ("path", group.paths),
            ("reason", group.reasons),
            ("error", group.errors),
        )
        for text, count in told.items()
    ]
    return details("Numbers", table(["", "what", "text (N: some number)", "requests"], rows))


def _definitions() -> str:
    items = "".join(
        f"<dt>{escape(word)}</dt><dd>{escape(text)}</dd>" for word, text in DEFINITIONS.items()
    )
    return f"<dl>{items}</dl>"


def _run(results: Results) -> str:
    run = results.run
    capacity = "" if results.capacity_rps is None else f"{number(results.capacity_rps)} requests/s"
    facts = (
        ("Command", run.command),
        ("Server", f"{run.server['url']}, model {run.server['model']}"),
        ("Load from", run.machine),
        ("Ray workers", str(run.workers) if run.workers else "none, one process"),
        ("Versions", ", ".join(f"{name} {number}" for name, number in run.versions.items())),
        ("Capacity measured first", capacity),
    )
    items = "".join(
        f"<dt>{escape(name)}</dt><dd>{escape(fact)}</dd>" for name, fact in facts if fact
    )
    return (
        f"<dl>{items}</dl>"
        f"{details('Profile', f'<pre>{escape(_yaml(run.profile))}</pre>')}"
        f"{details('What the server said of itself', f'<pre>{escape(_yaml(run.server))}</pre>')}"
    )


def _yaml(value: Json) -> str:
    return yaml.safe_dump(value, sort_keys=False, allow_unicode=True, width=100)


def _comparison(comparison: Comparison) -> str:
    other = comparison.other.run
    parts = [
        f"<p>Ratios of this run over the one of {escape(other.started_at)} "
        f"({escape(str(other.server['url']))}, model {escape(str(other.server['model']))}). For "
        "tokens and goodput above 1 is better here, for latencies below 1. An interval that holds "
        "1 shows no difference.</p>",
        table(
            [
                "level",
                "arm",
                "output tok/s",
                "TTFT P50",
                "TTFT P99",
                "TPOT P50",
                "E2E P50",
                "goodput",
            ],
            [_ratios(group) for group in comparison.groups],
        ),
        details("Both sides", _both_sides(comparison)),
    ]
    if comparison.differences:
        listed = "".join(f"<li>{escape(text)}</li>" for text in comparison.differences)
        parts.append(f'<p>The runs differ in:</p><ul class="plain">{listed}</ul>')
    for label, missing in (("here", comparison.only_here), ("there", comparison.only_there)):
        if missing:
            parts.append(f'<p class="faint">Only {label}: {escape("; ".join(missing))}.</p>')
    return f"<h2>Against the other run</h2>{''.join(parts)}"


def _ratios(group: ComparedGroup) -> list[str]:
    ratios = (group.tokens_per_s, group.ttft_p50, group.ttft_p99, group.tpot_p50, group.e2e_p50)
    return [group.level, group.arm, *map(estimate, ratios), estimate(group.goodput)]


def _both_sides(comparison: Comparison) -> str:
    rows = []
    for pair in comparison.groups:
        for side, group in (("here", pair.group), ("there", pair.other)):
            accepted = group.acceptance.rate if group.acceptance else None
            rows.append(
                [
                    f"{pair.level}, {pair.arm}",
                    side,
                    estimate(group.output_tokens_per_s),
                    *_medians(group),
                    estimate(group.goodput_rps),
                    percent(accepted),
                ]
            )
    head = ["", "run", "output tok/s", "TTFT P50 ms", "P99", "TPOT P50 ms", "P99", "E2E P50 ms",
            "P99", "good req/s", "accepted"]  # fmt: skip
    return table(head, rows)
