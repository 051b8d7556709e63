"""A simulated cluster from its start to its end, in one arm of a scenario."""

from __future__ import annotations

import gc
import random
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from benchmarks.simulation.clock import Clock
from benchmarks.simulation.drafter import Answer, SimulatedDrafter
from benchmarks.simulation.outcome import RequestOutcome
from benchmarks.simulation.production import (
    HOUSEKEEPING_PERIOD_S,
    POLICY_TICK_S,
    Path,
    report_interval_s,
)
from benchmarks.simulation.router import SimulatedRouter
from benchmarks.simulation.scaler import PERIOD_S, Scaler
from benchmarks.simulation.scenario import Arm, Scenario
from benchmarks.simulation.traffic import Request
from benchmarks.simulation.verifier import SimulatedVerifier

NUM_SAMPLES = 120
"""Of the timeline."""


@dataclass(frozen=True, slots=True)
class Sample:
    """The cluster at one time; what is counted is counted since the start."""

    at_s: float
    speculative: int
    """Sequences on that path, waiting ones included."""
    plain: int
    mode_share: float
    """Of routers whose mode is speculative."""
    num_tokens: int
    num_refused: int
    drafters_busy_s: float
    """Of all drafters together."""
    num_verifiers: int
    """That take requests."""
    num_drafters: int


