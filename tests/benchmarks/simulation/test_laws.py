"""What must hold of any simulation."""

from __future__ import annotations

import hashlib
import subprocess
import sys

import pytest

from benchmarks.simulation.cluster import SimulatedCluster
from benchmarks.simulation.outcome import Outcome
from benchmarks.simulation.results import Results
from benchmarks.simulation.scenario import Arm, Scenario
from benchmarks.simulation.simulation import simulate
from benchmarks.simulation.traffic import make_requests
from tests.benchmarks.simulation.scenarios import FLAT, tiny

CROWDED = tiny(
    load={"kind": "rate", "rate": [{"at_s": 0, "per_s": 60}]},
    verifiers={
        "count": 2,
        "step_ms": {1: 40, 16: 44, 64: 90},
        "kv_tokens": 400,
        "jitter": 0.1,
        "scheduler": {
            "max_running_sequences": 8,
            "max_waiting_sequences": 4,
            "max_prefill_chunk_tokens": 32,
        },
    },
    routers={"count": 3, "admission": {"max_concurrent_requests": 40}},
)
"""Everything runs short: places, queue, cache, drafters."""


def run(scenario: Scenario, mode: str) -> SimulatedCluster:
    arm = Arm.model_validate({"name": mode, "mode": mode})
    cluster = SimulatedCluster(scenario, arm, make_requests(scenario))
    cluster.run()
    return cluster


def told(cluster: SimulatedCluster) -> list[tuple[object, ...]]:
    """Everything that clients saw."""
    return [
        (one.index, one.outcome, one.first_token_s, one.end_s, one.num_tokens)
        for one in cluster.outcomes
    ]


@pytest.mark.parametrize("mode", ["auto", "on", "off"])
@pytest.mark.parametrize("scenario", [tiny(), CROWDED], ids=["tiny", "crowded"])
def test_every_request_has_one_end_and_every_token_an_owner(scenario: Scenario, mode: str) -> None:
    cluster = run(scenario, mode)
    requests = make_requests(scenario)
    assert [one.index for one in cluster.outcomes] == [request.index for request in requests]

    running = {index for v in cluster.verifiers for index in v.sequences}
    for one, request in zip(cluster.outcomes, requests, strict=True):
        if one.outcome is Outcome.DONE:
            assert one.index not in running
            assert one.num_tokens == request.output_tokens
            assert one.first_token_s is not None
            assert one.end_s is not None
            assert request.arrival_s < one.first_token_s <= one.end_s
        elif one.outcome is Outcome.REFUSED:
            assert one.index not in running
            assert one.first_token_s is None
    on_the_way = sum(one.outcome is Outcome.RUNNING for one in cluster.outcomes) - len(running)
    assert 0 <= on_the_way <= len(cluster.routers)  # One network delay's worth at most.

    of_running = sum(s.speculation.tip for v in cluster.verifiers for s in v.sequences.values())
    of_done = sum(one.num_tokens for one in cluster.outcomes)
    assert sum(v.num_tokens for v in cluster.verifiers) == of_done + of_running
    assert (
        sum(router.admission.in_flight for router in cluster.routers) == len(running) + on_the_way
    )
    for verifier in cluster.verifiers:
        assert verifier.kv_used == sum(s.kv_tokens for s in verifier.running)
        assert verifier.kv_used <= scenario.verifiers.kv_tokens
    num_sessions = sum(
        s.session is not None for v in cluster.verifiers for s in v.sequences.values()
    )
    assert sum(drafter.num_sessions for drafter in cluster.drafters) == num_sessions


def test_the_crowded_scenario_is_crowded() -> None:
    cluster = run(CROWDED, "on")
    assert sum(verifier.num_preemptions for verifier in cluster.verifiers) > 0
    assert sum(router.num_refused for router in cluster.routers) > 0
    assert sum(one.num_accepted_tokens for one in cluster.outcomes) > 0


DIGEST = """
from benchmarks.simulation.simulation import simulate
from tests.benchmarks.simulation.test_laws import CROWDED, digest
print(digest(simulate(CROWDED, "x")))
"""


def digest(results: Results) -> str:
    return hashlib.sha256(results.digest_form.encode()).hexdigest()


def test_the_same_seed_gives_the_same_simulation_in_another_process() -> None:
    there = subprocess.run(
        [sys.executable, "-c", DIGEST],
        env={"PYTHONHASHSEED": "1", "PYTHONPATH": "."},
        check=True,
        capture_output=True,
        text=True,
    )
    assert there.stdout.strip() == digest(simulate(CROWDED, "x"))


def test_another_seed_gives_another_simulation() -> None:
    assert simulate(tiny(), "x").digest_form != simulate(tiny(seed=1), "x").digest_form


def test_off_takes_exactly_what_steps_without_drafts_take() -> None:
    plain = run(tiny(drafters={"count": 0}), "off")
    beside_drafters = run(tiny(verifiers={"drafting_ms": 5.0}), "off")
    assert told(beside_drafters) == told(plain)
    assert all(d.busy_s == 0 and d.num_tokens == 0 for d in beside_drafters.drafters)


def test_without_drafters_auto_is_off() -> None:
    off, auto = (run(tiny(drafters={"count": 0}), mode) for mode in ("off", "auto"))
    assert told(auto) == told(off)


def test_a_router_hears_often_of_verifiers_that_serve_it() -> None:
    cluster = run(tiny(load={"kind": "rate", "rate": [{"at_s": 0, "per_s": 20}]}), "auto")
    assert 0.0 < max(router.oldest_report_s for router in cluster.routers) < 1.0
    for router in cluster.routers:
        assert len(router.load().verifiers) == 2
        assert all(aged.age_s <= 1.1 for aged in router.load().verifiers.values())


def test_the_mode_follows_what_drafts_are_worth() -> None:
    cheap = run(tiny(verifiers={"step_ms": FLAT}), "auto")
    assert all(v.num_speculative_steps > 0 for v in cheap.verifiers)
    assert {router.policy.mode.value for router in cheap.routers} == {"speculative"}

    dear = tiny(
        load={"kind": "rate", "rate": [{"at_s": 0, "per_s": 30}]},
        verifiers={"step_ms": {1: 10, 2: 20, 64: 640}},
        traffic={"chat": {"acceptance": [0.1], "prompt_tokens": {"low": 16, "high": 16}}},
    )
    assert {router.policy.mode.value for router in run(dear, "auto").routers} == {"plain"}


def test_figures_copied_from_production_are_those_of_production() -> None:
    """They stand in modules that load torch, or are private there."""
    from benchmarks.simulation import drafter, production, verifier
    from drafter_service import scheduler
    from router import service
    from verifier_service import draft_client, engine

    assert production.POLICY_TICK_S == service.POLICY_TICK_S
    assert production.MAX_STREAMS == draft_client.MAX_STREAMS
    assert production.HOUSEKEEPING_PERIOD_S == draft_client.HOUSEKEEPING_PERIOD_S
    assert drafter.MAX_ROUND_SESSIONS == scheduler.MAX_ROUND_SESSIONS
    assert drafter.ROUND_MS == 1e3 * scheduler.ROUND_S
    assert verifier.AVERAGING == engine._AVERAGING
    assert verifier.PLACE_AVERAGING == engine._PLACE_AVERAGING
