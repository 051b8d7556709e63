"""The draft client's network: gRPC streams as tasks of the event loop, and the real clock."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Coroutine

from cluster.member_auth import OPEN, MemberAuth
from cluster.protocol.messages import DrafterBatch, DrafterHello, TargetBatch, TargetHello
from verifier_service.draft_client import DraftClient
from verifier_service.drafter_link import DrafterLink
from verifier_service.drafter_stream import StreamLostError, run_stream

logger = logging.getLogger(__name__)

CLOSE_TIMEOUT_S = 5.0


class GrpcNetwork:
    """See Network of draft_client.py. Lives on one event loop."""

    def __init__(self, hello: TargetHello, auth: MemberAuth = OPEN) -> None:
        self._hello = hello
        self._auth = auth
        self._tasks: set[asyncio.Task[None]] = set()

    def now(self) -> float:
        return time.monotonic()

    def dial(self, link: DrafterLink, client: DraftClient) -> GrpcStream:
        stream = GrpcStream(link, client)
        stream.task = self._start(self._serve(stream, client))
        return stream

    def repeat(self, period_s: float, action: Callable[[], None]) -> None:
        self._start(_repeat(period_s, action))

    async def close(self) -> None:
        tasks = list(self._tasks)
        for task in tasks:
            task.cancel()
        if tasks:
            await asyncio.wait(tasks, timeout=CLOSE_TIMEOUT_S)

    def _start(self, work: Coroutine[None, None, None]) -> asyncio.Task[None]:
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task

    async def _serve(self, stream: GrpcStream, client: DraftClient) -> None:
        """Live until the stream ends, whatever ends it."""
        try:
            await run_stream(stream.link.member, self._hello, stream, self._auth)
        except StreamLostError as error:
            client.lost(stream, error.reason, refused=error.refused)
        except Exception as error:
            logger.exception("the stream to drafter %s failed", stream.link.member.address)
            client.lost(stream, repr(error), refused=False)


class GrpcStream:
    """One stream of the client: the StreamOwner that run_stream asks."""

    def __init__(self, link: DrafterLink, client: DraftClient) -> None:
        self.link = link
        self.task: asyncio.Task[None] | None = None
        self._client = client
        self._wakeup = asyncio.Event()

    def wake(self) -> None:
        self._wakeup.set()

    def end(self) -> None:
        assert self.task is not None
        self.task.cancel()

    def ready(self, hello: DrafterHello) -> None:
        self._client.ready(self, hello)

    def received(self, batch: DrafterBatch) -> None:
        self._client.received(self, batch)

    async def outgoing(self) -> TargetBatch:
        await self._wakeup.wait()
        self._wakeup.clear()
        batch = self.link.take_batch(time.monotonic())
        if self.link.has_news:
            self._wakeup.set()
        return batch


async def _repeat(period_s: float, action: Callable[[], None]) -> None:
    while True:
        await asyncio.sleep(period_s)
        action()
