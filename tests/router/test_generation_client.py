"""The stream to a verifier: handshake, loss, return, drain."""

from __future__ import annotations

import asyncio
import dataclasses
import socket
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest

from cluster.errors import IncompatiblePeerError, OverloadedError, UpstreamLostError
from cluster.load import MAX_REPORTS_PER_S
from cluster.protocol.messages import VerifierHello
from cluster.types import (
    ErrorEvent,
    FinishEvent,
    GenerationRequest,
    Member,
    Path,
    SamplingParams,
    TokensEvent,
)
from router.generation_client import HEARTBEAT_S, LEASE_S, GenerationClient, LinkState
from router.verifier_pool import SNAPSHOT_S, VerifierPool
from tests.router.deployment import deploy
from tests.support.polling import eventually
from tests.support.scripted_verifier import ScriptedVerifier, Step, endless, make_card, saying

FINGERPRINT = make_card().fingerprint


def request(name: str = "r", max_tokens: int = 50) -> GenerationRequest:
    return GenerationRequest(name, 1, (5, 6), SamplingParams(), max_tokens)


@asynccontextmanager
async def connected(
    verifier: ScriptedVerifier, fingerprint: str = FINGERPRINT
) -> AsyncIterator[GenerationClient]:
    await verifier.start()
    client = GenerationClient(verifier.member, "router-1", fingerprint, time.monotonic)
    try:
        yield client
    finally:
        await client.close()
        await verifier.kill()


async def ready(client: GenerationClient) -> GenerationClient:
    await eventually(lambda: client.usable)
    return client


async def test_a_request_from_submit_to_finish() -> None:
    async with connected(ScriptedVerifier(saying("fox", 2))) as client:
        stream = (await ready(client)).submit(request())
        batches = [batch async for batch in stream]
        assert isinstance(batches[-1][-1], FinishEvent)
        assert all(isinstance(batch[0], TokensEvent) for batch in batches)
        assert client.num_in_flight == 0


async def test_what_is_said_in_one_turn_is_one_message() -> None:
    verifier = ScriptedVerifier(endless(), step_s=0.01)
    async with connected(verifier) as client:
        await ready(client)
        for index in range(100):
            client.submit(request(f"r{index}"))
        await eventually(lambda: len(verifier.submitted) == 100)
        assert verifier.num_messages_that_submit == 1


async def test_a_request_cancelled_before_it_was_sent_is_never_sent() -> None:
    verifier = ScriptedVerifier(endless(), step_s=0.01)
    async with connected(verifier) as client:
        await ready(client)
        client.submit(request("a")).close()
        stream = client.submit(request("b"))
        await anext(stream)
        assert [r.request_id for r in verifier.submitted] == ["b"]
        stream.close()
        stream.close()
        await eventually(lambda: verifier.cancelled == ["b"])
        assert client.num_in_flight == 0


async def test_a_change_of_path_of_an_ended_request_is_not_sent() -> None:
    verifier = ScriptedVerifier(saying("fox"))
    async with connected(verifier) as client:
        stream = (await ready(client)).submit(request())
        assert [batch async for batch in stream]
        client.set_path("r", Path.SPECULATIVE)
        await asyncio.sleep(0.02)
        assert verifier.set_paths == []


async def test_the_load_report_is_kept_with_its_age() -> None:
    verifier = ScriptedVerifier(endless(), step_s=0.01)
    verifier.ready_drafter()
    async with connected(verifier) as client:
        assert client.load() is None
        (await ready(client)).submit(request())
        await eventually(lambda: (report := client.load()) and report.value.running == 1)
        report = client.load()
        assert report is not None
        assert report.age_s < 60
        assert report.value.drafters == verifier.drafters


async def test_a_lost_verifier_fails_its_requests() -> None:
    verifier = ScriptedVerifier(endless(), step_s=0.01)
    async with connected(verifier) as client:
        await ready(client)
        streams = [client.submit(request(f"r{index}")) for index in range(20)]
        for stream in streams:
            await anext(stream)
        killing = asyncio.create_task(verifier.kill())
        for stream in streams:
            with pytest.raises(UpstreamLostError):
                async for _ in stream:
                    pass
        await killing
        assert client.num_in_flight == 0
        with pytest.raises(UpstreamLostError):
            client.submit(request("late"))


