"""Routers, verifiers and drafters without Ray, in this process or in one of their own, and what
each holds at a moment: whatever is held for a request must be given back.
"""

from __future__ import annotations

import asyncio
import gc
import multiprocessing
import time
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from multiprocessing.connection import Connection
from typing import Any, Protocol

import psutil

from cluster.collector import spare_what_is_loaded
from cluster.config import DrafterConfig, RouterConfig, VerifierConfig
from cluster.types import Member, ModelCard
from drafter_service.service import DrafterService
from router.api import create_app
from router.service import RouterService
from tests.support.http_server import serve_http
from verifier_service.profile_command import measure, profile_of
from verifier_service.service import VerifierService

START_TIMEOUT_S = 120.0
ANSWER_TIMEOUT_S = 30.0
STOP_TIMEOUT_S = 20.0

Held = dict[str, int]


class RunningRouter:
    """A router over HTTP."""

    def __init__(self, service: RouterService, url: str) -> None:
        self._service = service
        self._url = url

    def url(self) -> str:
        return self._url

    def introduce(
        self, verifiers: Mapping[str, Member], drafters: Mapping[str, Member] | None = None
    ) -> None:
        self._service.update_members(verifiers)
        self._service.update_drafters(drafters or {})

    def num_usable_verifiers(self) -> int:
        return sum(client.usable for client in self._service.pool.clients.values())

    def held(self) -> Held:
        """Slots, tenants with any, requests at verifiers, replies that follow the mode, clients of
        verifiers that are gone."""
        service, pool = self._service, self._service.pool
        return {
            "slots": service.admission.in_flight,
            "tenants": len(service.admission._of_tenant),
            "requests": pool.num_in_flight,
            "auto": len(service._auto),
            "retiring": len(pool._retiring),
        }


class RunningVerifier:
    """A verifier over gRPC."""

    def __init__(self, service: VerifierService) -> None:
        self._service = service

    def member(self) -> Member:
        service = self._service
        return Member(service.incarnation, service.address, fingerprint=service.card.fingerprint)

    def card(self) -> ModelCard:
        return self._service.card

    def introduce(self, drafters: Mapping[str, Member]) -> None:
        self._service.update_drafters(drafters)

    def profile(self, contexts: tuple[int, ...]) -> dict[str, Any]:
        """What its steps take now, as `paceline profile` tells it. Only while it is idle."""
        engine = self._service._engine
        assert not engine._generations
        runner = engine._runner
        return profile_of(runner, {context: measure(runner, context) for context in contexts})

    def num_ready_drafters(self) -> int:
        return sum(load.state.value == "ready" for load in self._service.load().drafters)

    def num_sessions_at(self, incarnation: str) -> int:
        link = self._service._draft_client._links.get(incarnation)
        return len(link.sessions) if link else 0

    def held(self) -> Held:
        """Sequences and blocks, requests under routers' leases, grammars in the making, and both
        sides of drafting: drafters' sessions, and sequences that are drafted for here."""
        service = self._service
        engine, servicer, client = service._engine, service._servicer, service._draft_client
        load = engine.load()
        return {
            "running": load.running,
            "waiting": load.waiting,
            "blocks": load.kv_blocks_used,
            "caches": len(engine._runner.kv._open),
            "generations": len(engine._generations),
            "inbox": engine.inbox.qsize(),
            "leased": servicer.num_requests,
            "grammars": len(servicer._compiling),
            "sessions": client.num_sessions,
            "sessions without a drafter": len(client._waiting),
            "sessions of links": sum(len(link.sessions) for link in client._links.values()),
            "closes untold": sum(len(link._closes) for link in client._links.values()),
            "drafted for here": engine._local.num_sequences,
        }


class RunningDrafter:
    """A drafter over gRPC."""

    def __init__(self, service: DrafterService) -> None:
        self._service = service

    def member(self) -> Member:
        return Member(self._service.incarnation, self._service.address)

    def held(self) -> Held:
        """Sessions under verifiers' leases, what the drafter itself keeps of them, and blocks."""
        drafter: Any = self._service._draft_loop._drafter
        blocks = {"blocks": drafter._kv.num_used_blocks} if hasattr(drafter, "_kv") else {}
        return {
            "sessions": self._service.num_sessions,
            "sessions of the drafter": len(drafter._sessions),
            **blocks,
        }


