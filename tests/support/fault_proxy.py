"""A proxy between verifiers and one drafter that can be slow and can spoil what passes: messages
as bytes, in both directions, over real gRPC.

It stands where the drafter is dialled, so it needs no rights and no other program.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import suppress
from typing import Any, Self

import grpc

from cluster.member_auth import Role
from cluster.rpc import RpcServer, open_channel, start_rpc_server
from cluster.types import Member

SERVICE = "paceline.drafting.v1.Drafting"
METHOD = f"/{SERVICE}/Draft"

Fault = Callable[[int, bytes], Sequence[bytes]]
"""(stream, message) -> what passes in its place."""


class FaultProxy:
    """Use as an async context manager. Attributes may be changed while it runs."""

    def __init__(self, member: Member, delay_ms: float = 0.0) -> None:
        """`delay_ms`: what every message takes longer, each way."""
        self.delay_ms = delay_ms
        self.to_drafter: Fault | None = None
        self.to_verifier: Fault | None = None
        self._num_streams = 0
        self._upstream = member
        self._server: RpcServer | None = None

    async def __aenter__(self) -> Self:
        handler = grpc.stream_stream_rpc_method_handler(self._serve)
        handlers = grpc.method_handlers_generic_handler(SERVICE, {"Draft": handler})
        self._server = await start_rpc_server(
            lambda server: server.add_generic_rpc_handlers((handlers,)), SERVICE, host="127.0.0.1"
        )
        return self

    async def __aexit__(self, *_: object) -> None:
        assert self._server is not None
        await self._server.stop(0)

    @property
    def member(self) -> Member:
        """The drafter as it is reached through this."""
        assert self._server is not None
        return Member(self._upstream.incarnation, self._server.address)

    async def _serve(self, requests: AsyncIterator[bytes], context: Any) -> None:
        self._num_streams += 1
        stream = self._num_streams
        async with open_channel(self._upstream.address, Role.DRAFTER) as channel:
            call = channel.stream_stream(METHOD)()
            up = asyncio.create_task(self._pass("to_drafter", stream, requests, call.write))
            down = asyncio.create_task(self._pass("to_verifier", stream, call, context.write))
            try:
                await asyncio.wait((up, down), return_when=asyncio.FIRST_COMPLETED)
            finally:
                for task in (up, down):
                    task.cancel()
                call.cancel()
                await asyncio.gather(up, down, return_exceptions=True)

    async def _pass(
        self,
        direction: str,
        stream: int,
        messages: AsyncIterator[bytes],
        write: Callable[[bytes], Any],
    ) -> None:
        """In order, each as much later as the delay says."""
        loop = asyncio.get_running_loop()
        due: asyncio.Queue[tuple[float, bytes] | None] = asyncio.Queue()

        async def take() -> None:
            with suppress(grpc.aio.AioRpcError):
                async for message in messages:
                    fault = getattr(self, direction)
                    for passed in (message,) if fault is None else fault(stream, message):
                        due.put_nowait((loop.time() + self.delay_ms / 1e3, passed))
            due.put_nowait(None)

        taking = asyncio.create_task(take())
        try:
            while (item := await due.get()) is not None:
                await asyncio.sleep(item[0] - loop.time())
                await write(item[1])
        finally:
            taking.cancel()
