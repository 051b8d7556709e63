"""A verifier that is lost in the middle of answers: they go on at another one, the same to the end.

Real models, real gRPC, the real router; only Ray is left out.
"""

from __future__ import annotations

import asyncio
import json

import httpx
import pytest

from cluster.config import RouterConfig
from cluster.types import Member
from router.api import create_app
from router.service import RouterService
from tests.support.generation import running_verifier
from tests.support.http_server import serve_http
from tests.support.polling import eventually
from tests.support.tiny_models import make_tiny_model

FEW, MANY = 6, 120
NO_REUSE = httpx.Limits(max_keepalive_connections=0)
"""A connection may be closed as it is used again."""


def member(verifier):
    service = verifier.service
    return Member(
        service.incarnation, service.address, fingerprint=service.card.fingerprint, model="tiny"
    )


async def answer(http, index, progress):
    """One streamed completion: its text, and how it ended."""
    body = {
        "model": "tiny",
        "prompt": f"prompt number {index} ",
        "max_tokens": 120,
        "seed": index,
        "temperature": 0.8,
        "ignore_eos": True,
        "stream": True,
    }
    text, lines = "", []
    async with http.stream("POST", "/v1/completions", json=body) as response:
        assert response.status_code == 200, await response.aread()
        async for line in response.aiter_lines():
            if not line.startswith("data: "):
                continue
            lines.append(line[6:])
            if lines[-1].startswith("{") and "choices" in (chunk := json.loads(lines[-1])):
                text += chunk["choices"][0]["text"]
                progress[index] = len(text)
    return text, lines[-1]


@pytest.fixture
async def router(tmp_path):
    folder = str(make_tiny_model(tmp_path / "tiny"))
    async with (
        running_verifier(folder, dtype="float32") as first,
        running_verifier(folder, dtype="float32") as second,
    ):
        assert member(first).fingerprint == member(second).fingerprint
        service = RouterService(RouterConfig(), card=first.service.card)
        service.start()
        async with (
            serve_http(create_app(service)) as url,
            httpx.AsyncClient(base_url=url, timeout=60, limits=NO_REUSE) as http,
        ):
            yield service, http, (first, second)
        await service.close()


async def all_answers(http, progress=None, num_answers=FEW):
    progress = {} if progress is None else progress
    return await asyncio.gather(*(answer(http, i, progress) for i in range(num_answers)))


@pytest.mark.parametrize("num_answers", [FEW, pytest.param(MANY, marks=pytest.mark.long)])
async def test_answers_go_on_at_another_verifier(router, num_answers):
    service, http, verifiers = router
    service.update_members({(m := member(v)).incarnation: m for v in verifiers})
    await eventually(lambda: sum(c.usable for c in service.pool.clients.values()) == 2)
    expected = await all_answers(http, num_answers=num_answers)
    assert {end for _, end in expected} == {"[DONE]"}

    progress: dict[int, int] = {}
    running = asyncio.create_task(all_answers(http, progress, num_answers))
    await eventually(lambda: sum(n > 5 for n in progress.values()) > 0.4 * num_answers)
    # The busier one, so that answers are lost for sure.
    victim = max(verifiers, key=lambda v: v.service.load().running)
    num_lost = victim.service.load().running
    assert num_lost >= num_answers // 5
    assert not running.done()
    await victim.service._rpc.server.stop(0)
    assert await running == expected


async def test_without_another_one_an_answer_ends_in_an_error_and_not_in_done(router):
    service, http, (only, _) = router
    service.update_members({member(only).incarnation: member(only)})
    await eventually(lambda: service.pool.ready)
    progress: dict[int, int] = {}
    running = asyncio.create_task(all_answers(http, progress))
    await eventually(lambda: len(progress) == FEW and min(progress.values()) > 5)
    await only.service._rpc.server.stop(0)
    for _, end in await running:
        assert json.loads(end)["error"]["type"] == "upstream_lost"
