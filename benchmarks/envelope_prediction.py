"""Does the simulator foretell what was measured on this machine?

    paceline profile --model embedded:smollm2-135m-drafter --out drafter.json
    python -m benchmarks.envelope --out envelope.json
    python -m benchmarks.envelope_prediction drafter.json envelope.json

For each cell of the envelope the simulator runs the same requests of as many clients, over the
drafter's table and the mean of those that the envelope took of its verifier between its rounds. Of
the measurement it is told the lengths; what a plain step of one client takes beyond its forward,
HTTP and all; and how many drafts a step of each text accepts where it always speculates, among as
few clients as there are. Everything else it foretells: how batches grow, what the planner verifies,
when the path policy switches.

Drafts of the suffix drafter are made inside the verifier and cost next to nothing; here a drafter
makes them that takes no time. Tokens per second of wall-clock time; the error is in the logarithm.
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import islice
from pathlib import Path
from typing import Any

from benchmarks.envelope import answer_tokens
from benchmarks.measuring import print_table
from benchmarks.simulation.cluster import SimulatedCluster
from benchmarks.simulation.scenario import Arm, Scenario
from benchmarks.simulation.traffic import make_requests

DEPTHS = {"suffix": 16, "model": 8}
"""Most drafts of a chain: drafters inside the verifier are not bound by
`speculation.num_speculative_tokens`, only by what pays."""
MODES = ("off", "on", "auto")
DURATION_S = 300
"""Simulated at most."""
LEAST_RATIO = 0.85
PROMPT_TABLE_TOKENS = 32
CONTEXT = "256"
SPREADS = {"suffix": 0.9, "model": 0.5}
"""A suffix is found or not; a model is always more or less sure."""

Profile = Mapping[str, Any]
"""What `paceline profile` writes."""


def chance_of(accepted_per_step: float, depth: int) -> float:
    """The chance of every draft of so deep a chain, if so many are accepted on the average."""
    low, high = 0.0, 1.0
    for _ in range(40):
        chance = (low + high) / 2
        expected = sum(chance**position for position in range(1, depth + 1))
        low, high = (chance, high) if expected < accepted_per_step else (low, chance)
    return low


def scenario_of(
    profiles: Sequence[Profile],
    drafter: Profile,
    cell: Mapping[str, Any],
    chance: float,
    num_tokens: int,
    beyond_ms: float = 0.0,
) -> Scenario:
    """The machine and the requests of a cell, whose times do not count. `beyond_ms`: of a step,
    beside its forward."""
    verifier = {context: _mean_table(profiles, context) for context in ("0", CONTEXT)}
    steps = {int(tokens): ms + beyond_ms for tokens, ms in verifier["0"].items()}
    plain = cell["runs"]["off"][0]
    num_requests, prompt_tokens = len(plain["accepted_per_step"]), round(plain["prompt_tokens"])
    context_ms = 1e3 * (verifier[CONTEXT]["1"] - verifier["0"]["1"]) / int(CONTEXT)
    drafting: dict[str, Any] = {"count": 1, "token_ms": {1: 0.001}, "prompt_ms": 0, "rtt_ms": 0.01}
    if cell["drafter"] == "model":
        table = drafter["step_ms"]["0"]
        drafts = {int(tokens): ms for tokens, ms in table.items() if int(tokens) <= 64}
        drafting |= {
            "token_ms": drafts,
            "prompt_ms": table[str(PROMPT_TABLE_TOKENS)] / PROMPT_TABLE_TOKENS,
            "rtt_ms": 1,
        }
    return Scenario.model_validate(
        {
            "seed": 1,
            "duration_s": DURATION_S,
            "traffic": {
                cell["kind"]: {
                    "acceptance": [chance],
                    "spread": SPREADS[cell["drafter"]],
                    "prompt_tokens": {"low": prompt_tokens, "high": prompt_tokens},
                    "output_tokens": {"low": num_tokens, "high": num_tokens},
                }
            },
            "load": {
                "kind": "rate",
                "arrivals": "constant",
                "rate": [{"at_s": 0, "per_s": (num_requests + 0.5) / DURATION_S}],
            },
            "verifiers": {
                "count": 1,
                "step_ms": steps,
                "context_ms": max(0.0, context_ms),
                "prompt_share": statistics.mean(one["prompt_share"] for one in profiles),
                "scheduler": {"max_running_sequences": 32},
                "num_speculative_tokens": DEPTHS[cell["drafter"]],
            },
            "drafters": drafting,
            "routers": {"count": 1},
        }
    )


def _mean_table(profiles: Sequence[Profile], context: str) -> dict[str, float]:
    tables = [profile["step_ms"][context] for profile in profiles]
    return {tokens: statistics.mean(table[tokens] for table in tables) for tokens in tables[0]}


def predicted(scenarios: Sequence[Scenario], mode: str, num_clients: int) -> float:
    """Tokens per second as the envelope counts them. The scenarios differ in what drafts of each
    text are worth, and are taken by turns."""
    of_text = [make_requests(scenario) for scenario in scenarios]
    requests = [of_text[index % len(of_text)][index] for index in range(len(of_text[0]))]
    requests = [
        replace(one, output_tokens=answer_tokens(one.index, num_clients, one.output_tokens))
        for one in requests
    ]
    arm = Arm.model_validate({"name": mode, "mode": mode})
    cluster = SimulatedCluster(scenarios[0], arm, requests, num_clients=num_clients)
    cluster.run()
    free, idle = cluster.first_free, cluster.first_idle
    assert free is not None, "none was answered"
    assert idle is not None, "not all were begun"
    return (idle.num_tokens - free.num_tokens) / (idle.at_s - free.at_s)


def measured_speed(cell: Mapping[str, Any], mode: str) -> float:
    """Tokens per second, the mean of all rounds."""
    return statistics.mean(run["tokens_per_s"] for run in cell["runs"][mode])


def accepted_per_step(envelope: Mapping[str, Any]) -> dict[tuple[str, str], list[float]]:
    """Drafts that a step accepts, by text, where it always speculates, among as few clients as it
    does."""
    found: dict[tuple[str, str], list[float]] = {}
    for cell in sorted(envelope["cells"], key=lambda cell: int(cell["concurrency"])):
        known = found.setdefault((cell["kind"], cell["drafter"]), [])
        by_text = zip(*(run["accepted_per_step"] for run in cell["runs"]["on"]), strict=True)
        num_texts = envelope["num_texts"][cell["kind"]]
        known += [statistics.mean(runs) for runs in islice(by_text, len(known), num_texts)]
    return found


def beyond_forwards_ms(drafter: Profile, envelope: Mapping[str, Any]) -> float:
    """What a plain step of one client took beyond its forward; 0 where none was measured."""
    profiles, num_tokens = envelope["profiles"], envelope["num_tokens"]
    found = [
        1e3 / measured_speed(cell, "off")
        - 1e3 / predicted([scenario_of(profiles, drafter, cell, 0.5, num_tokens)], "off", 1)
        for cell in envelope["cells"]
        if cell["concurrency"] == 1
    ]
    return max(0.0, statistics.mean(found)) if found else 0.0


def compare(drafter: Profile, envelope: Mapping[str, Any]) -> list[list[Any]]:
    """(name, mode, measured, predicted) of every cell."""
    accepted = accepted_per_step(envelope)
    profiles, num_tokens = envelope["profiles"], envelope["num_tokens"]
    beyond_ms = beyond_forwards_ms(drafter, envelope)
    rows = []
    for cell in envelope["cells"]:
        of_text = accepted[cell["kind"], cell["drafter"]]
        chances = [chance_of(one, DEPTHS[cell["drafter"]]) for one in of_text]
        scenarios = [
            scenario_of(profiles, drafter, cell, chance, num_tokens, beyond_ms)
            for chance in chances
        ]
        name = f"{cell['kind']}, {cell['drafter']}, {cell['concurrency']}"
        for mode in MODES:
            measured = measured_speed(cell, mode)
            rows.append([name, mode, measured, predicted(scenarios, mode, cell["concurrency"])])
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0] if __doc__ else None)
    parser.add_argument("drafter", type=Path, help="what paceline profile wrote of the drafter")
    parser.add_argument("envelope", type=Path, help="what benchmarks.envelope --out wrote")
    arguments = parser.parse_args()
    drafter, envelope = (
        json.loads(path.read_text()) for path in (arguments.drafter, arguments.envelope)
    )
    rows = compare(drafter, envelope)
    errors = [abs(math.log(foretold / measured)) for _, _, measured, foretold in rows]
    near = sum(error <= -math.log(LEAST_RATIO) for error in errors)
    print_table(
        "Tokens per second",
        ["text, drafter, clients", "mode", "measured", "predicted", "predicted/measured"],
        [
            [name, mode, f"{measured:.1f}", f"{foretold:.1f}", f"{foretold / measured:.2f}"]
            for name, mode, measured, foretold in rows
        ],
        f"{near} of {len(rows)} within 15 %; mean error {math.expm1(statistics.mean(errors)):.1%}",
    )


if __name__ == "__main__":
    main()