class SimulatedCluster:
    """Routers, verifiers and drafters on one clock."""

    def __init__(
        self,
        scenario: Scenario,
        arm: Arm,
        requests: list[Request],
        *,
        num_clients: int | None = None,
    ) -> None:
        """Requests come at their times; or, given clients, each of which has one under way, as soon
        as a client is free."""
        self.clock = Clock()
        self.outcomes = [RequestOutcome(r.index, r.kind, r.arrival_s) for r in requests]
        """Of all requests, in order of arrival."""
        self.samples: list[Sample] = []
        self.first_free: Sample | None = None
        """When a client first came for another request."""
        self.first_idle: Sample | None = None
        """When one first found none left."""
        self.verifiers: list[SimulatedVerifier] = []
        """All that ever ran, by number."""
        self.drafters: list[SimulatedDrafter] = []
        """The same."""
        self._scenario = scenario
        self._arm = arm
        self._requests = iter(requests)
        self._num_clients = num_clients
        self._usable_drafters: dict[int, SimulatedDrafter] = {}
        policy = scenario.routers.path_policy.model_copy(update={"mode": arm.mode})
        self.routers = [
            SimulatedRouter(number, scenario.routers, policy, self.clock, self._request_ended)
            for number in range(scenario.routers.count)
        ]
        for _ in range(scenario.drafters.count):
            self._add_drafter()
        for _ in range(scenario.verifiers.count):
            self._add_verifier()
        self._members_changed()

    def run(self) -> None:
        """From the first request to the end of the scenario's time."""
        clock, scenario = self.clock, self._scenario
        for router in self.routers:  # Each has ticks of its own.
            first_s = POLICY_TICK_S * (router.number + 1) / len(self.routers)
            clock.every(POLICY_TICK_S, router.look, first_s)
        clock.every(HOUSEKEEPING_PERIOD_S, self._keep_house)
        interval_s = report_interval_s(scenario.verifiers.count)
        clock.every(interval_s / 10, lambda: self._report_idle(interval_s))
        if scenario.verifiers.scaling is not None:
            of_verifiers = Scaler(scenario.verifiers.scaling, scenario.verifiers.count)
            clock.every(PERIOD_S, lambda: self._scale_verifiers(of_verifiers), PERIOD_S)
        if scenario.drafters.scaling is not None:
            of_drafters = Scaler(scenario.drafters.scaling, scenario.drafters.count)
            clock.every(PERIOD_S, lambda: self._scale_drafters(of_drafters), PERIOD_S)
        clock.every(scenario.duration_s / NUM_SAMPLES, self._sample)
        if self._num_clients is None:
            self._arrive()
        for _ in range(self._num_clients or 0):
            clock.after(0.0, self._ask)
        with _uncollected():
            clock.run(scenario.duration_s)
        self._sample()

    def _arrive(self) -> None:
        """Let one request come after the other."""
        request = next(self._requests, None)
        if request is not None:
            self.clock.at(request.arrival_s, lambda: self._come(request))

    def _come(self, request: Request) -> None:
        self._take(request)
        self._arrive()

    def _take(self, request: Request) -> None:
        router = self.routers[request.router % len(self.routers)]
        router.take(request, self.outcomes[request.index])

    def _ask(self) -> None:
        """A client is free."""
        request = next(self._requests, None)
        if request is not None:
            self.outcomes[request.index].arrival_s = self.clock.now
            self._take(request)
        elif self.first_idle is None:
            self.first_idle = self._look()

    def _request_ended(self) -> None:
        if self._num_clients is not None:
            self.clock.after(self._scenario.routers.network_ms / 1e3, self._ask_again)

    def _ask_again(self) -> None:
        if self.first_free is None:
            self.first_free = self._look()
        self._ask()

    # --- members ---

    def _add_verifier(self) -> SimulatedVerifier:
        number, seed = len(self.verifiers), self._scenario.seed
        verifier = SimulatedVerifier(
            number,
            self._scenario.verifiers,
            self.clock,
            self._usable_drafters,
            self._report,
            planner=self._arm.planner,
            rtt_s=lambda drafter: self._rtt_s(number, drafter),
            seed=f"{seed}/verifier/{number}",
        )
        self.verifiers.append(verifier)
        return verifier

    def _add_drafter(self) -> SimulatedDrafter:
        number = len(self.drafters)
        drafter = SimulatedDrafter(number, self._scenario.drafters, self.clock, self._deliver)
        self.drafters.append(drafter)
        self._usable_drafters[number] = drafter
        return drafter

    def _rtt_s(self, verifier: int, drafter: int) -> float:
        """Of one pair: always the same."""
        config = self._scenario.drafters
        rng = random.Random(f"{self._scenario.seed}/pair/{verifier}/{drafter}")
        spread = config.rtt_spread
        return config.rtt_ms / 1e3 * rng.uniform(1 - spread, 1 + spread)

    def _deliver(self, drafter: SimulatedDrafter, verifier: int, answers: list[Answer]) -> None:
        self.verifiers[verifier].drafts.deliver(drafter.number, answers)

    def _members_changed(self) -> None:
        serving = {v.number: v for v in self.verifiers if not v.is_gone}
        for router in self.routers:
            router.update_verifiers(serving)
        for verifier in serving.values():
            verifier.update_drafters()

    def _keep_house(self) -> None:
        for verifier in self.verifiers:
            verifier.keep_house()

    # --- reports ---

    def _report(self, verifier: SimulatedVerifier) -> None:
        """To routers that have requests there."""
        load = verifier.load()
        for number, count in verifier.in_flight.items():
            if count:
                self.routers[number].hear(verifier.number, load)

    def _report_idle(self, interval_s: float) -> None:
        """To routers that heard nothing for long."""
        for verifier in self.verifiers:
            silent = [r for r in self.routers if r.silent_s(verifier.number) >= 0.9 * interval_s]
            if silent:
                load = verifier.load()
                for router in silent:
                    router.hear(verifier.number, load)

    # --- scaling ---

    def _scale_verifiers(self, scaler: Scaler) -> None:
        serving = [v for v in self.verifiers if not v.draining]
        stats = {
            v.name: {"running": float(len(v.running)), "waiting": float(len(v.waiting))}
            for v in serving
        }
        before, target = scaler.target, scaler.decide(stats, self.clock.now)
        for _ in range(target - before):
            self.clock.after(scaler.config.start_s, self._verifier_is_up)
        for verifier in serving[max(0, len(serving) + min(0, target - before)) :]:
            verifier.draining = True
        if any(v.draining and v.is_empty and not v.is_gone for v in self.verifiers):
            for verifier in self.verifiers:
                verifier.is_gone |= verifier.draining and verifier.is_empty
            self._members_changed()

    def _verifier_is_up(self) -> None:
        self._add_verifier()
        self._members_changed()

    def _scale_drafters(self, scaler: Scaler) -> None:
        serving = list(self._usable_drafters.values())
        stats = {d.name: {"sessions": float(d.num_sessions)} for d in serving}
        before, target = scaler.target, scaler.decide(stats, self.clock.now)
        for _ in range(target - before):
            self.clock.after(scaler.config.start_s, self._drafter_is_up)
        leaving = serving[max(0, len(serving) + min(0, target - before)) :]
        for drafter in leaving:
            drafter.draining = True
            for verifier in self.verifiers:
                verifier.leave_drafter(drafter.number)
            del self._usable_drafters[drafter.number]
        if leaving:
            self._members_changed()

    def _drafter_is_up(self) -> None:
        self._add_drafter()
        self._members_changed()

    # --- what is seen of it ---

    def _sample(self) -> None:
        self.samples.append(self._look())

    def _look(self) -> Sample:
        sequences = [s for v in self.verifiers for s in (*v.running, *v.waiting)]
        plain = sum(s.is_plain for s in sequences)
        speculating = sum(router.policy.mode is Path.SPECULATIVE for router in self.routers)
        return Sample(
            at_s=self.clock.now,
            speculative=len(sequences) - plain,
            plain=plain,
            mode_share=speculating / len(self.routers),
            num_tokens=sum(v.num_tokens for v in self.verifiers),
            num_refused=sum(router.num_refused for router in self.routers),
            drafters_busy_s=sum(d.busy_s for d in self.drafters),
            num_verifiers=sum(not v.draining for v in self.verifiers),
            num_drafters=len(self._usable_drafters),
        )


@contextmanager
def _uncollected() -> Iterator[None]:
    """Without garbage collection: what lives is much, and nothing here is in a cycle."""
    gc.disable()
    try:
        yield
    finally:
        gc.enable()
