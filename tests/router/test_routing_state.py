"""What a router counts of its requests at each verifier comes down again, and a verifier that was
told of before it listened gets its share once it does."""

from __future__ import annotations

import asyncio
import socket

from tests.router.deployment import Deployment, deploy
from tests.support.polling import eventually
from tests.support.scripted_verifier import ScriptedVerifier, saying

NUM_REQUESTS = 100


async def ask_much(deployment: Deployment) -> None:
    replies = await asyncio.gather(
        *(deployment.complete(f"{number}, a prompt of its own") for number in range(NUM_REQUESTS))
    )
    assert {reply.status_code for reply in replies} == {200}
    for client in deployment.service.pool.clients.values():
        assert client.num_in_flight == 0
        assert client.view().unstarted == 0
    await eventually(lambda: deployment.is_idle)


async def test_nothing_is_in_flight_after_100_requests_and_who_comes_late_gets_some() -> None:
    with socket.socket() as reserved:
        reserved.bind(("127.0.0.1", 0))
        port = reserved.getsockname()[1]
    late = ScriptedVerifier(saying("the quick brown fox"))
    others = [ScriptedVerifier(saying("the quick brown fox")) for _ in range(2)]
    async with deploy(*others) as deployment:
        pool = deployment.service.pool
        announced = late.member_at(f"127.0.0.1:{port}")
        pool.update_members(pool.members | {late.incarnation: announced})
        await ask_much(deployment)
        assert sum(len(verifier.submitted) for verifier in others) == NUM_REQUESTS
        # The members stay what they were; it only becomes ready.
        await late.start(port)
        await eventually(lambda: pool.clients[late.incarnation].usable)
        await ask_much(deployment)
        assert len(late.submitted) > NUM_REQUESTS / 10
        await late.kill()
