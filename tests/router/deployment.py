"""A router over one scripted verifier, reachable without a socket and with one."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import httpx

from cluster.config import RouterConfig
from router.api import create_app
from router.service import RouterService
from tests.support.polling import eventually
from tests.support.scripted_verifier import ScriptedVerifier, make_card


class Deployment:
    """One router and its scripted verifiers."""

    def __init__(self, config: RouterConfig) -> None:
        self.service = RouterService(config, card=make_card())
        self.app = create_app(self.service)
        self.verifiers: list[ScriptedVerifier] = []
        self.client = httpx.AsyncClient(
            transport=httpx.ASGITransport(self.app, raise_app_exceptions=False),
            base_url="http://router",
        )

    @property
    def verifier(self) -> ScriptedVerifier:
        return self.verifiers[0]

    async def add(self, verifier: ScriptedVerifier) -> ScriptedVerifier:
        """Start a verifier and make it a member."""
        self.verifiers.append(await verifier.start())
        self.tell_members()
        await eventually(lambda: verifier.incarnation in self._usable())
        return verifier

    def tell_members(self) -> None:
        self.service.update_members({v.incarnation: v.member for v in self.verifiers})

    def _usable(self) -> set[str]:
        clients = self.service.pool.clients.items()
        return {incarnation for incarnation, client in clients if client.usable}

    async def chat(self, content: str = "hi", **fields: object) -> httpx.Response:
        body = {"model": "tiny", "messages": [{"role": "user", "content": content}], **fields}
        return await self.client.post("/v1/chat/completions", json=body)

    async def complete(self, prompt: object = "hi", **fields: object) -> httpx.Response:
        body = {"model": "tiny", "prompt": prompt, **fields}
        return await self.client.post("/v1/completions", json=body)

    async def close(self) -> None:
        await self.client.aclose()
        await self.service.close()
        for verifier in self.verifiers:
            await verifier.kill()

    @property
    def is_idle(self) -> bool:
        """Nothing is held anywhere for any request."""
        return not (
            self.service.admission.in_flight
            or self.service.pool.num_in_flight
            or any(verifier.num_running for verifier in self.verifiers)
        )


@asynccontextmanager
async def deploy(
    *verifiers: ScriptedVerifier, config: RouterConfig | None = None
) -> AsyncIterator[Deployment]:
    """A started router over these verifiers."""
    deployment = Deployment(config or RouterConfig())
    deployment.service.start()
    try:
        for verifier in verifiers:
            await deployment.add(verifier)
        yield deployment
    finally:
        await deployment.close()
