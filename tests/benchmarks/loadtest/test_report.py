"""The report: what it says, and that it is one well-formed file."""

from __future__ import annotations

import re
from dataclasses import replace
from xml.etree import ElementTree

import pytest

from benchmarks.loadtest.comparison import compare
from benchmarks.loadtest.record import Outcome, RequestRecord
from benchmarks.loadtest.report import DEFINITIONS, render
from benchmarks.loadtest.results import Results
from tests.benchmarks.loadtest.records import (
    closed_run,
    make_profile,
    ok,
    refused,
    results,
    speculated,
)

ARMS = {"arms": [{"name": "auto"}, {"name": "off"}], "baseline": "off"}
FIGURES = (
    "Throughput against interactivity", "Throughput", "Speed-up", "Time to first token",
    "Time per output token", "Gap between chunks", "End to end", "Goodput",
    "First token: all requests", "Output tokens: all requests", "Path over time",
    "Tokens over time", "Acceptance by position", "By kind of prompt", "Outcomes", "Refusals",
)  # fmt: skip


def steady(per_s: int, cell: int, **changes: object) -> list[RequestRecord]:
    return [
        speculated([1, 2], 4, scheduled_s=at / per_s, end_s=(at + 1) / per_s, cell=cell, **changes)
        for at in range(10 * per_s)
    ]


def synthetic(speed: int = 2, **changes: object) -> tuple[Results, list[RequestRecord]]:
    """Two levels, two arms; auto is twice as fast; three requests are refused."""
    runs = []
    for users in (1, 4):
        for place, (arm, factor) in enumerate((("auto", speed), ("off", 1))):
            cell = len(runs)
            records = steady(users * factor, cell)
            records += [refused(5.0, 0.02, cell=cell)] * 3 if users == 4 and place == 0 else []
            runs.append(
                closed_run(records, arm=arm, index=cell, users=users, started_s=10.0 * cell)
            )
    profile = make_profile(slo={"ttft_ms": 900}, **{**ARMS, **changes})
    return results(runs, profile), [record for run in runs for record in run.records]


def parsed(page: str) -> ElementTree.Element:
    """As XML, which is stricter than HTML."""
    return ElementTree.fromstring(page.removeprefix("<!doctype html>\n"))


def figures(page: str) -> dict[str, ElementTree.Element]:
    return {str(f.findtext("h3")): f for f in parsed(page).iter("figure")}


def test_one_file_that_needs_nothing_else() -> None:
    page = render(*synthetic(), None)
    assert parsed(page).tag == "html"
    assert not re.search(r"<script|<link|<img|url\(|@import|https?://(?!server)", page)
    assert "prefers-color-scheme: dark" in page
    assert len(page) < 200_000


def test_every_figure_is_drawn_and_has_its_numbers() -> None:
    drawn = figures(render(*synthetic(), None))
    assert tuple(drawn) == FIGURES
    for title, figure in drawn.items():
        assert figure.find("svg[@class='plot']") is not None, title
        rows = figure.findall("details//tbody/tr")
        assert rows, title
        assert all("–" not in "".join(row.itertext()) for row in rows) or title in (
            "Path over time",
        ), title


def test_what_it_says() -> None:
    found, records = synthetic()
    page = render(found, records, None)
    text = " ".join("".join(parsed(page).itertext()).split())
    for told in (
        "paceline loadtest --profile x.yaml", "TTFT at most 900 ms", "seed 0", "valid",
        "http://server", "2 x", "3 refused, 0 failed", "50 %",
    ):  # fmt: skip
        assert told in text, told
    for word in DEFINITIONS:
        assert word in text
    speedups = figures(page)["Speed-up"].findall("details//tbody/tr")
    assert [row.findtext("th") for row in speedups] == ["1 users", "4 users"]
    assert all(str(row.findall("td")[1].text).startswith("2 [") for row in speedups)


