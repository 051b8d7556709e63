"""The verifiers this router may use, and what it knows of their load."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Collection, Mapping

from cluster.errors import OverloadedError
from cluster.load import Aged, ClusterLoad, DrafterLoad, DrafterState
from cluster.types import Member
from router.generation_client import Clock, GenerationClient, LinkState
from router.verifier_routing import choose_verifier

NOT_READY_RETRY_S = 2.0


class VerifierPool:
    """Keeps one client per member that serves the model this router tokenizes for.

    To be used inside a running event loop. Keys are incarnations throughout.
    """

    def __init__(self, router_id: str, clock: Clock = time.monotonic) -> None:
        self.router_id = router_id
        self.members: dict[str, Member] = {}
        """All that the cluster told, whatever model they serve."""
        self._clock = clock
        self._fingerprint = ""
        self._clients: dict[str, GenerationClient] = {}
        self._retiring: set[asyncio.Task[None]] = set()

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
        views = [
            client.view()
            for incarnation, client in self._clients.items()
            if client.usable and incarnation not in exclude
        ]
        chosen = choose_verifier(views, affinity)
        if chosen is None:
            raise OverloadedError(
                self.describe(), code="not_ready", retry_after_s=NOT_READY_RETRY_S
            )
        return self._clients[chosen]

    def load(self) -> ClusterLoad:
        """A snapshot. Drafters are seen through the verifiers that use them."""
        verifiers = {}
        drafters: dict[str, Aged[DrafterLoad]] = {}
        for incarnation, client in self._clients.items():
            report = client.load()
            if report is None or client.state is not LinkState.READY:
                continue
            verifiers[incarnation] = report
            for drafter in report.value.drafters:
                seen = Aged(drafter, report.age_s)
                other = drafters.get(drafter.incarnation)
                drafters[drafter.incarnation] = _merge(other, seen) if other else seen
        return ClusterLoad(verifiers, drafters)

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
                wanted[incarnation], self.router_id, self._fingerprint, self._clock
            )

    def _retire(self, client: GenerationClient) -> None:
        task = asyncio.create_task(client.retire())
        self._retiring.add(task)
        task.add_done_callback(self._retiring.discard)


def _merge(one: Aged[DrafterLoad], other: Aged[DrafterLoad]) -> Aged[DrafterLoad]:
    """One drafter as two verifiers see it: what each counted itself adds up, and it is ready if
    it is for one of them."""
    best, rest = (one, other) if one.value.state is DrafterState.READY else (other, one)
    return Aged(
        DrafterLoad(
            incarnation=best.value.incarnation,
            state=best.value.state,
            sessions=max(best.value.sessions, rest.value.sessions),
            tokens_per_s=max(best.value.tokens_per_s, rest.value.tokens_per_s),
            queue_ms=max(best.value.queue_ms, rest.value.queue_ms),
            rtt_ms=max(best.value.rtt_ms, rest.value.rtt_ms),
            num_draft_tokens=best.value.num_draft_tokens + rest.value.num_draft_tokens,
            num_accepted_tokens=best.value.num_accepted_tokens + rest.value.num_accepted_tokens,
        ),
        min(best.age_s, rest.age_s),
    )
