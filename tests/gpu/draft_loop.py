"""The speculation loop as it runs in a cluster, without Ray: a verifier and drafters over gRPC."""

from __future__ import annotations

import dataclasses
import random
import time
from collections.abc import AsyncIterator, Callable, Iterable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from cluster.config import (
    DrafterConfig,
    KVCacheConfig,
    ModelConfig,
    SpeculationConfig,
    VerifierConfig,
)
from cluster.types import GenerationRequest, Member, SamplingParams
from cluster.types import Path as RequestPath
from drafter_service.service import DrafterService
from router.generation_client import GenerationClient, LinkState
from tests.support.generation import Answer, RunningVerifier
from tests.support.polling import eventually
from tests.support.scripted_drafter import ScriptedDrafter, oracle
from verifier_service.service import VerifierService

DEPTH = 4
_START_TIMEOUT_S = 120.0


@dataclass(frozen=True, slots=True)
class Loop:
    """Sizes of a run."""

    model: dict[str, Any]
    """Fields of ModelConfig, of both models."""
    kv_cache: KVCacheConfig
    num_requests: int
    num_prompt_tokens: int
    num_tokens: int
    """Of each request."""


@dataclass(frozen=True, slots=True)
class Run:
    """What all requests of a run got together."""

    token_ids: list[list[int]]
    seconds: float
    num_steps: int
    """Of the longest request."""
    step_ms: float
    """Of the engine: its forward, its draws and its bookkeeping."""
    num_drafted: int
    num_accepted: int

    @property
    def tokens_per_s(self) -> float:
        return sum(map(len, self.token_ids)) / self.seconds

    @property
    def between_steps_ms(self) -> float:
        """What a step takes beyond the engine's own time: drafts that are waited for, transport."""
        return 1e3 * self.seconds / self.num_steps - self.step_ms

    def line(self, name: str, plain: Run) -> str:
        """One line of a report."""
        accepted = self.num_accepted / self.num_drafted if self.num_drafted else 0.0
        return (
            f"{name:28}{self.tokens_per_s:9.1f} tok/s {self.tokens_per_s / plain.tokens_per_s:6.2f}"
            f" of plain; step {self.step_ms:7.2f} ms, {self.between_steps_ms:6.2f} ms between;"
            f" accepted {accepted:.2f}"
        )


@asynccontextmanager
async def running_verifier(source: Path, loop: Loop) -> AsyncIterator[RunningVerifier]:
    """The service, and a client that is connected to it."""
    config = VerifierConfig(
        model=ModelConfig(source=str(source), **loop.model),
        kv_cache=loop.kv_cache,
        speculation=SpeculationConfig(
            num_speculative_tokens=DEPTH, draft_deadline_ms=200.0, planner="fixed"
        ),
    )
    service = await VerifierService.start(config, host="127.0.0.1")
    member = Member(service.incarnation, service.address, fingerprint=service.card.fingerprint)
    client = GenerationClient(member, "gpu", service.card.fingerprint, time.monotonic)
    try:
        await eventually(lambda: client.state is LinkState.READY, _START_TIMEOUT_S)
        yield RunningVerifier(service, client)
    finally:
        await client.close()
        await service.stop(grace_s=1.0)


async def generate(verifier: RunningVerifier, loop: Loop, salt: str, path: RequestPath) -> Run:
    """All requests at once, greedy; `salt` keeps runs from reading one another's KV."""
    requests = [
        GenerationRequest(
            request_id=f"{salt}-{index}",
            request_key=index,
            prompt_ids=tuple(prompt(index, loop.num_prompt_tokens)),
            sampling=SamplingParams(temperature=0.0),
            max_tokens=loop.num_tokens,
            ignore_eos=True,
            cache_salt=salt,
        )
        for index in range(loop.num_requests)
    ]
    started = time.perf_counter()
    answers = await verifier.generate(requests, path=path)
    return _run(answers, time.perf_counter() - started, verifier.service.load().step_ms)


def prompt(index: int, num_tokens: int) -> list[int]:
    rng = random.Random(index)
    return [rng.randrange(3, 128) for _ in range(num_tokens)]


def _run(answers: list[Answer], seconds: float, step_ms: float) -> Run:
    return Run(
        token_ids=[answer.token_ids for answer in answers],
        seconds=seconds,
        num_steps=max(len(answer.events) for answer in answers),
        step_ms=step_ms,
        num_drafted=sum(answer.stats.num_draft_tokens for answer in answers),
        num_accepted=sum(answer.stats.num_accepted_tokens for answer in answers),
    )


def scripted(plain: Run, loop: Loop, acceptance: float) -> Callable[..., Iterable[int]]:
    """What the plain run said comes next, each token right with this chance, for `oracle`."""
    known = {
        tuple(prompt(index, loop.num_prompt_tokens)): token_ids
        for index, token_ids in enumerate(plain.token_ids)
    }
    rng = random.Random(0)

    def continuation(committed: list[int], num_tokens: int) -> list[int]:
        token_ids = known[tuple(committed[: loop.num_prompt_tokens])]
        start = len(committed) - loop.num_prompt_tokens
        right = token_ids[start : start + num_tokens]
        return [token if rng.random() < acceptance else token ^ 1 for token in right]

    return continuation


@dataclass(frozen=True, slots=True)
class LoopFigures:
    """One run per way to draft."""

    plain: Run
    scripted: dict[float, Run]
    """By the chance of each token."""
    by_model: Run

    def report(self) -> list[str]:
        lines = [self.plain.line("plain", self.plain)]
        for acceptance, run in self.scripted.items():
            lines.append(run.line(f"scripted drafts, {acceptance:.2f}", self.plain))
        return [*lines, self.by_model.line("drafts of the small model", self.plain)]


async def run_loop(large: Path, small: Path, loop: Loop, chances: Iterable[float]) -> LoopFigures:
    """Plain, with drafts that are right as often as told, and with a random model's drafts."""
    async with running_verifier(large, loop) as verifier:
        await generate(verifier, loop, "warm", RequestPath.PLAIN)
        plain = await generate(verifier, loop, "plain", RequestPath.PLAIN)
        runs = {}
        for chance in chances:
            async with ScriptedDrafter(oracle(scripted(plain, loop, chance))) as drafter:
                runs[chance] = await _with_drafter(verifier, loop, drafter.member, f"{chance}")
            await eventually(lambda: verifier.num_ready_drafters == 0, _START_TIMEOUT_S)
        by_model = await _with_small_model(verifier, small, loop)
    return LoopFigures(plain, runs, by_model)


async def _with_drafter(verifier: RunningVerifier, loop: Loop, member: Member, salt: str) -> Run:
    await verifier.use_drafters(member)
    warm = dataclasses.replace(loop, num_tokens=min(loop.num_tokens, 4 * DEPTH))
    await generate(verifier, warm, f"{salt}-warm", RequestPath.SPECULATIVE)
    return await generate(verifier, loop, salt, RequestPath.SPECULATIVE)


async def _with_small_model(verifier: RunningVerifier, small: Path, loop: Loop) -> Run:
    config = DrafterConfig(
        kind="model",
        model=ModelConfig(source=str(small), **loop.model),
        kv_cache=loop.kv_cache,
    )
    drafter = await DrafterService.start(config, host="127.0.0.1")
    try:
        member = Member(drafter.incarnation, drafter.address, model=drafter.name)
        return await _with_drafter(verifier, loop, member, "small")
    finally:
        await drafter.stop(0.0)