def test_marks_stand_where_their_numbers_are() -> None:
    """Throughput against users: twice as high over the floor is twice as much."""
    page = render(*synthetic(), None)
    plot = figures(page)["Throughput"].find("svg[@class='plot']")
    assert plot is not None
    floor = float(plot.find("line[@class='axis']").get("y1"))  # type: ignore[union-attr,arg-type]
    auto, off = (
        [tuple(map(float, pair.split(","))) for pair in str(line.get("points")).split()]
        for line in plot.findall("polyline")
    )
    for (x, fast), (same_x, slow) in zip(auto, off, strict=True):
        assert x == same_x
        assert floor - fast == pytest.approx(2 * (floor - slow), abs=0.5)
    titles = ["".join(title.itertext()) for title in plot.iter("title")]
    assert any(re.fullmatch(r"auto: 14 \[14, 14\] at 1", title) for title in titles), titles


def test_a_server_without_speculation_is_told_so() -> None:
    run = closed_run([ok(at, at + 1.0) for at in range(10)])
    drawn = figures(render(results([run]), run.records, None))
    assert "said nothing of speculation" in str(
        drawn["Acceptance by position"].findtext("figcaption")
    )
    assert "It told none." in str(drawn["Path over time"].findtext("figcaption"))
    assert "sets no SLO" in str(drawn["Goodput"].findtext("figcaption"))
    assert "None" in str(drawn["Refusals"].findtext("figcaption"))


@pytest.mark.parametrize(
    "records",
    [
        [],
        [refused()],
        [ok(outcome=Outcome.BROKEN, message="it <broke> & fell")],
        [ok(chunk_s=(), chunk_tokens=(), output_tokens=0)],
        [ok(output_tokens=None, chunk_tokens=())],
        [ok(0.0, 0.0, chunk_s=(0.0,), chunk_tokens=(7,))],
    ],
)
def test_little_or_nothing_to_show(records: list[RequestRecord]) -> None:
    page = render(results([closed_run(records, wall_s=0.0)]), records, None)
    assert next(iter(figures(page))) == FIGURES[0]


def test_a_run_without_a_cell() -> None:
    assert "Load test of m" in render(results([]), [], None)


def test_what_came_from_outside_is_escaped() -> None:
    evil = "<script>alert(1)</script>"
    record = speculated([1], 1, family=evil)
    spoken = {**(record.speculation or {}), "reason": evil}
    record = replace(record, speculation=spoken)
    broken = ok(outcome=Outcome.BROKEN, message=evil)
    run = closed_run([record, broken], arm=evil)
    found = results([run], make_profile(arms=[{"name": evil}], description=evil), info={"x": evil})
    page = render(found, run.records, None)
    assert "<script" not in page
    assert page.count("&lt;script&gt;") > 5


def test_an_invalid_run_says_so_on_top() -> None:
    run = closed_run([ok(at, at + 1.0) for at in range(10)], client_cpu_share=0.99)
    page = render(results([run]), run.records, None)
    assert "invalid: do not use these figures" in page
    assert "99% of a core" in page


def test_comparison_has_ratios_with_intervals() -> None:
    here, there = synthetic(speed=4), synthetic(speed=2, seed=9)
    comparison = compare(here, there)
    auto = {(group.level, group.arm): group for group in comparison.groups}["4 users", "auto"]
    assert auto.tokens_per_s is not None
    assert auto.tokens_per_s.value == pytest.approx(2.0, rel=0.01)
    assert auto.ttft_p50 is not None
    assert auto.ttft_p50.value == pytest.approx(0.5)
    assert auto.goodput is not None
    assert auto.goodput.value == pytest.approx(2.0, rel=0.1)
    assert comparison.only_here == comparison.only_there == ()
    assert comparison.differences == ("seed: 0 here, 9 there",)
    page = render(*here, comparison)
    assert parsed(page).tag == "html"
    assert "seed: 0 here, 9 there" in page
    tables = [t for t in parsed(page).iter("table") if "TTFT P99" in "".join(t.itertext())]
    row = next(r for r in tables[0].iter("tr") if "auto" in "".join(r.itertext()))
    assert re.search(r"auto2 \[", "".join(row.itertext()))


def test_levels_of_one_run_only_are_named() -> None:
    here, there = synthetic(), synthetic()
    fewer = there[0].model_copy(update={"groups": there[0].groups[:2]})
    comparison = compare(here, (fewer, there[1]))
    assert comparison.only_here == ("4 users, auto", "4 users, off")
    assert "Only here: 4 users, auto; 4 users, off." in render(*here, comparison)
