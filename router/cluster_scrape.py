"""Asks every member of the cluster, all at once and within a deadline.

What it costs is bounded by construction: one round at a time, its answer shared by all who ask
within a second, in a large fleet within a second for each hundred members. A member that does not
answer costs its part of the answer, and is asked last next time.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from typing import Generic, TypeVar

import grpc

from cluster.member_auth import MemberAuth, Role
from cluster.members_service import Metadata, RouterStatus, ask_metrics, ask_router_status
from cluster.metrics import merge_families, split_families
from cluster.rpc import open_channel
from cluster.types import Member
from router.generation_client import Clock

DEADLINE_S = 1.0
"""Of one member's answer, and of a round but for the time that asking takes by itself."""
ASKING_S = 0.002
"""Of the round's deadline, for each member."""
MAX_CONCURRENT_CALLS = 128
SHARED_FOR_S = 1.0
MEMBERS_PER_S = 100
"""To ask a member takes 0.5 ms of the event loop: rounds take at most 5 % of it."""

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Peer:
    """A member to be asked."""

    role: Role
    member: Member


class Shared(Generic[T]):
    """A value that is made by one at a time and kept for a while, however many ask for it."""

    def __init__(
        self, make: Callable[[], Awaitable[T]], kept_for_s: Callable[[], float], clock: Clock
    ) -> None:
        self._make = make
        self._kept_for_s = kept_for_s
        self._clock = clock
        self._making: asyncio.Task[T] | None = None
        self._fresh_until = 0.0

    async def get(self) -> T:
        """The value, not older than it is kept for."""
        if self._making is None or (self._making.done() and self._clock() >= self._fresh_until):
            self._making = asyncio.create_task(self._run())
        # Shielded: who leaves takes nothing from the others who wait.
        return await asyncio.shield(self._making)

    async def close(self) -> None:
        if self._making is not None:
            self._making.cancel()
            await asyncio.gather(self._making, return_exceptions=True)

    async def _run(self) -> T:
        try:
            return await self._make()
        finally:
            self._fresh_until = self._clock() + self._kept_for_s()


class ClusterScrape:
    """Keeps a channel to each peer it has asked for as long as that is a member and answers."""

    def __init__(
        self,
        own_text: Callable[[], str],
        peers: Callable[[], list[Peer]],
        auth: MemberAuth,
        clock: Clock,
    ) -> None:
        """`own_text` is this router's exposition; `peers` are the other members of this moment."""
        self.errors: Counter[str] = Counter(dict.fromkeys(Role, 0))
        """Members that did not answer a scrape in time, by role."""
        self._own_text = own_text
        self._peers = peers
        self._auth = auth
        self._channels: dict[str, grpc.aio.Channel] = {}
        self._silent: set[str] = set()
        self._metrics = Shared(self._scrape, self._kept_for_s, clock)
        self._routers = Shared(self._ask_routers, self._kept_for_s, clock)

    async def metrics(self) -> bytes:
        """The exposition of the whole cluster."""
        return await self._metrics.get()

    async def routers(self) -> Mapping[str, RouterStatus]:
        """What the other routers tell, by incarnation."""
        return await self._routers.get()

    async def close(self) -> None:
        """Close every channel."""
        await self._metrics.close()
        await self._routers.close()
        await asyncio.gather(*(channel.close(None) for channel in self._channels.values()))
        self._channels.clear()

    def _kept_for_s(self) -> float:
        return max(SHARED_FOR_S, len(self._peers()) / MEMBERS_PER_S)

    async def _scrape(self) -> bytes:
        peers = self._peers()
        texts = await self._ask(peers, _families)
        for peer in peers:
            self.errors[peer.role] += peer.member.incarnation not in texts
        families = [split_families(self._own_text()), *(texts[name] for name in sorted(texts))]
        # A large fleet's text takes milliseconds to join.
        return (await asyncio.to_thread(merge_families, families)).encode()

    async def _ask_routers(self) -> Mapping[str, RouterStatus]:
        peers = [peer for peer in self._peers() if peer.role is Role.ROUTER]
        return await self._ask(peers, _status)

    async def _ask(
        self, peers: list[Peer], ask: Callable[[grpc.aio.Channel, Metadata], Awaitable[T]]
    ) -> dict[str, T]:
        """The answers that came within the deadline, by incarnation."""
        await self._close_stale_channels()
        metadata = self._auth.metadata
        answers: dict[str, T] = {}
        free = asyncio.Semaphore(MAX_CONCURRENT_CALLS)

        async def ask_one(peer: Peer) -> None:
            name = peer.member.incarnation
            async with free:
                try:
                    answers[name] = await ask(self._channel(peer), metadata)
                    self._silent.discard(name)
                except (grpc.aio.AioRpcError, ValueError):
                    self._silent.add(name)

        # Those that were silent last, so that they hold nobody up.
        ordered = sorted(peers, key=lambda peer: peer.member.incarnation in self._silent)
        tasks = [asyncio.create_task(ask_one(peer)) for peer in ordered]
        if tasks:
            _, late = await asyncio.wait(tasks, timeout=DEADLINE_S + ASKING_S * len(tasks))
            for task in late:
                task.cancel()
            await asyncio.gather(*late, return_exceptions=True)
        self._silent |= {peer.member.incarnation for peer in peers} - answers.keys()
        return answers

    def _channel(self, peer: Peer) -> grpc.aio.Channel:
        name = peer.member.incarnation
        if name not in self._channels:
            self._channels[name] = open_channel(peer.member.address, peer.role, auth=self._auth)
        return self._channels[name]

    async def _close_stale_channels(self) -> None:
        """To peers that are members no longer, and to those that were silent: gRPC would dial them
        ever more rarely."""
        members = {peer.member.incarnation for peer in self._peers()}
        self._silent &= members
        stale = (self._channels.keys() - members) | (self._channels.keys() & self._silent)
        channels = [self._channels.pop(name) for name in stale]
        await asyncio.gather(*(channel.close(None) for channel in channels))


async def _families(channel: grpc.aio.Channel, metadata: Metadata) -> dict[str, tuple[str, str]]:
    return split_families(await ask_metrics(channel, DEADLINE_S, metadata))


async def _status(channel: grpc.aio.Channel, metadata: Metadata) -> RouterStatus:
    return await ask_router_status(channel, DEADLINE_S, metadata)
