"""A draft client and the engine's side of it, without an engine."""

from __future__ import annotations

import random
from collections.abc import Iterable
from typing import Self

from cluster.config import SpeculationConfig
from cluster.load import DrafterState
from cluster.protocol.messages import TargetHello
from cluster.types import Draft, Member, SamplingParams
from tests.support.polling import eventually
from verifier_service.draft_client import DraftClient
from verifier_service.events import (
    DraftArrived,
    DraftCommit,
    DraftOpen,
    DraftOrders,
    DraftSessionLive,
    DraftSessionLost,
    EngineInput,
)
from verifier_service.grpc_network import GrpcNetwork

HELLO = TargetHello("verifier-under-test", "target", "vocabulary-a")
PROMPT = (1, 2, 3, 1, 2)


class DraftDriver:
    """Gives orders as an engine would and keeps what comes back. Leaving closes the client."""

    def __init__(self, backoff_s: float = 0.05, hello: TargetHello = HELLO) -> None:
        config = SpeculationConfig(connect_backoff_s=backoff_s)
        self.inbox: list[EngineInput] = []
        network = GrpcNetwork(hello)
        self.client = DraftClient(config, hello, self.inbox.append, network, random.Random(0))
        self.tokens: dict[int, list[int]] = {}

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.client.close()

    def members(self, members: Iterable[Member]) -> None:
        self.client.update_members({member.incarnation: member for member in members})

    def open(self, *seqs: int, drafter: str = "auto", prompt: tuple[int, ...] = PROMPT) -> None:
        for seq in seqs:
            self.tokens[seq] = list(prompt)
        self.client.apply(
            DraftOrders(
                opens=tuple(
                    DraftOpen(seq, prompt, len(prompt), 7, SamplingParams(), 8, drafter)
                    for seq in seqs
                )
            )
        )

    def commit(self, *token_ids: int, seqs: Iterable[int] | None = None) -> None:
        """The same tokens on some sequences, by default on all."""
        seqs = tuple(self.tokens if seqs is None else seqs)
        commits = tuple(DraftCommit(seq, len(self.tokens[seq]), token_ids) for seq in seqs)
        self.client.apply(DraftOrders(commits=commits))
        for seq in seqs:
            self.tokens[seq] += token_ids

    def close(self, *seqs: int) -> None:
        for seq in seqs:
            del self.tokens[seq]
        self.client.apply(DraftOrders(closes=seqs))

    def drafts(self, seq: int) -> list[Draft]:
        return [e.draft for e in self.inbox if isinstance(e, DraftArrived) and e.seq == seq]

    def has_draft(self, seq: int) -> bool:
        """The last commit is answered."""
        return any(d.answers == len(self.tokens[seq]) for d in self.drafts(seq))

    async def all_drafted(self) -> float:
        """Wait until every sequence has a draft from its last token."""
        return await eventually(lambda: all(map(self.has_draft, self.tokens)))

    def drafter_of(self, seq: int) -> str | None:
        """Incarnation of the drafter that the engine thinks serves the sequence."""
        served: str | None = None
        for event in self.inbox:
            if isinstance(event, DraftSessionLive) and event.seq == seq:
                assert served is None, "live twice without being lost"
                served = event.incarnation
            elif isinstance(event, DraftSessionLost) and event.seq == seq:
                assert served is not None, "lost without having been live"
                served = None
            elif isinstance(event, DraftArrived) and event.seq == seq:
                assert served is not None, "a draft of a session that is not live"
        return served

    def state(self, incarnation: str) -> DrafterState | None:
        states = {load.incarnation: load.state for load in self.client.loads()}
        return states.get(incarnation)

    async def ready(self, *members: Member) -> None:
        """Make these the members and wait for their streams."""
        self.members(members)
        await eventually(
            lambda: all(self.state(m.incarnation) is DrafterState.READY for m in members)
        )
