"""Bytes into a member's stream, whatever they mean."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

import grpc

from cluster.member_auth import Role
from cluster.rpc import open_channel
from tests.support.polling import TIMEOUT_S


async def send_bytes(address: str, role: Role, method: str, messages: Sequence[bytes]) -> str:
    """Send them on a stream of their own, and read until the member has answered or ended it.
    Gives the name of the status that it ended with, empty if it did not."""
    async with open_channel(address, role) as channel:
        call = channel.stream_stream(method)()
        try:
            async with asyncio.timeout(TIMEOUT_S):
                for message in messages:
                    await call.write(message)
                for _ in messages:
                    if await call.read() is grpc.aio.EOF:
                        break
        except (grpc.aio.AioRpcError, asyncio.InvalidStateError):
            return str((await call.code()).name)
        finally:
            call.cancel()
    return ""
