"""Clients that leave hold nothing; over real sockets."""

from __future__ import annotations

import asyncio
import json
import random
from collections.abc import Awaitable

import httpx
import pytest

from tests.router.deployment import deploy
from tests.support.http_server import serve_http
from tests.support.polling import eventually
from tests.support.scripted_verifier import ScriptedVerifier, endless

BODY = {"model": "tiny", "messages": [{"role": "user", "content": "hi"}], "max_tokens": 400}


async def leave_at(url: str, moment: Awaitable[object], **fields: object) -> None:
    """Send a request over a socket of its own, and hang up when the moment has come."""
    host, port = url.removeprefix("http://").split(":")
    reader, writer = await asyncio.open_connection(host, int(port))
    body = json.dumps({**BODY, **fields}).encode()
    head = f"POST /v1/chat/completions HTTP/1.1\r\nHost: x\r\nContent-Length: {len(body)}\r\n\r\n"
    writer.write(head.encode() + body)
    reading = asyncio.create_task(reader.read())
    await moment
    reading.cancel()
    writer.transport.abort()


@pytest.mark.parametrize("fields", [{"stream": True}, {}, {"stream": True, "n": 3}, {"n": 3}])
async def test_a_client_that_leaves_frees_everything(fields: dict[str, object]) -> None:
    async with (
        deploy(ScriptedVerifier(endless(), step_s=0.01)) as deployment,
        serve_http(deployment.app) as url,
    ):
        running = eventually(lambda: deployment.verifier.num_running == fields.get("n", 1))
        await leave_at(url, running, **fields)
        await eventually(lambda: deployment.is_idle)
        assert len(deployment.verifier.cancelled) == fields.get("n", 1)


@pytest.mark.alone
async def test_200_clients_leaving_at_random_moments_hold_nothing() -> None:
    chance = random.Random(7)
    many_run = asyncio.Event()

    async def some_moment() -> None:
        """Half of them leave whatever became of their request, half when many have begun."""
        if chance.random() < 0.5:
            await many_run.wait()
        await asyncio.sleep(chance.random() * 0.8)

    async with (
        deploy(ScriptedVerifier(endless(), step_s=0.01)) as deployment,
        serve_http(deployment.app) as url,
    ):
        leaving = [
            asyncio.create_task(
                leave_at(
                    url,
                    some_moment(),
                    stream=chance.random() < 0.7,
                    n=chance.choice([1, 1, 1, 2]),
                )
            )
            for _ in range(200)
        ]
        await eventually(lambda: len(deployment.verifier.submitted) > 60)
        many_run.set()
        await asyncio.gather(*leaving)
        await eventually(lambda: deployment.is_idle, 1.0)
        assert not deployment.service._auto
        async with httpx.AsyncClient(base_url=url) as client:
            response = await client.post("/v1/chat/completions", json={**BODY, "max_tokens": 3})
            assert response.status_code == 200
        left = [task for task in asyncio.all_tasks() if "_answer" in repr(task)]
        assert left == []


async def test_a_body_that_never_ends_holds_no_slot() -> None:
    async with (
        deploy(ScriptedVerifier(endless())) as deployment,
        serve_http(deployment.app) as url,
    ):
        host, port = url.removeprefix("http://").split(":")
        _, writer = await asyncio.open_connection(host, int(port))
        writer.write(
            b"POST /v1/chat/completions HTTP/1.1\r\nHost: x\r\nContent-Length: 99\r\n\r\n{"
        )
        await asyncio.sleep(0.05)
        assert deployment.is_idle
        writer.transport.abort()
        await asyncio.sleep(0.05)
        assert deployment.is_idle
