"""A real router over real verifiers, all in the test's process, asked as a client asks."""

from __future__ import annotations

import time
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from typing import Any

import httpx

from cluster.config import (
    KVCacheConfig,
    ModelConfig,
    RouterConfig,
    SchedulerConfig,
    SpeculationConfig,
    VerifierConfig,
)
from cluster.types import Member
from router.api import create_app
from router.service import RouterService
from tests.support.polling import eventually
from verifier_service.service import VerifierService


@dataclass(frozen=True, slots=True)
class Reply:
    """One answer and how long it took."""

    status: int
    body: dict[str, Any]
    headers: httpx.Headers
    seconds: float

    @property
    def num_tokens(self) -> int:
        return int(self.body["usage"]["completion_tokens"]) if self.status == 200 else 0


@dataclass(frozen=True, slots=True)
class RealSystem:
    """What runs."""

    router: RouterService
    verifiers: list[VerifierService]
    http: httpx.AsyncClient

    async def complete(self, prompt: str | list[int], **fields: object) -> Reply:
        """One greedy completion."""
        name = self.router.model.card.name
        body = {"model": name, "prompt": prompt, "temperature": 0, "ignore_eos": True, **fields}
        started = time.perf_counter()
        response = await self.http.post("/v1/completions", json=body)
        elapsed_s = time.perf_counter() - started
        return Reply(response.status_code, response.json(), response.headers, elapsed_s)


@asynccontextmanager
async def real_system(
    source: str,
    *,
    num_verifiers: int = 1,
    scheduler: SchedulerConfig | None = None,
    router: RouterConfig | None = None,
) -> AsyncIterator[RealSystem]:
    """Each verifier loads the model of its own."""
    config = VerifierConfig(
        model=ModelConfig(source=source, dtype="float32"),
        kv_cache=KVCacheConfig(num_blocks=1024),
        scheduler=scheduler or SchedulerConfig(),
        speculation=SpeculationConfig(),
    )
    async with AsyncExitStack() as stack:
        verifiers = []
        for _ in range(num_verifiers):
            verifier = await VerifierService.start(config, host="127.0.0.1")
            stack.push_async_callback(verifier.stop, grace_s=1.0)
            verifiers.append(verifier)
        service = RouterService(router or RouterConfig(), card=verifiers[0].card)
        stack.push_async_callback(service.close)
        service.start()
        service.update_members({one.incarnation: _member(one) for one in verifiers})
        await eventually(lambda: _num_usable(service) == num_verifiers)
        transport = httpx.ASGITransport(create_app(service), raise_app_exceptions=False)
        client = httpx.AsyncClient(transport=transport, base_url="http://router", timeout=None)
        http = await stack.enter_async_context(client)
        yield RealSystem(service, verifiers, http)
        await eventually(lambda: all(v.load().running == 0 for v in verifiers))


def _num_usable(service: RouterService) -> int:
    return sum(client.usable for client in service.pool.clients.values())


def _member(verifier: VerifierService) -> Member:
    return Member(verifier.incarnation, verifier.address, fingerprint=verifier.card.fingerprint)
