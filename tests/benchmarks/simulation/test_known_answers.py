"""Simulations whose result is known from arithmetic."""

from __future__ import annotations

from statistics import fmean

import pytest

from benchmarks.simulation.cluster import SimulatedCluster
from benchmarks.simulation.outcome import Outcome, RequestOutcome
from benchmarks.simulation.scenario import Arm, Scenario
from benchmarks.simulation.traffic import make_requests
from tests.benchmarks.simulation.scenarios import FLAT, tiny

ONE_REQUEST = {"kind": "rate", "arrivals": "constant", "rate": [{"at_s": 0, "per_s": 0.01}]}
NETWORK_S = 0.0005


def run(scenario: Scenario, mode: str) -> list[RequestOutcome]:
    arm = Arm.model_validate({"name": mode, "mode": mode})
    cluster = SimulatedCluster(scenario, arm, make_requests(scenario))
    cluster.run()
    return [one for one in cluster.outcomes if one.outcome is Outcome.DONE]


def exactly(tokens: int) -> dict[str, int]:
    return {"low": tokens, "high": tokens}


def test_one_place_and_even_service_is_the_queue_m_d_1() -> None:
    step_s, rate = 0.040, 7.5
    scenario = tiny(
        duration_s=300.0,
        traffic={"chat": {"prompt_tokens": exactly(8), "output_tokens": exactly(2)}},
        load={"kind": "rate", "rate": [{"at_s": 0, "per_s": rate}]},
        verifiers={
            "count": 1,
            "step_ms": FLAT,
            "scheduler": {"max_running_sequences": 1, "max_waiting_sequences": 10_000},
        },
        drafters={"count": 0},
        routers={"count": 1, "admission": {"max_concurrent_requests": 10_000}},
    )
    waits = [
        (one.first_token_s or 0.0) - one.arrival_s - step_s - 2 * NETWORK_S
        for one in run(scenario, "off")
    ]
    service_s = 2 * step_s
    utilisation = rate * service_s
    assert min(waits) == pytest.approx(0.0, abs=1e-9)
    assert fmean(waits) == pytest.approx(utilisation * service_s / (2 * (1 - utilisation)), rel=0.1)


def test_a_stream_alone_takes_a_step_for_each_token() -> None:
    scenario = tiny(
        duration_s=200.0,
        load=ONE_REQUEST,
        traffic={"chat": {"output_tokens": exactly(50)}},
        drafters={"count": 0},
    )
    (one,) = run(scenario, "off")
    assert one.tpot_ms == pytest.approx(40.0)


def test_clients_keep_one_request_each_under_way() -> None:
    """Six answers of ten steps by three clients: three at once, and each of them once more."""
    scenario = tiny(
        duration_s=20.0,
        traffic={"chat": {"prompt_tokens": exactly(8), "output_tokens": exactly(10)}},
        load={"kind": "rate", "arrivals": "constant", "rate": [{"at_s": 0, "per_s": 6.5 / 20.0}]},
        drafters={"count": 0},
        routers={"count": 1},
    )
    arm = Arm.model_validate({"name": "off", "mode": "off"})
    requests = make_requests(scenario)
    cluster = SimulatedCluster(scenario, arm, requests, num_clients=3)
    cluster.run()
    assert len(requests) == 6
    step_s = 0.040
    arrivals = [one.arrival_s for one in cluster.outcomes]
    ends = sorted(one.end_s for one in cluster.outcomes if one.end_s is not None)
    assert arrivals[:3] == [0.0] * 3
    assert arrivals[3:] == ends[:3]
    assert cluster.first_free is not None
    assert cluster.first_free.at_s == ends[0]
    assert cluster.first_idle is not None
    assert cluster.first_idle.at_s == ends[3]
    assert ends[3] == pytest.approx(20 * step_s, abs=2 * step_s)
    assert cluster.first_idle.num_tokens == pytest.approx(60, abs=3)


def test_a_prompt_costs_its_share() -> None:
    """One step reads 400 tokens and draws the first; each takes a millisecond if it draws."""
    scenario = tiny(
        duration_s=200.0,
        load=ONE_REQUEST,
        traffic={"chat": {"prompt_tokens": exactly(400), "output_tokens": exactly(2)}},
        verifiers={
            "count": 1,
            "step_ms": {1: 1.0, 1000: 1000.0},
            "prompt_share": 0.25,
            "scheduler": {"max_prefill_chunk_tokens": 512, "max_step_tokens": 512},
        },
        drafters={"count": 0},
    )
    (one,) = run(scenario, "off")
    assert one.first_token_s is not None
    assert one.first_token_s - one.arrival_s - 2 * NETWORK_S == pytest.approx(0.100)


def test_drafts_that_are_always_right_and_ready_make_a_step_for_every_five_tokens() -> None:
    scenario = tiny(
        duration_s=200.0,
        load=ONE_REQUEST,
        traffic={"chat": {"acceptance": [1.0], "spread": 0, "output_tokens": exactly(1_001)}},
        verifiers={"count": 1, "step_ms": FLAT},
        drafters={"count": 1, "token_ms": {1: 0.1}, "prompt_ms": 0, "rtt_ms": 0.01},
    )
    (one,) = run(scenario, "on")
    assert one.tpot_ms == pytest.approx(40.0 / 5, rel=0.01)


def test_a_stream_that_waits_for_every_draft_is_as_fast_as_the_planner_reckons() -> None:
    accepted, depth, token_ms, rtt_ms = 0.7, 4, 1.0, 2.0
    scenario = tiny(
        duration_s=300.0,
        load={**ONE_REQUEST, "rate": [{"at_s": 0, "per_s": 0.006}]},
        traffic={"chat": {"acceptance": [accepted], "spread": 0, "output_tokens": exactly(6_000)}},
        verifiers={"count": 1, "step_ms": FLAT, "num_speculative_tokens": depth},
        drafters={
            "count": 1,
            "token_ms": {1: token_ms},
            "rtt_ms": rtt_ms,
            "rtt_spread": 0,
            "lead_tokens": 0,
        },
    )
    (one,) = run(scenario, "on")
    tokens = sum(accepted**position for position in range(depth + 1))
    assert one.tpot_ms == pytest.approx((40.0 + rtt_ms + depth * token_ms) / tokens, rel=0.03)
    assert one.num_accepted_tokens / one.num_draft_tokens == pytest.approx(
        (tokens - 1) / depth, rel=0.04
    )
