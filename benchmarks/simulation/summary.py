"""From a cluster that ran to the figures of its arm."""

from __future__ import annotations

from bisect import bisect_right
from collections import Counter
from collections.abc import Callable, Sequence
from itertools import pairwise
from operator import truediv

from benchmarks.loadtest.statistics import Distribution, distribution
from benchmarks.simulation.cluster import Sample, SimulatedCluster
from benchmarks.simulation.outcome import Outcome, RequestOutcome
from benchmarks.simulation.production import Path
from benchmarks.simulation.results import ArmResult, KindResult, Timeline
from benchmarks.simulation.scenario import Arm, Scenario

Outcomes = Sequence[RequestOutcome]


def summarise(scenario: Scenario, arm: Arm, cluster: SimulatedCluster, cpu_s: float) -> ArmResult:
    """Of one arm that ran to its end."""
    reported = [one for one in cluster.outcomes if one.arrival_s >= scenario.warmup_s]
    num_good = sum(one.is_good(scenario.slo) for one in reported)
    verifiers, drafters = cluster.verifiers, cluster.drafters
    # Replicas that come or go are counted from the timeline.
    verifier_s = _integral(cluster.samples, lambda sample: sample.num_verifiers)
    drafter_s = _integral(cluster.samples, lambda sample: sample.num_drafters)
    switches = Counter(
        {
            f"{path.value}: {code.value}": 0
            for router in cluster.routers
            for path, code in router.policy.switches
        }
    )
    for router in cluster.routers:
        for (path, code), count in router.policy.switches.items():
            switches[f"{path.value}: {code.value}"] += count
    return ArmResult(
        name=arm.name,
        mode=arm.mode,
        planner=arm.planner,
        outcomes={
            how.value: sum(one.outcome is how for one in cluster.outcomes) for how in Outcome
        },
        output_tokens_per_s=sum(v.num_tokens for v in verifiers) / scenario.duration_s,
        goodput_rps=num_good / (scenario.duration_s - scenario.warmup_s),
        attainment=_share(num_good, len(reported)),
        ttft_ms=_of_done(reported, lambda one: one.ttft_ms),
        tpot_ms=_of_done(reported, lambda one: one.tpot_ms),
        e2e_ms=_of_done(reported, lambda one: one.e2e_ms),
        speculative_share=_share(
            sum(one.path is Path.SPECULATIVE for one in reported), len(reported)
        ),
        accepted_share=_accepted(reported),
        tokens_per_step=_tokens_per_step(cluster),
        switches=dict(sorted(switches.items())),
        num_steps=sum(v.num_steps for v in verifiers),
        waited_share=sum(v.waited_s for v in verifiers) / verifier_s,
        verifiers_busy=sum(v.busy_s for v in verifiers) / verifier_s,
        drafters_busy=sum(d.busy_s for d in drafters) / drafter_s if drafter_s else 0.0,
        num_late=sum(v.num_late for v in verifiers),
        num_preemptions=sum(v.num_preemptions for v in verifiers),
        oldest_report_s=max(router.oldest_report_s for router in cluster.routers),
        kinds=tuple(_of_kind(kind, reported, scenario) for kind in scenario.traffic),
        timeline=_timeline(cluster.samples, cluster.outcomes, scenario),
        cpu_s=cpu_s,
    )


def _tokens_per_step(cluster: SimulatedCluster) -> float | None:
    accepted = sum(one.num_accepted_tokens for one in cluster.outcomes)
    drafted_parts = sum(verifier.num_drafted_parts for verifier in cluster.verifiers)
    return 1.0 + accepted / drafted_parts if drafted_parts else None


def _of_kind(kind: str, reported: Outcomes, scenario: Scenario) -> KindResult:
    of_kind = [one for one in reported if one.kind == kind]
    tpot = _of_done(of_kind, lambda one: one.tpot_ms)
    return KindResult(
        kind=kind,
        requests=len(of_kind),
        good=sum(one.is_good(scenario.slo) for one in of_kind),
        tpot_p50_ms=None if tpot is None else tpot.p50.value,
        accepted_share=_accepted(of_kind),
    )


def _accepted(outcomes: Outcomes) -> float | None:
    return _share(
        sum(one.num_accepted_tokens for one in outcomes),
        sum(one.num_draft_tokens for one in outcomes),
    )


def _share(part: int, whole: int) -> float | None:
    return part / whole if whole else None


def _of_done(
    outcomes: Outcomes, figure: Callable[[RequestOutcome], float | None]
) -> Distribution | None:
    values = (figure(one) for one in outcomes if one.outcome is Outcome.DONE)
    return distribution([value for value in values if value is not None])


def _integral(samples: Sequence[Sample], count: Callable[[Sample], int]) -> float:
    """Replica-seconds."""
    return sum(count(a) * (b.at_s - a.at_s) for a, b in pairwise(samples))


def _timeline(samples: Sequence[Sample], outcomes: Outcomes, scenario: Scenario) -> Timeline:
    steps = list(pairwise(samples))
    ends = [b.at_s for _, b in steps]
    arrived, good = [0] * len(steps), [0] * len(steps)
    for one in outcomes:
        place = min(bisect_right(ends, one.arrival_s), len(steps) - 1)
        arrived[place] += 1
        good[place] += one.is_good(scenario.slo)
    seconds = [b.at_s - a.at_s for a, b in steps]
    return Timeline(
        at_s=tuple(a.at_s for a, _ in steps),
        arrived_per_s=tuple(map(truediv, arrived, seconds)),
        good_per_s=tuple(map(truediv, good, seconds)),
        speculative=tuple(b.speculative for _, b in steps),
        plain=tuple(b.plain for _, b in steps),
        mode_share=tuple(b.mode_share for _, b in steps),
        output_tokens_per_s=tuple(
            (b.num_tokens - a.num_tokens) / (b.at_s - a.at_s) for a, b in steps
        ),
        refused_per_s=tuple((b.num_refused - a.num_refused) / (b.at_s - a.at_s) for a, b in steps),
        drafters_busy=tuple(
            (b.drafters_busy_s - a.drafters_busy_s) / (b.at_s - a.at_s) / max(1, a.num_drafters)
            for a, b in steps
        ),
        verifiers=tuple(b.num_verifiers for _, b in steps),
        drafters=tuple(b.num_drafters for _, b in steps),
    )
