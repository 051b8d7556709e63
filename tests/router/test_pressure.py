"""In which order things give way as load grows: depth, then speculation, then requests."""

from __future__ import annotations

import pytest

from cluster.config import AdmissionConfig, PathPolicyConfig
from cluster.errors import OverloadedError
from cluster.load import Aged, ClusterLoad, LocalDrafterLoad, VerifierLoad
from cluster.types import Path
from router.admission import Admission
from router.path_policy import PathPolicy, ServiceTier
from router.queue_outlook import queue_outlook
from verifier_service.planner import StepCost, plan_depths

FULL_CORE = {1: 25.0, 2: 32.0, 4: 45.0, 8: 65.0, 16: 115.0, 32: 217.0, 64: 425.0, 128: 840.0}
CHAIN = (0.8, 0.6, 0.4, 0.2)
PLACES = 32


def at(load: int) -> tuple[float, dict[ServiceTier, Path], bool]:
    """With so many requests: depth per sequence, the path of each tier, and whether one more is
    taken."""
    cost, running = StepCost(FULL_CORE), min(load, PLACES)
    depths = plan_depths(cost, running, running, [CHAIN] * running)
    gained = sum(sum(CHAIN[:depth]) for depth in depths)
    longer = cost(running + sum(depths)) / cost(running) - 1
    report = VerifierLoad(
        running=running,
        waiting=load - running,
        max_running=PLACES,
        max_waiting=16,
        place_s=10.0,
        draft_gain=gained / running - longer,
        draft_price=cost(2 * running) / cost(running) - 1,
        local_drafters=(LocalDrafterLoad("suffix"),),
    )
    policy = PathPolicy(PathPolicyConfig(), 0.0)
    idle = VerifierLoad(local_drafters=report.local_drafters)
    policy.observe(ClusterLoad({"v": Aged(idle, 0.0)}), 0.0)
    policy.observe(ClusterLoad({"v": Aged(report, 0.0)}), 10.0)
    try:
        with Admission(AdmissionConfig()).slots(1, outlook=queue_outlook(report, 0), left_s=600.0):
            taken = True
    except OverloadedError:
        taken = False
    return sum(depths) / running, {tier: policy.of_tier(tier).path for tier in ServiceTier}, taken


def test_depth_gives_way_then_speculation_then_requests() -> None:
    seen = [at(load) for load in range(1, PLACES + 20)]
    depths = [depth for depth, _, _ in seen]
    first_shallow = next(i for i, depth in enumerate(depths) if depth < depths[0])
    plain = {
        tier: next(i for i, (_, paths, _) in enumerate(seen) if paths[tier] is Path.PLAIN)
        for tier in ServiceTier
    }
    refused = next(i for i, (_, _, taken) in enumerate(seen) if not taken)
    default, flex, priority = (
        plain[tier] for tier in (ServiceTier.DEFAULT, ServiceTier.FLEX, ServiceTier.PRIORITY)
    )
    assert first_shallow < flex <= default <= priority < refused
    assert not any(taken for _, _, taken in seen[refused:])
    assert refused + 1 == PLACES + 16


@pytest.mark.parametrize("load", [1, 2])
def test_without_pressure_nothing_gives_way(load: int) -> None:
    depth, paths, taken = at(load)
    assert depth >= 1
    assert set(paths.values()) == {Path.SPECULATIVE}
    assert taken
