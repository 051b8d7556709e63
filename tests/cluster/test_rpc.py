"""Servers and channels as members open them."""

from __future__ import annotations

import asyncio
import time

import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc

from cluster.member_auth import Role
from cluster.rpc import open_channel, start_rpc_server

NAME = "test.Service"
IDLE_S = 30
"""Beyond this a server that is not told to expect pings ends the connection."""


async def test_health_and_reflection_are_served_and_health_says_when_it_ends():
    server = await start_rpc_server(lambda server: None, NAME, host="127.0.0.1")
    async with open_channel(server.address, Role.DRAFTER) as channel:
        health = health_pb2_grpc.HealthStub(channel)
        request = health_pb2.HealthCheckRequest(service=NAME)
        assert (await health.Check(request)).status == health_pb2.HealthCheckResponse.SERVING
        asked = reflection_pb2.ServerReflectionRequest(list_services="")
        answers = reflection_pb2_grpc.ServerReflectionStub(channel).ServerReflectionInfo([asked])
        names = {
            service.name
            async for answer in answers
            for service in answer.list_services_response.service
        }
        assert NAME in names
        changes = health.Watch(request)
        assert (await changes.read()).status == health_pb2.HealthCheckResponse.SERVING
        stopping = asyncio.create_task(server.stop(grace_s=0.5))
        assert (await changes.read()).status == health_pb2.HealthCheckResponse.NOT_SERVING
        await stopping


async def test_two_servers_do_not_share_a_port():
    first = await start_rpc_server(lambda server: None, NAME, host="127.0.0.1")
    port = int(first.address.rpartition(":")[2])
    with pytest.raises(RuntimeError):
        await start_rpc_server(lambda server: None, NAME, host="127.0.0.1", port=port)
    await first.stop(0)


@pytest.mark.long
async def test_an_idle_connection_lives():
    server = await start_rpc_server(lambda server: None, NAME, host="127.0.0.1")
    async with open_channel(server.address, Role.DRAFTER) as channel:
        health = health_pb2_grpc.HealthStub(channel)
        changes = health.Watch(health_pb2.HealthCheckRequest(service=NAME))
        await changes.read()
        started = time.monotonic()
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(IDLE_S):
                await changes.read()  # Nothing changes: a lost connection would raise here.
        assert time.monotonic() - started >= IDLE_S
    await server.stop(0)
