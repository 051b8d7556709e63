"""The command line of `paceline simulate`. What it runs is imported when it runs."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any


def add_command(commands: Any) -> None:
    """Add the parser. Bad usage ends the process with exit code 2, as argparse does."""
    parser: argparse.ArgumentParser = commands.add_parser(
        "simulate",
        help="run planner, path policy, routing and scaling over a simulated cluster",
        description=(
            "Simulates a cluster step by step, once for each arm of a scenario over the same "
            "requests, prints what came of it, and with --out writes results.json and report.html."
        ),
    )
    parser.add_argument("scenario", metavar="FILE|NAME", nargs="?", help="what to simulate")
    parser.add_argument("--out", type=Path, metavar="DIR", help="folder for what was found")
    parser.add_argument("--seed", type=_natural, help="instead of the scenario's")
    parser.add_argument(
        "--arm", action="append", metavar="NAME", help="only this arm; may be given several times"
    )
    parser.add_argument("--list", action="store_true", help="show the scenarios that come along")

    def run(arguments: argparse.Namespace) -> bool:
        from benchmarks.simulation import simulation

        if arguments.list:
            simulation.list_scenarios()
            return True
        if arguments.scenario is None:
            parser.error("a scenario is needed: a YAML file, or a name that --list shows")
        return simulation.run(arguments)

    parser.set_defaults(command=run)


def _natural(text: str) -> int:
    number = int(text)
    if number < 0:
        raise argparse.ArgumentTypeError("must not be negative")
    return number
