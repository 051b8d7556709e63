"""One router over one verifier, and a drafter beside it."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from typing import Any

import httpx

from cluster.config import DrafterConfig, KVCacheConfig, ModelConfig, PathPolicyConfig, RouterConfig
from cluster.types import Member
from drafter_service.service import DrafterService
from router.api import create_app
from router.path_policy import drafter_kinds
from router.service import RouterService
from tests.parity.combinations import Fields
from tests.support.generation import running_verifier
from tests.support.polling import eventually


class System:
    """The API of a router."""

    def __init__(self, http: httpx.AsyncClient, model: str) -> None:
        self._http = http
        self._model = model

    async def ask(self, path: str, fields: Fields) -> dict[str, Any]:
        """One answer, whole."""
        body: dict[str, Any] = (await self._post(path, fields)).json()
        return body

    async def stream(self, path: str, fields: Fields) -> list[dict[str, Any]]:
        """The chunks of one answer, the last with usage alone."""
        usage = {"stream": True, "stream_options": {"include_usage": True}}
        reply = await self._post(path, fields | usage)
        lines = [line[6:] for line in reply.text.splitlines() if line.startswith("data: ")]
        assert lines.pop() == "[DONE]", (fields, lines)
        return [json.loads(line) for line in lines]

    async def _post(self, path: str, fields: Fields) -> httpx.Response:
        reply = await self._http.post(path, json={"model": self._model} | fields)
        assert reply.status_code == 200, (fields, reply.text)
        return reply


@asynccontextmanager
async def system(source: str, dtype: str, *drafters: Member) -> AsyncIterator[System]:
    """A router over a verifier with these drafter replicas, and with drafters of its own."""
    async with AsyncExitStack() as stack:
        verifier = await stack.enter_async_context(
            running_verifier(
                source,
                dtype=dtype,
                num_blocks=4096,
                draft_deadline_ms=60_000,
                local_drafters=("ngram", "suffix"),
            )
        )
        await verifier.use_drafters(*drafters)
        service, card = verifier.service, verifier.service.card
        # However busy this machine is, a request that wants drafts is to get them.
        policy = PathPolicyConfig(max_load_age_s=600)
        router = RouterService(RouterConfig(path_policy=policy), card=card)
        router.start()
        stack.push_async_callback(router.close)
        member = Member(service.incarnation, service.address, fingerprint=card.fingerprint)
        router.update_members({member.incarnation: member})
        wanted = {"suffix", "model"} if drafters else {"suffix"}
        await eventually(lambda: wanted <= drafter_kinds(router.pool.load(), 600))
        transport = httpx.ASGITransport(create_app(router))
        client = httpx.AsyncClient(transport=transport, base_url="http://router", timeout=300)
        yield System(await stack.enter_async_context(client), card.name)


@asynccontextmanager
async def model_drafter(source: str, dtype: str) -> AsyncIterator[Member]:
    """The target as its own drafter: what it proposes is right."""
    config = DrafterConfig(
        kind="model",
        model=ModelConfig(source=source, dtype=dtype),  # type: ignore[arg-type]
        kv_cache=KVCacheConfig(num_blocks=4096),
    )
    service = await DrafterService.start(config, host="127.0.0.1")
    yield Member(service.incarnation, service.address)
    await service.stop(0)
