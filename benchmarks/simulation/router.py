"""A simulated router: production admission, path policy and choice of verifier, over its own view.

It hears a verifier after every step in which that had requests of its own, and else as seldom as
in production. A report takes no time to arrive.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass, field
from functools import partial
from itertools import islice

from benchmarks.simulation.clock import Clock
from benchmarks.simulation.outcome import Outcome, RequestOutcome
from benchmarks.simulation.production import (
    MAX_CANDIDATES,
    REFUSALS,
    SMALL_FLEET,
    SNAPSHOT_S,
    Admission,
    Aged,
    ClusterLoad,
    FleetMean,
    HashRing,
    Path,
    PathDecision,
    PathPolicy,
    PathPolicyConfig,
    QueueOutlook,
    RecentCount,
    SpeculationMode,
    VerifierLoad,
    VerifierView,
    best_outlook,
    choose_verifier,
    cluster_load,
    fleet_mean,
    prompt_affinity,
    queue_outlook,
    with_probes,
)
from benchmarks.simulation.scenario import Routers
from benchmarks.simulation.traffic import Request
from benchmarks.simulation.verifier import SimulatedVerifier


@dataclass(slots=True, eq=False)
class _Link:
    """What a router knows of one verifier."""

    verifier: SimulatedVerifier
    load: VerifierLoad
    load_at_s: float
    unstarted: int = 0
    in_flight: int = 0
    num_unseen: int = 0
    """Requests sent since the latest report."""
    recent: RecentCount = field(default_factory=RecentCount)

    def view(self, now: float) -> VerifierView:
        """What the choice of a verifier is made from."""
        load, name = self.load, self.verifier.name
        recent = self.recent.value(now)
        return VerifierView(name, load.running, load.waiting, self.unstarted, recent)


@dataclass(frozen=True, slots=True)
class _Fleet:
    """The verifiers taken together."""

    mean: FleetMean = field(default_factory=FleetMean)
    outlook: QueueOutlook = field(default_factory=QueueOutlook)


@dataclass(slots=True, eq=False)
class _Held:
    """A request that was taken."""

    request: Request
    outcome: RequestOutcome
    link: _Link
    slots: ExitStack
    path: Path


class SimulatedRouter:
    """One router replica."""

    def __init__(
        self,
        number: int,
        config: Routers,
        policy: PathPolicyConfig,
        clock: Clock,
        on_end: Callable[[], None],
    ) -> None:
        """`on_end` hears of each request that has ended, however."""
        self.number = number
        self.policy = PathPolicy(policy, clock.now)
        self.admission = Admission(config.admission)
        self.oldest_report_s = 0.0
        """Greatest age that the policy has seen of a verifier with requests of this router."""
        self.num_refused = 0
        self._network_s = config.network_ms / 1e3
        self._clock = clock
        self._on_end = on_end
        self._links: dict[int, _Link] = {}
        self._auto: dict[int, _Held] = {}
        """Requests that follow the cluster's mode, by index, in order of age."""
        self._by_name: dict[str, _Link] = {}
        self._ring = HashRing()
        self._fleet_seen, self._fleet_at_s = _Fleet(), float("-inf")
        self._snapshot = ClusterLoad()
        self._snapshot_at_s = float("-inf")

    def update_verifiers(self, verifiers: Mapping[int, SimulatedVerifier]) -> None:
        """Others came or are gone."""
        for number in self._links.keys() - verifiers.keys():
            del self._links[number]
        for number, verifier in verifiers.items():
            if number not in self._links:
                self._links[number] = _Link(verifier, verifier.load(), self._clock.now)
        self._by_name = {link.verifier.name: link for link in self._links.values()}
        self._ring.set_members(set(self._by_name))

    def hear(self, verifier: int, load: VerifierLoad) -> None:
        """A verifier's report."""
        if (link := self._links.get(verifier)) is not None:
            link.load, link.load_at_s = load, self._clock.now
            link.num_unseen = 0

    def silent_s(self, verifier: int) -> float:
        """How old the latest report is."""
        link = self._links.get(verifier)
        return 0.0 if link is None else self._clock.now - link.load_at_s

    def look(self) -> None:
        """Let the path policy see the load; running requests follow where it switches."""
        if not self.policy.observe(self.load(), self._clock.now):
            return
        held = list(self._auto.values())
        decisions = with_probes([self.policy.of_tier(one.request.tier) for one in held])
        changes: dict[int, list[tuple[int, Path]]] = {}
        for one, decision in zip(held, decisions, strict=True):
            if decision.path is not one.path:
                one.path = decision.path
                of_verifier = changes.setdefault(one.link.verifier.number, [])
                of_verifier.append((one.request.index, decision.path))
        for number, of_verifier in changes.items():
            verifier = self._links[number].verifier
            self._clock.after(self._network_s, partial(verifier.set_paths, of_verifier))

    def load(self) -> ClusterLoad:
        """A snapshot, kept as long as in production."""
        now = self._clock.now
        if now - self._snapshot_at_s >= SNAPSHOT_S * len(self._links):
            reports: dict[str, Aged[VerifierLoad]] = {}
            for link in self._links.values():
                age_s = now - link.load_at_s
                reports[link.verifier.name] = Aged(link.load, age_s)
                if link.in_flight and age_s > self.oldest_report_s:
                    self.oldest_report_s = age_s
            self._snapshot, self._snapshot_at_s = cluster_load(reports), now
        return self._snapshot

    def take(self, request: Request, outcome: RequestOutcome) -> None:
        """A request has come; `outcome` is to tell what becomes of it."""
        slots = ExitStack()
        try:
            slots.enter_context(self.admission.slots(1, outlook=self._fleet().outlook))
        except REFUSALS:
            self._end(outcome, Outcome.REFUSED, slots)
            return
        self.look()
        decision = self._decide(request)
        outcome.path = decision.path
        link = self._choose(request)
        if link is None:
            self._end(outcome, Outcome.REFUSED, slots)
            return
        link.unstarted += 1
        link.in_flight += 1
        link.num_unseen += 1
        link.recent.add(self._clock.now)
        one = _Held(request, outcome, link, slots, decision.path)
        if request.mode is SpeculationMode.AUTO:
            self._auto[request.index] = one
        self._clock.after(self._network_s, lambda: self._submit(one))

    def _decide(self, request: Request) -> PathDecision:
        decision = self.policy.decide(self.load(), request.mode, self._clock.now, tier=request.tier)
        if request.mode is not SpeculationMode.AUTO:
            return decision
        num_speculating = sum(one.path is Path.SPECULATIVE for one in self._auto.values())
        return with_probes([decision], len(self._auto), num_speculating)[0]

    def _choose(self, request: Request) -> _Link | None:
        """As VerifierPool chooses."""
        now, affinity = self._clock.now, prompt_affinity((request.index,))
        usable = (
            self._by_name[name]
            for name in self._ring.walk(affinity)
            if not self._by_name[name].verifier.draining
        )
        views = [link.view(now) for link in islice(usable, MAX_CANDIDATES)]
        chosen = choose_verifier(views, self._fleet().mean)
        return None if chosen is None else self._by_name[chosen]

    def _fleet(self) -> _Fleet:
        """Of a small fleet as it is now, of a large one as it was a moment ago."""
        now, count = self._clock.now, len(self._links)
        if count <= SMALL_FLEET or now - self._fleet_at_s >= SNAPSHOT_S * count:
            usable = [link for link in self._links.values() if not link.verifier.draining]
            self._fleet_seen = _Fleet(
                fleet_mean([link.view(now) for link in usable]),
                best_outlook(queue_outlook(link.load, link.num_unseen) for link in usable),
            )
            self._fleet_at_s = now
        return self._fleet_seen

    def _submit(self, one: _Held) -> None:
        outcome, link = one.outcome, one.link

        def told(num_tokens: int, is_last: bool) -> None:
            now = self._clock.now + self._network_s
            if outcome.first_token_s is None:
                outcome.first_token_s = now
                link.unstarted -= 1
            if is_last:
                outcome.end_s = now
                outcome.num_tokens = num_tokens
                self._leave(one, Outcome.DONE)

        if not link.verifier.submit(one.request, self.number, one.path, outcome, told):
            link.unstarted -= 1
            self._leave(one, Outcome.REFUSED)

    def _leave(self, one: _Held, how: Outcome) -> None:
        one.link.in_flight -= 1
        self._auto.pop(one.request.index, None)
        self._end(one.outcome, how, one.slots)

    def _end(self, outcome: RequestOutcome, how: Outcome, slots: ExitStack) -> None:
        slots.close()
        outcome.outcome = how
        self.num_refused += how is Outcome.REFUSED
        self._on_end()
