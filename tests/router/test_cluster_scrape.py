"""Asking every member: sharing, deadlines, proof of membership."""

from __future__ import annotations

import asyncio
from contextlib import asynccontextmanager
from pathlib import Path

from cluster.config import RpcConfig
from cluster.member_auth import OPEN, MemberAuth, Role
from cluster.members_service import SERVICE_NAME, MembersServicer, RouterStatus
from cluster.metrics import RESUMES, Exposition, MemberLabels
from cluster.rpc import start_rpc_server
from cluster.types import Member
from router.cluster_scrape import MEMBERS_PER_S, ClusterScrape, Peer, Shared
from tests.support.expositions import total


class Clock:
    now = 100.0

    def __call__(self) -> float:
        return self.now


def exposition(replica: str) -> str:
    made = Exposition(MemberLabels("Router", replica))
    made.add(RESUMES, 1)
    return made.text()


@asynccontextmanager
async def members(*texts: str, auth: MemberAuth = OPEN):
    """Members that answer with these texts, as peers."""
    servers = []
    for text in texts:
        servicer = MembersServicer(lambda text=text: text, lambda: RouterStatus(mode="plain"))
        servers.append(
            await start_rpc_server(servicer.register, SERVICE_NAME, host="127.0.0.1", auth=auth)
        )
    yield [
        Peer(Role.ROUTER, Member(f"member-{index}", server.address))
        for index, server in enumerate(servers)
    ]
    for server in servers:
        await server.stop(0)


@asynccontextmanager
async def scraping(peers: list[Peer], clock: Clock | None = None, auth: MemberAuth = OPEN):
    scrape = ClusterScrape(lambda: exposition("own"), lambda: peers, auth, clock or Clock())
    yield scrape
    await scrape.close()


async def test_all_are_asked_and_one_that_talks_nonsense_costs_only_its_own_part() -> None:
    texts = [exposition("a"), "<html>", exposition("b")]
    async with members(*texts) as peers, scraping(peers) as scrape:
        text = (await scrape.metrics()).decode()
        assert total(text, "paceline_resumes_total") == 3
        assert scrape.errors[Role.ROUTER] == 1
        status = await scrape.routers()
        assert {one.mode for one in status.values()} == {"plain"}
        assert len(status) == 3


async def test_an_answer_is_kept_for_a_second_and_longer_in_a_large_fleet() -> None:
    clock = Clock()
    async with members(exposition("a")) as peers, scraping(peers, clock) as scrape:
        first = await scrape.metrics()
        peers.clear()
        clock.now += 0.9
        assert await scrape.metrics() is first
        clock.now += 0.2
        assert total((await scrape.metrics()).decode(), "paceline_resumes_total") == 1
        gone = Peer(Role.VERIFIER, Member("gone", "127.0.0.1:1"))
        peers += [gone] * 3 * MEMBERS_PER_S
        clock.now += 1.1
        second = await scrape.metrics()
        clock.now += 2.9
        assert await scrape.metrics() is second
        clock.now += 0.2
        assert await scrape.metrics() is not second


async def test_who_leaves_takes_nothing_from_who_waits() -> None:
    made, go = [], asyncio.Event()

    async def make() -> int:
        made.append(1)
        await go.wait()
        return len(made)

    shared = Shared(make, lambda: 1.0, Clock())
    waiting = [asyncio.create_task(shared.get()) for _ in range(3)]
    await asyncio.sleep(0)
    waiting[0].cancel()
    go.set()
    assert await asyncio.gather(*waiting[1:]) == [1, 1]
    assert made == [1]
    await shared.close()


async def test_a_member_that_comes_back_is_in_the_next_round() -> None:
    """gRPC alone would leave it alone for longer and longer."""
    clock, servicer = Clock(), MembersServicer(lambda: exposition("a"))
    server = await start_rpc_server(servicer.register, SERVICE_NAME, host="127.0.0.1")
    peers = [Peer(Role.VERIFIER, Member("a", server.address))]
    async with scraping(peers, clock) as scrape:
        for num_errors, is_there in ((0, True), (1, False), (2, False), (3, False), (3, True)):
            if not is_there:
                await server.stop(0)
            elif num_errors:
                port = int(server.address.rpartition(":")[2])
                server = await start_rpc_server(
                    servicer.register, SERVICE_NAME, host="127.0.0.1", port=port
                )
            clock.now += 1.1
            text = (await scrape.metrics()).decode()
            assert scrape.errors[Role.VERIFIER] == num_errors
            assert total(text, "paceline_resumes_total") == 1 + is_there
    await server.stop(0)


async def test_members_ask_for_the_token(tmp_path: Path) -> None:
    (tmp_path / "token").write_text("secret")
    auth = MemberAuth(RpcConfig(token_file=str(tmp_path / "token")))
    async with members(exposition("a"), auth=auth) as peers:
        async with scraping(peers, auth=auth) as scrape:
            assert total((await scrape.metrics()).decode(), "paceline_resumes_total") == 2
            assert scrape.errors[Role.ROUTER] == 0
        async with scraping(peers) as scrape:
            assert total((await scrape.metrics()).decode(), "paceline_resumes_total") == 1
            assert scrape.errors[Role.ROUTER] == 1