@asynccontextmanager
async def running_router(config: RouterConfig, card: ModelCard) -> AsyncIterator[RunningRouter]:
    service = RouterService(config, card=card)
    await service.listen("127.0.0.1")
    service.start()
    async with serve_http(create_app(service)) as url:
        yield RunningRouter(service, url)
    await service.close()


@asynccontextmanager
async def running_verifier(config: VerifierConfig) -> AsyncIterator[RunningVerifier]:
    service = await VerifierService.start(config, host="127.0.0.1")
    yield RunningVerifier(service)
    await service.stop(grace_s=min(1.0, config.drain_grace_s))


@asynccontextmanager
async def running_drafter(config: DrafterConfig) -> AsyncIterator[RunningDrafter]:
    service = await DrafterService.start(config, host="127.0.0.1")
    yield RunningDrafter(service)
    await service.stop(grace_s=1.0)


Running = Callable[..., AbstractAsyncContextManager[Any]]
"""One of the three above."""


class Handle(Protocol):
    """A member, wherever it runs."""

    async def ask(self, method: str, *args: object) -> Any:
        """Call a method of it."""


class Here:
    """A member in this process."""

    def __init__(self, member: Any) -> None:
        self._member = member

    async def ask(self, method: str, *args: object) -> Any:
        return getattr(self._member, method)(*args)


class Elsewhere:
    """A member in a process of its own."""

    def __init__(self, pipe: Connection, pid: int) -> None:
        self.pid = pid
        self._pipe = pipe
        self._turn = asyncio.Lock()

    async def ask(self, method: str, *args: object) -> Any:
        async with self._turn:
            self._pipe.send((method, args))
            return await self.answer(ANSWER_TIMEOUT_S)

    async def memory_bytes(self) -> int:
        """Resident, after a collection of what Python does not use any more."""
        await self.ask("collect")
        return int(psutil.Process(self.pid).memory_info().rss)

    def num_files(self) -> int:
        """Open files and sockets."""
        return psutil.Process(self.pid).num_fds()

    async def answer(self, timeout_s: float) -> Any:
        deadline = time.monotonic() + timeout_s
        while not self._pipe.poll():
            assert time.monotonic() < deadline, f"process {self.pid} does not answer"
            await asyncio.sleep(0.001)
        return self._pipe.recv()


@asynccontextmanager
async def here(running: Running, *args: object) -> AsyncIterator[Here]:
    async with running(*args) as member:
        yield Here(member)


@asynccontextmanager
async def elsewhere(running: Running, *args: object) -> AsyncIterator[Elsewhere]:
    spawn = multiprocessing.get_context("spawn")
    ours, theirs = spawn.Pipe()
    process = spawn.Process(target=_run, args=(theirs, running, args), daemon=True)
    process.start()
    theirs.close()
    assert process.pid is not None
    handle = Elsewhere(ours, process.pid)
    try:
        assert await handle.answer(START_TIMEOUT_S) == "ready"
        yield handle
    finally:
        ours.close()  # Which ends it.
        await asyncio.to_thread(process.join, STOP_TIMEOUT_S)
        if process.is_alive():
            process.kill()
            raise AssertionError(f"process {process.pid} did not end")


def _run(pipe: Connection, running: Running, args: tuple[object, ...]) -> None:
    asyncio.run(_answer(pipe, running, args))


async def _answer(pipe: Connection, running: Running, args: tuple[object, ...]) -> None:
    """Be a member until the other end of the pipe is closed."""
    ended = asyncio.Event()

    def on_question() -> None:
        try:
            method, arguments = pipe.recv()
        except EOFError:
            loop.remove_reader(pipe.fileno())
            ended.set()
            return
        pipe.send(gc.collect() if method == "collect" else getattr(member, method)(*arguments))

    async with running(*args) as member:
        spare_what_is_loaded()
        loop = asyncio.get_running_loop()
        loop.add_reader(pipe.fileno(), on_question)
        pipe.send("ready")
        await ended.wait()
