"""A router's end of one generation stream, spoken by hand, and a servicer without an engine."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import replace
from typing import Self

from cluster.load import DrafterLoad, VerifierLoad
from cluster.member_auth import Role
from cluster.protocol import generation_pb2, generation_pb2_grpc
from cluster.protocol.codec import decode_verifier_batch, encode_router_batch
from cluster.protocol.messages import RouterBatch, RouterHello, VerifierBatch
from cluster.rpc import open_channel, start_rpc_server
from cluster.types import GenerationRequest, SamplingParams
from tests.support.scripted_verifier import SERVICE, make_card
from verifier_service.events import EngineInput
from verifier_service.servicer import GenerationServicer


class EnginelessVerifier:
    """A real servicer; what it asks of the engine gathers in `inbox`."""

    def __init__(self) -> None:
        self.inbox: list[EngineInput] = []
        self.load = VerifierLoad(kv_blocks_total=64)
        self.address = ""
        self.servicer = GenerationServicer(
            make_card(), "incarnation", self.inbox.append, lambda: self.load, _no_grammar
        )

    def report_drafters(self, *drafters: DrafterLoad) -> None:
        self.load = replace(self.load, drafters=drafters)


@asynccontextmanager
async def engineless_verifier() -> AsyncIterator[EnginelessVerifier]:
    """One that listens."""
    verifier = EnginelessVerifier()
    add = generation_pb2_grpc.add_GenerationServicer_to_server
    server = await start_rpc_server(
        lambda server: add(verifier.servicer, server), SERVICE, host="127.0.0.1"
    )
    verifier.address = server.address
    yield verifier
    await server.stop(0)


class RawRouter:
    """Use as an async context manager; entering says hello. What comes is read all the time."""

    def __init__(self, address: str, lease_ms: int = 0) -> None:
        self._channel = open_channel(address, Role.VERIFIER)
        self._call = generation_pb2_grpc.GenerationStub(self._channel).Generate()
        self._lease_ms = lease_ms
        self.batches: list[VerifierBatch] = []

    async def __aenter__(self) -> Self:
        hello = RouterHello("raw-router", make_card().fingerprint, self._lease_ms)
        await self.send(RouterBatch(hello=hello))
        self._reading = asyncio.create_task(self._read())
        return self

    async def __aexit__(self, *_: object) -> None:
        self._reading.cancel()
        self._call.cancel()
        await self._channel.close(None)

    async def send(self, batch: RouterBatch) -> None:
        await self._call.write(encode_router_batch(batch))

    async def submit(self, *request_ids: str) -> None:
        requests = [
            GenerationRequest(name, 1, (3, 4, 5), SamplingParams(), 100) for name in request_ids
        ]
        await self.send(RouterBatch(submits=tuple(requests)))

    @property
    def events(self) -> list[object]:
        return [event for batch in self.batches for event in batch.events]

    async def _read(self) -> None:
        while isinstance(message := await self._call.read(), generation_pb2.VerifierBatch):
            self.batches.append(decode_verifier_batch(message))


def _no_grammar(request: GenerationRequest) -> None:
    raise AssertionError("no request of these tests has one")


async def every(period_s: float, action: Callable[[], object], duration_s: float) -> None:
    """Do something again and again for a while."""
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(duration_s):
            while True:
                await action()
                await asyncio.sleep(period_s)
