"""The verifiers this router may use, and what it knows of their load."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from itertools import islice

from cluster.errors import OverloadedError
from cluster.load import ClusterLoad, cluster_load, report_interval_s
from cluster.member_auth import OPEN, MemberAuth
from cluster.types import Member
from router.generation_client import Clock, GenerationClient, LinkState
from router.queue_outlook import QueueOutlook, best_outlook
from router.verifier_routing import (
    MAX_CANDIDATES,
    FleetMean,
    HashRing,
    choose_verifier,
    fleet_mean,
)

NOT_READY_RETRY_S = 2.0
SNAPSHOT_S = 0.002
"""A snapshot is kept for so long per verifier; to make one takes less than a hundredth of that."""
SMALL_FLEET = 16
"""Verifiers up to which means are made anew for each request."""


@dataclass(frozen=True, slots=True)
class _Fleet:
    """The verifiers that may be used, taken together."""

    mean: FleetMean = field(default_factory=FleetMean)
    outlook: QueueOutlook = field(default_factory=QueueOutlook)


class VerifierPool:
    """Keeps one client per member that serves the model this router tokenizes for.

    To be used inside a running event loop. Keys are incarnations throughout.
    """

    def __init__(
        self, router_id: str, clock: Clock = time.monotonic, auth: MemberAuth = OPEN
    ) -> None:
        self.router_id = router_id
        self.members: dict[str, Member] = {}
        """All that the cluster told, whatever model they serve."""
        self._clock = clock
        self._auth = auth
        self._fingerprint = ""
        self._clients: dict[str, GenerationClient] = {}
        self._retiring: set[asyncio.Task[None]] = set()
        self._snapshot = ClusterLoad()
        self._snapshot_at = float("-inf")
        self._ring = HashRing()
        self._fleet_seen = _Fleet()
        self._fleet_at = float("-inf")
        self.num_resumes = 0
        """Generations that went on at another verifier."""

    def serve(self, fingerprint: str) -> None:
        """Use the members of this fingerprint from now on."""
        self._fingerprint = fingerprint
        self._reconcile()

    def update_members(self, members: Mapping[str, Member]) -> None:
        """Take the current members; clients of others finish what they run and close."""
        self.members = dict(members)
        self._reconcile()

    @property
    def clients(self) -> dict[str, GenerationClient]:
        """Of the current members that serve the model."""
        return self._clients

    @property
    def ready(self) -> bool:
        return any(client.usable for client in self._clients.values())

    @property
    def num_in_flight(self) -> int:
        return sum(client.num_in_flight for client in self._clients.values())

    def describe(self) -> str:
        """Why there is no usable verifier, for a person."""
        if not self.members:
            return "no verifier is running yet"
        if not self._clients:
            return f"none of {len(self.members)} verifiers serves the model this router was given"
        states = sorted(
            "draining" if client.draining else client.state.value
            for client in self._clients.values()
        )
        return f"no verifier is ready ({', '.join(states)})"

    def choose(self, affinity: bytes, exclude: Collection[str] = ()) -> GenerationClient:
        """The verifier for a new request. Raises OverloadedError if there is none."""
        usable = (
            self._clients[name].view()
            for name in self._ring.walk(affinity)
            if self._clients[name].usable and name not in exclude
        )
        chosen = choose_verifier(list(islice(usable, MAX_CANDIDATES)), self._fleet().mean)
        if chosen is None:
            raise OverloadedError(
                self.describe(), code="not_ready", retry_after_s=NOT_READY_RETRY_S
            )
        return self._clients[chosen]

    def outlook(self) -> QueueOutlook:
        """How long a new request would wait at the best verifier."""
        return self._fleet().outlook

    def _fleet(self) -> _Fleet:
        """Of a small fleet as it is now, of a large one as it was a moment ago."""
        now = self._clock()
        if len(self._clients) <= SMALL_FLEET or (
            now - self._fleet_at >= SNAPSHOT_S * len(self._clients)
        ):
            usable = [client for client in self._clients.values() if client.usable]
            self._fleet_seen = _Fleet(
                fleet_mean([client.view() for client in usable]),
                best_outlook(client.outlook() for client in usable),
            )
            self._fleet_at = now
        return self._fleet_seen

    def load(self) -> ClusterLoad:
        """A snapshot, made anew so seldom that a large fleet costs no more than a small one."""
        now = self._clock()
        if now - self._snapshot_at >= SNAPSHOT_S * len(self._clients):
            self._snapshot, self._snapshot_at = self._make_snapshot(), now
        return self._snapshot

    def _make_snapshot(self) -> ClusterLoad:
        ready = {n: c.load() for n, c in self._clients.items() if c.state is LinkState.READY}
        return cluster_load({name: report for name, report in ready.items() if report is not None})

    async def close(self) -> None:
        """Close every stream."""
        clients = list(self._clients.values())
        self._clients = {}
        for task in self._retiring:
            task.cancel()
        await asyncio.gather(*(client.close() for client in clients))
        await asyncio.gather(*self._retiring, return_exceptions=True)

    def _reconcile(self) -> None:
        wanted = {
            incarnation: member
            for incarnation, member in self.members.items()
            if self._fingerprint and member.fingerprint in ("", self._fingerprint)
        }
        for incarnation in self._clients.keys() - wanted.keys():
            self._retire(self._clients.pop(incarnation))
        for incarnation in wanted.keys() - self._clients.keys():
            self._clients[incarnation] = GenerationClient(
                wanted[incarnation], self.router_id, self._fingerprint, self._clock, self._auth
            )
        self._ring.set_members(set(self._clients))
        for client in self._clients.values():
            client.set_load_interval(report_interval_s(len(self._clients)))

    def _retire(self, client: GenerationClient) -> None:
        task = asyncio.create_task(client.retire())
        self._retiring.add(task)
        task.add_done_callback(self._retiring.discard)
