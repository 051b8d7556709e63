"""The large scenarios: what they are to show, and within their time."""

from __future__ import annotations

from html import escape

import pytest
import yaml

from benchmarks.simulation.scenario import SHIPPED, load_scenario
from benchmarks.simulation.simulation import simulate

MAX_CPU_S = 600.0


@pytest.mark.long
@pytest.mark.parametrize("name", ["hour", "thousand"])
def test_auto_beats_both_fixed_modes(name: str) -> None:
    results = simulate(load_scenario(name), name)
    goodput = {arm.name: arm.goodput_rps for arm in results.arms}
    assert goodput["auto"] > goodput["always on"]
    assert goodput["auto"] > goodput["always off"]
    assert sum(arm.cpu_s for arm in results.arms) < MAX_CPU_S


def test_pages_of_results_are_of_the_scenarios_as_they_are_now() -> None:
    pages = sorted((SHIPPED.parent / "results").glob("*.html"))
    assert pages
    for page in pages:
        scenario = load_scenario(page.stem).model_dump(mode="json")
        assert escape(yaml.safe_dump(scenario, sort_keys=False)) in page.read_text()


def test_a_swinging_load_costs_at_most_two_switches_of_a_router_per_swing() -> None:
    scenario = load_scenario("swing")
    (auto,) = simulate(scenario.model_copy(update={"arms": scenario.arms[:1]}), "swing").arms
    num_swings = scenario.duration_s / 20
    assert 0 < sum(auto.switches.values()) / scenario.routers.count <= 2 * num_swings
