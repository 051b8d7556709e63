"""A simulation from scenario to report."""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from benchmarks.loadtest.progress import Progress
from benchmarks.loadtest.text import number, percent
from benchmarks.simulation.cluster import SimulatedCluster
from benchmarks.simulation.report import render
from benchmarks.simulation.results import REPORT, RESULTS, ArmResult, Results
from benchmarks.simulation.scenario import Arm, Scenario, load_scenario, shipped_scenarios
from benchmarks.simulation.summary import summarise
from benchmarks.simulation.traffic import Request, make_requests
from cluster.commands.command_error import CommandError


def list_scenarios() -> None:
    """Print the shipped scenarios."""
    for name in shipped_scenarios():
        print(f"{name:14} {load_scenario(name).description}")


def run(arguments: argparse.Namespace) -> bool:
    """Simulate, print a table and write files. Raises CommandError."""
    scenario = load_scenario(arguments.scenario)
    if arguments.seed is not None:
        scenario = scenario.model_copy(update={"seed": arguments.seed})
    scenario = scenario.model_copy(update={"arms": _arms(scenario, arguments.arm)})
    if arguments.out is not None:
        _make_folder(arguments.out)
    results = simulate(
        scenario, Path(arguments.scenario).stem, Progress(len(scenario.arms), sys.stderr)
    )
    print(as_table(results))
    if arguments.out is not None:
        (arguments.out / RESULTS).write_text(results.model_dump_json(indent=1) + "\n")
        (arguments.out / REPORT).write_text(render(results))
        print(arguments.out / REPORT)
    return True


def simulate(scenario: Scenario, name: str, progress: Progress | None = None) -> Results:
    """Every arm over the same requests. The same scenario gives the same results, but `cpu_s`."""
    requests = make_requests(scenario)
    arms = [simulate_arm(scenario, arm, requests, progress) for arm in scenario.arms]
    return Results(scenario=scenario.model_dump(mode="json"), name=name, arms=tuple(arms))


def simulate_arm(
    scenario: Scenario, arm: Arm, requests: list[Request], progress: Progress | None = None
) -> ArmResult:
    """One of them."""
    if progress is not None:
        progress.begin(f"{arm.name}, {len(requests)} requests")
    started = time.process_time()
    cluster = SimulatedCluster(scenario, arm, requests)
    cluster.run()
    result = summarise(scenario, arm, cluster, time.process_time() - started)
    if progress is not None:
        progress.finish(f"{result.num_steps} steps in {result.cpu_s:.1f} s")
    return result


def as_table(results: Results) -> str:
    """For a terminal."""
    head = ("arm", "tok/s", "good/s", "met SLO", "TTFT p50", "p99", "TPOT p50", "p99", "refused",
            "speculative", "accepted", "tok/step", "waiting", "drafters", "switches")  # fmt: skip
    rows = [head, *(_row(arm) for arm in results.arms)]
    widths = [max(len(row[column]) for row in rows) for column in range(len(head))]
    return "\n".join(
        "  ".join(
            cell.rjust(width) if column else cell.ljust(width)
            for column, (cell, width) in enumerate(zip(row, widths, strict=True))
        ).rstrip()
        for row in rows
    )


def _row(arm: ArmResult) -> Sequence[str]:
    latencies = []
    for found in (arm.ttft_ms, arm.tpot_ms):
        latencies += [
            number(found.p50.value if found else None),
            number(found.p99.value if found else None),
        ]
    return (
        arm.name,
        number(arm.output_tokens_per_s),
        number(arm.goodput_rps),
        percent(arm.attainment),
        *latencies,
        str(arm.outcomes["refused"]),
        percent(arm.speculative_share),
        percent(arm.accepted_share),
        number(arm.tokens_per_step),
        percent(arm.waited_share),
        percent(arm.drafters_busy),
        str(sum(arm.switches.values())),
    )


def _arms(scenario: Scenario, names: Sequence[str] | None) -> tuple[Arm, ...]:
    if not names:
        return scenario.arms
    by_name = {arm.name: arm for arm in scenario.arms}
    if unknown := [name for name in names if name not in by_name]:
        raise CommandError(f"there is no arm {unknown[0]!r}. Give one of: {', '.join(by_name)}")
    return tuple(by_name[name] for name in names)


def _make_folder(folder: Path) -> None:
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise CommandError(f"cannot make the folder {folder} ({error})") from None