async def test_the_client_comes_back_to_a_verifier_that_does() -> None:
    verifier = ScriptedVerifier(saying("fox"))
    async with connected(verifier) as client:
        await ready(client)
        port = int(verifier.member.address.rpartition(":")[2])
        await verifier.kill()
        await eventually(lambda: client.state is LinkState.CONNECTING)
        await verifier.start(port)
        await ready(client)
        assert [batch async for batch in client.submit(request())]


async def test_a_verifier_that_is_not_there_yet_is_awaited() -> None:
    with socket.socket() as reserved:
        reserved.bind(("127.0.0.1", 0))
        port = reserved.getsockname()[1]
    verifier = ScriptedVerifier(saying("fox"))
    member = Member(verifier.incarnation, f"127.0.0.1:{port}")
    client = GenerationClient(member, "router-1", FINGERPRINT, time.monotonic)
    await asyncio.sleep(0.1)
    assert client.state is LinkState.CONNECTING
    await verifier.start(port)
    await ready(client)
    await client.close()
    await verifier.kill()


@pytest.mark.parametrize(
    "change",
    [{"protocol_version": 99}, {"noise_version": 99}, {"fingerprint": "another model"}],
)
async def test_a_mismatch_is_refused_and_never_tried_again(change: dict[str, object]) -> None:
    verifier = ScriptedVerifier(saying("fox"))
    verifier.hello = dataclasses.replace(verifier.hello, **change)
    async with connected(verifier) as client:
        await eventually(lambda: client.state is LinkState.REFUSED)
        await asyncio.sleep(0.2)
        assert client.state is LinkState.REFUSED
        with pytest.raises((IncompatiblePeerError, UpstreamLostError)):
            client.submit(request())


async def test_a_verifier_that_refuses_is_not_asked_again() -> None:
    async with connected(ScriptedVerifier(saying("fox")), fingerprint="mine") as client:
        await eventually(lambda: client.state is LinkState.REFUSED)


async def test_another_verifier_at_a_reused_address_is_not_taken() -> None:
    verifier = ScriptedVerifier(saying("fox"))
    verifier.hello = VerifierHello("somebody else", FINGERPRINT)
    async with connected(verifier) as client:
        await asyncio.sleep(0.2)
        assert client.state is LinkState.CONNECTING


async def test_a_draining_verifier_finishes_and_takes_nothing_more() -> None:
    verifier = ScriptedVerifier(endless(), step_s=0.01)
    async with connected(verifier) as client:
        stream = (await ready(client)).submit(request(max_tokens=10))
        verifier.drain()
        await eventually(lambda: client.draining)
        assert not client.usable
        batches = [batch async for batch in stream]
        assert isinstance(batches[-1][-1], FinishEvent)


# --- the pool ---


@asynccontextmanager
async def pool_of(*verifiers: ScriptedVerifier) -> AsyncIterator[VerifierPool]:
    pool = VerifierPool("router-1")
    pool.serve(FINGERPRINT)
    for verifier in verifiers:
        await verifier.start()
    pool.update_members({v.incarnation: v.member for v in verifiers})
    try:
        yield pool
    finally:
        await pool.close()
        for verifier in verifiers:
            await verifier.kill()


def usable(pool: VerifierPool) -> int:
    return sum(client.usable for client in pool.clients.values())


async def test_a_member_that_left_finishes_its_requests() -> None:
    leaving = ScriptedVerifier(endless(), step_s=0.01)
    staying = ScriptedVerifier(saying("fox"))
    async with pool_of(leaving, staying) as pool:
        await eventually(lambda: usable(pool) == 2)
        stream = pool.clients[leaving.incarnation].submit(request(max_tokens=20))
        pool.update_members({staying.incarnation: staying.member})
        assert list(pool.clients) == [staying.incarnation]
        assert pool.choose(b"x").member == staying.member
        batches = [batch async for batch in stream]
        assert isinstance(batches[-1][-1], FinishEvent)
        await eventually(lambda: not leaving._connections)


