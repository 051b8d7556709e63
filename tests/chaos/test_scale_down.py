"""Replicas that are taken away in good order under 50 streams: verifiers from three to one, and all
drafters for new ones. What Serve does to them is done here by hand: the others are told first, then
the replica is stopped."""

from __future__ import annotations

import asyncio
from contextlib import AsyncExitStack

import httpx
import pytest

from cluster.config import (
    DrafterConfig,
    KVCacheConfig,
    ModelConfig,
    RouterConfig,
    SpeculationConfig,
    VerifierConfig,
)
from tests.support.expositions import total
from tests.support.member_processes import (
    Here,
    here,
    running_drafter,
    running_router,
    running_verifier,
)
from tests.support.polling import eventually, until
from tests.support.tiny_models import make_tiny_model
from tests.support.traffic import complete, steady_traffic

pytestmark = pytest.mark.long

NUM_STREAMS = 50


def body(index: int, mode: str) -> dict[str, object]:
    return {
        "model": "tiny",
        "prompt": f"prompt number {index} " * 3,
        "max_tokens": 300,
        "seed": index,
        "temperature": 0.7 if index % 2 else 0.0,
        "ignore_eos": True,
        "speculation": {"mode": mode, "drafter": "ngram"},
    }


class Replicas:
    """Started one by one, and ended one by one."""

    def __init__(self) -> None:
        self._lives: dict[str, tuple[AsyncExitStack, Here]] = {}

    async def add(self, running: object, *args: object) -> str:
        """Start one; its incarnation."""
        stack = AsyncExitStack()
        member = await stack.enter_async_context(here(running, *args))  # type: ignore[arg-type]
        incarnation: str = (await member.ask("member")).incarnation
        self._lives[incarnation] = stack, member
        return incarnation

    async def end(self, incarnation: str) -> None:
        """As Serve ends a replica: it drains."""
        stack, _ = self._lives.pop(incarnation)
        await stack.aclose()

    def __getitem__(self, incarnation: str) -> Here:
        return self._lives[incarnation][1]

    async def members(self) -> dict[str, object]:
        return {name: await member.ask("member") for name, (_, member) in self._lives.items()}

    async def end_all(self) -> None:
        for incarnation in list(self._lives):
            await self.end(incarnation)


async def test_50_streams_lose_nothing(tmp_path):
    model = ModelConfig(source=str(make_tiny_model(tmp_path / "tiny")), dtype="float32")
    verifying = VerifierConfig(
        model=model.model_copy(update={"name": "tiny"}),
        kv_cache=KVCacheConfig(num_blocks=1024),
        # Nothing is drafted here, so that it shows whose sessions they are.
        speculation=SpeculationConfig(planner="fixed", local_drafters=()),
        drain_grace_s=0.05,  # Too short for most of its answers, so that they are handed over.
    )
    verifiers, drafters = Replicas(), Replicas()
    async with AsyncExitStack() as stack:
        stack.push_async_callback(drafters.end_all)
        stack.push_async_callback(verifiers.end_all)
        names = [await verifiers.add(running_verifier, verifying) for _ in range(3)]
        old = [await drafters.add(running_drafter, DrafterConfig()) for _ in range(2)]
        card = await verifiers[names[0]].ask("card")
        router = await stack.enter_async_context(here(running_router, RouterConfig(), card))
        url = await router.ask("url")
        http = await stack.enter_async_context(httpx.AsyncClient(base_url=url, timeout=60))

        async def introduce(*leaving: str) -> None:
            """Those that leave are told to nobody any more."""
            there = await verifiers.members()
            drafting = {k: v for k, v in (await drafters.members()).items() if k not in leaving}
            for name in there:
                await verifiers[name].ask("introduce", drafting)
            staying = {k: v for k, v in there.items() if k not in leaving}
            await router.ask("introduce", staying, drafting)

        async def held(replicas: Replicas, name: str, what: str) -> int:
            return int((await replicas[name].ask("held"))[what])

        async def each_has(replicas: Replicas, some: list[str], what: str) -> bool:
            return all([await held(replicas, name, what) for name in some])

        async def all_are_usable() -> bool:
            return bool(await router.ask("num_usable_verifiers") == 3)

        await introduce()
        await until(all_are_usable, 20)
        expected = await asyncio.gather(
            *(complete(http, body(index, "off")) for index in range(NUM_STREAMS))
        )
        assert {answer.end for answer in expected} == {"[DONE]"}

        async with steady_traffic(url, [body(i, "on") for i in range(NUM_STREAMS)]) as traffic:
            await until(lambda: each_has(verifiers, names, "running"), 30)
            await until(lambda: each_has(drafters, old, "sessions"), 30)
            new = [await drafters.add(running_drafter, DrafterConfig()) for _ in range(2)]
            await introduce(*old)
            for name in old:
                await drafters.end(name)
            await until(lambda: each_has(drafters, new, "sessions"), 30)

            leaving = names[1:]
            await until(lambda: each_has(verifiers, leaving, "running"), 30)
            await introduce(*leaving)
            await asyncio.gather(*(verifiers.end(name) for name in leaving))
            so_far = len(traffic.answers)
            await eventually(lambda: len(traffic.answers) >= so_far + NUM_STREAMS, 60)
        text = (await http.get("/metrics")).text
        assert not traffic.wrong(expected)
        assert total(text, "paceline_fallbacks_total", reason="drafter_draining") > 0
        assert total(text, "paceline_resumes_total") > 0, "nothing was handed over"
