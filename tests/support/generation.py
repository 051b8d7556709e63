"""A verifier with real gRPC on both sides, in the test's process, and requests to it."""

from __future__ import annotations

import asyncio
import itertools
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace

from cluster.config import KVCacheConfig, ModelConfig, SpeculationConfig, VerifierConfig
from cluster.errors import error_from_wire
from cluster.types import (
    ErrorEvent,
    FinishEvent,
    FinishReason,
    GenerationRequest,
    Member,
    Path,
    PromptLogprobsEvent,
    SpeculationStats,
    TokenLogprobs,
    TokensEvent,
)
from router.generation_client import GenerationClient, LinkState
from tests.support.polling import TIMEOUT_S, eventually
from verifier_service.service import VerifierService

OnTokens = Callable[[TokensEvent], None]


@dataclass
class Answer:
    """All that a verifier said to one request."""

    token_ids: list[int] = field(default_factory=list)
    prompt_logprobs: list[TokenLogprobs] = field(default_factory=list)
    events: list[TokensEvent] = field(default_factory=list)
    reason: FinishReason | None = None
    stats: SpeculationStats = field(default_factory=SpeculationStats)

    @property
    def num_accepted(self) -> int:
        """Of its tokens, those that were drafted."""
        return sum(sum(event.drafted) for event in self.events)


class RunningVerifier:
    """A service and the one client that talks to it."""

    def __init__(self, service: VerifierService, client: GenerationClient) -> None:
        self.service = service
        self.client = client

    async def use_drafters(self, *members: Member) -> None:
        """Draft with these from now on; waits until each is connected."""
        self.service.update_drafters({member.incarnation: member for member in members})
        await eventually(lambda: self.num_ready_drafters == len(members))

    @property
    def num_ready_drafters(self) -> int:
        return sum(load.state.value == "ready" for load in self.service.load().drafters)

    async def generate(
        self,
        requests: Sequence[GenerationRequest],
        *,
        path: Path = Path.SPECULATIVE,
        on_tokens: OnTokens = lambda event: None,
    ) -> list[Answer]:
        """All requests at once."""
        marked = [replace(request, path=path) for request in requests]
        return await asyncio.gather(*(self._one(request, on_tokens) for request in marked))

    async def generate_drafted(
        self, make_requests: Callable[[int], Sequence[GenerationRequest]], min_accepted: int = 1
    ) -> list[Answer]:
        """Answers with at least so many accepted drafts: requests are made, by number of the
        attempt, until they have. Some are over before a drafter has read their prompts."""
        answers: list[Answer] = []
        async with asyncio.timeout(TIMEOUT_S):
            for attempt in itertools.count():
                answers = await self.generate(make_requests(attempt))
                if sum(answer.num_accepted for answer in answers) >= min_accepted:
                    break
        return answers

    async def _one(self, request: GenerationRequest, on_tokens: OnTokens) -> Answer:
        answer = Answer()
        async for batch in self.client.submit(request):
            for event in batch:
                if isinstance(event, TokensEvent):
                    assert event.position == len(answer.token_ids)
                    answer.token_ids += event.token_ids
                    answer.events.append(event)
                    on_tokens(event)
                elif isinstance(event, PromptLogprobsEvent):
                    assert event.position == 1 + len(answer.prompt_logprobs)
                    answer.prompt_logprobs += event.logprobs
                elif isinstance(event, FinishEvent):
                    answer.reason, answer.stats = event.reason, event.stats
                elif isinstance(event, ErrorEvent):
                    raise error_from_wire(event.kind, event.message, event.param)
        return answer


@asynccontextmanager
async def running_verifier(
    source: str,
    *,
    dtype: str = "auto",
    num_blocks: int = 1024,
    draft_deadline_ms: float = 20.0,
    planner: str = "fixed",
    local_drafters: Sequence[str] = (),
    verification: str = "coupled",
    connect_backoff_s: float = 1.0,
) -> AsyncIterator[RunningVerifier]:
    """Load the model and serve it on loopback."""
    config = VerifierConfig(
        model=ModelConfig(source=source, dtype=dtype),  # type: ignore[arg-type]
        kv_cache=KVCacheConfig(num_blocks=num_blocks),
        speculation=SpeculationConfig(
            draft_deadline_ms=draft_deadline_ms,
            planner=planner,  # type: ignore[arg-type]
            local_drafters=local_drafters,  # type: ignore[arg-type]
            verification=verification,  # type: ignore[arg-type]
            connect_backoff_s=connect_backoff_s,
        ),
    )
    service = await VerifierService.start(config, host="127.0.0.1")
    member = Member(service.incarnation, service.address, fingerprint=service.card.fingerprint)
    client = GenerationClient(member, "test-router", service.card.fingerprint, time.monotonic)
    try:
        await eventually(lambda: client.state is LinkState.READY)
        yield RunningVerifier(service, client)
        await eventually(lambda: service.load().kv_blocks_used == 0)
    finally:
        await client.close()
        await service.stop(grace_s=1.0)


async def during(
    generating: Awaitable[list[Answer]],
    started: asyncio.Event,
    fault: Callable[[], Awaitable[None]],
) -> list[Answer]:
    """Cause a fault once `started` is set; fails if all was over by then."""
    task = asyncio.ensure_future(generating)
    starting = asyncio.create_task(started.wait())
    await asyncio.wait((task, starting), return_when=asyncio.FIRST_COMPLETED)
    assert not task.done(), "it was over before it was seen to start"
    await fault()
    assert not task.done(), "the fault came too late to show anything"
    return await task