async def test_members_of_another_model_are_left_alone() -> None:
    other = ScriptedVerifier(saying("fox"), card=make_card(fingerprint="other"))
    async with pool_of(other) as pool:
        assert not pool.clients
        with pytest.raises(OverloadedError, match="serves the model"):
            pool.choose(b"x")
        pool.serve("other")
        await eventually(lambda: usable(pool) == 1)


async def test_requests_spread_over_verifiers() -> None:
    verifiers = [ScriptedVerifier(endless(), step_s=0.01) for _ in range(3)]
    async with pool_of(*verifiers) as pool:
        await eventually(lambda: usable(pool) == 3)
        for index in range(30):
            pool.choose(b"one prompt").submit(request(f"r{index}"))
        counts = [client.num_in_flight for client in pool.clients.values()]
        assert sum(counts) == 30
        assert min(counts) > 0
        assert max(counts) <= 1.25 * 10 + 2  # The bound on one member's share, over the mean.


async def test_the_snapshot_has_every_verifier_and_drafter() -> None:
    verifiers = [ScriptedVerifier(saying("fox")) for _ in range(2)]
    for verifier in verifiers:
        verifier.ready_drafter()
    async with pool_of(*verifiers) as pool:
        await eventually(lambda: usable(pool) == 2)
        load = pool.load()
        assert load.verifiers.keys() == {v.incarnation for v in verifiers}
        assert list(load.drafters) == ["drafter-1"]
        await verifiers[0].kill()
        await eventually(lambda: len(pool.load().verifiers) == 1)


async def test_it_speaks_once_a_second_while_something_runs_and_only_then() -> None:
    """Else a verifier frees what runs for it."""
    assert 3 * HEARTBEAT_S < LEASE_S
    verifier = ScriptedVerifier(endless())
    verifier.paused = True
    async with connected(verifier) as client:
        await ready(client)
        await asyncio.sleep(1.5 * HEARTBEAT_S)
        assert verifier.num_messages_received == 0
        stream = client.submit(request())
        await eventually(lambda: verifier.num_messages_received >= 3)
        assert len(verifier.submitted) == verifier.num_messages_that_submit == 1
        stream.close()


async def test_what_a_verifier_freed_while_we_were_stuck_goes_on_elsewhere() -> None:
    """It tells so once we are heard again."""
    lapsed = ErrorEvent("", UpstreamLostError.__name__, "the router said nothing for 10 s")
    verifiers = [ScriptedVerifier(lambda _: [Step((65,)), Step((), error=lapsed)])]
    async with deploy(*verifiers) as deployment:
        await deployment.add(ScriptedVerifier(endless()))
        first = verifiers[0].incarnation
        # Until the choice falls on the one that fails.
        for index in range(50):
            reply = await deployment.complete(f"prompt {index}", max_tokens=20)
            assert reply.status_code == 200
            if deployment.service.pool.num_resumes:
                break
        assert deployment.service.pool.num_resumes == 1
        assert first in {v.incarnation for v in deployment.verifiers if v.submitted}


async def test_a_large_fleet_is_asked_to_report_less_often() -> None:
    nowhere = {f"n{i}": Member(f"n{i}", "127.0.0.1:1") for i in range(MAX_REPORTS_PER_S)}
    async with deploy(ScriptedVerifier(endless())) as deployment:
        verifier, service = deployment.verifier, deployment.service
        own = {verifier.incarnation: verifier.member}
        service.update_members(own | nowhere)
        await eventually(lambda: verifier.load_intervals_ms == [2_000])
        service.update_members(own)
        await eventually(lambda: verifier.load_intervals_ms == [2_000, 1_000])


async def test_a_snapshot_is_made_once_for_many_who_look() -> None:
    clock_s = 100.0
    pool = VerifierPool("router-1", lambda: clock_s)
    pool.serve(FINGERPRINT)
    pool.update_members({f"n{i}": Member(f"n{i}", "127.0.0.1:1") for i in range(50)})
    first = pool.load()
    assert pool.load() is first
    clock_s += 51 * SNAPSHOT_S
    assert pool.load() is not first
    await pool.close()
