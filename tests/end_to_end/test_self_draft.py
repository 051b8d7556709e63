"""A model that drafts for itself is right in every round; another model changes nothing but speed.

Model, drafter and verifier are the real ones, over real gRPC. In float32 nothing is forgiven.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import time
from dataclasses import dataclass, field

import pytest

from cluster.config import (
    DrafterConfig,
    KVCacheConfig,
    ModelConfig,
    SpeculationConfig,
    VerifierConfig,
)
from cluster.types import FinishEvent, GenerationRequest, Member, Path, SamplingParams, TokensEvent
from drafter_service.service import DrafterService
from router.generation_client import GenerationClient
from tests.support.polling import eventually
from tests.support.tiny_models import make_blurred_model, make_tiny_model, save_tokenizer
from verifier_service.service import VerifierService

GREEDY = SamplingParams(temperature=0.0)
SEEDED = SamplingParams(temperature=1.0)
SAMPLINGS = [GREEDY, SEEDED, SamplingParams(temperature=0.7, top_p=0.9)]
DEPTH = 4


@dataclass
class Answer:
    """What one request got."""

    request: GenerationRequest
    token_ids: list[int] = field(default_factory=list)
    rounds: list[tuple[int, int]] = field(default_factory=list)
    """(drafted, accepted) of each step."""

    def take(self, event) -> None:
        if isinstance(event, TokensEvent):
            self.token_ids += event.token_ids
            self.rounds.append((event.num_draft_tokens, sum(event.drafted)))
        else:
            assert isinstance(event, FinishEvent), event

    def num_drafted_rounds(self, start=0) -> int:
        return sum(drafted > 0 for drafted, _ in self.rounds[start:])

    @property
    def all_accepted(self) -> bool:
        return all(drafted == accepted for drafted, accepted in self.rounds)


def twenty_rounds(answer) -> bool:
    """Steps before the session is open go plain, and are not counted."""
    return answer.num_drafted_rounds() >= 20


class Pair:
    """A verifier, a model drafter and a client of the verifier."""

    def __init__(self, verifier, drafter, client):
        self.verifier, self.drafter, self.client = verifier, drafter, client
        self._num_requests = 0

    def request(self, prompt, sampling=GREEDY, max_tokens=900):
        self._num_requests += 1
        return GenerationRequest(
            request_id=str(self._num_requests),
            request_key=sum(prompt),
            prompt_ids=tuple(prompt),
            sampling=sampling,
            max_tokens=max_tokens,
            ignore_eos=True,
            path=Path.SPECULATIVE,
        )

    async def generate(self, request, enough=lambda answer: False) -> Answer:
        """To its end, or until there is enough of it."""
        answer, stream = Answer(request), self.client.submit(request)
        async for events in stream:
            for event in events:
                answer.take(event)
            if enough(answer):
                break
        stream.close()
        return answer

    async def generate_all(self, requests, enough=lambda answer: False) -> list[Answer]:
        return await asyncio.gather(*(self.generate(request, enough) for request in requests))

    async def check(self, answers) -> None:
        """Plain decoding gives the same tokens."""
        plain = [
            dataclasses.replace(
                answer.request,
                request_id=f"plain-{answer.request.request_id}",
                path=Path.PLAIN,
                cache_salt="plain",
                max_tokens=len(answer.token_ids),
            )
            for answer in answers
        ]
        expected = [answer.token_ids for answer in await self.generate_all(plain)]
        assert [answer.token_ids for answer in answers] == expected


@contextlib.asynccontextmanager
async def running(target, draft_model, *, draft_blocks=400, **draft):
    """Services as they run in a cluster, in one process."""

    def model(folder, **fields):
        return ModelConfig(source=str(folder), dtype="float32", **fields)

    verifier_config = VerifierConfig(
        model=model(target),
        kv_cache=KVCacheConfig(num_blocks=400),
        speculation=SpeculationConfig(
            planner="fixed",
            num_speculative_tokens=DEPTH,
            draft_deadline_ms=60_000,
            local_drafters=(),
        ),
    )
    drafter_config = DrafterConfig(
        kind="model",
        model=model(draft_model, **draft),
        kv_cache=KVCacheConfig(num_blocks=draft_blocks, block_size=4),
    )
    verifier = await VerifierService.start(verifier_config, host="127.0.0.1")
    drafter = await DrafterService.start(drafter_config, host="127.0.0.1")
    verifier.update_drafters(
        {drafter.incarnation: Member(drafter.incarnation, drafter.address, model=drafter.name)}
    )
    member = Member(verifier.incarnation, verifier.address)
    client = GenerationClient(member, "router", verifier.card.fingerprint, time.monotonic)
    try:
        await eventually(lambda: client.usable)
        await eventually(lambda: [load.state for load in verifier.load().drafters] == ["ready"])
        yield Pair(verifier, drafter, client)
        await eventually(lambda: drafter.num_sessions == 0)
    finally:
        await client.close()
        await verifier.stop(0.0)
        await drafter.stop(0.0)


@pytest.fixture(scope="module")
def target(tmp_path_factory):
    return make_tiny_model(tmp_path_factory.mktemp("target"), seed=1)


@pytest.fixture
async def self_draft(target):
    async with running(target, target) as pair:
        yield pair


@pytest.mark.parametrize("sampling", SAMPLINGS, ids=str)
async def test_every_round_is_accepted(self_draft, sampling):
    """G1: not only the first. G2: the same prompt again fares the same."""
    requests = [self_draft.request(range(10, 30), sampling) for _ in range(2)]
    answers = [await self_draft.generate(request, twenty_rounds) for request in requests]
    assert all(answer.all_accepted and twenty_rounds(answer) for answer in answers)
    await self_draft.check(answers)


async def test_every_round_is_accepted_in_a_batch(self_draft):
    """I2: eight sessions draft as well as one."""
    requests = [self_draft.request(range(10 + i, 20 + 7 * i), SAMPLINGS[i % 3]) for i in range(8)]
    answers = await self_draft.generate_all(requests, twenty_rounds)
    assert all(answer.all_accepted and twenty_rounds(answer) for answer in answers)
    await self_draft.check(answers)


@pytest.mark.alone
async def test_every_round_is_accepted_though_the_pool_holds_few_sessions(target):
    async with running(target, target, draft_blocks=45) as pair:
        requests = [pair.request(range(10 + i, 30 + i), SAMPLINGS[i % 3], 140) for i in range(6)]
        answers = await pair.generate_all(requests)
        assert sum(answer.num_drafted_rounds() for answer in answers) >= 10
        assert all(answer.all_accepted for answer in answers)
        await pair.check(answers)


@pytest.mark.parametrize("sampling", [GREEDY, SEEDED], ids=str)
async def test_a_plain_stretch_leaves_no_hole(self_draft, sampling):
    """L3: ten rounds, a stretch of plain steps, and every round after it is accepted again."""
    request = self_draft.request(range(10, 30), sampling)
    switched_at: list[int] = []

    def switch(answer, path):
        switched_at.append(len(answer.rounds))
        self_draft.client.set_path(request.request_id, path)

    def enough(answer):
        match len(switched_at):
            case 0 if answer.num_drafted_rounds() >= 10:
                switch(answer, Path.PLAIN)
            case 1 if answer.rounds[switched_at[0] :].count((0, 0)) >= 30:
                switch(answer, Path.SPECULATIVE)
            case 2:
                return answer.num_drafted_rounds(switched_at[1]) >= 10
        return False

    answer = await self_draft.generate(request, enough)
    assert answer.num_drafted_rounds(switched_at[1]) >= 10
    assert answer.all_accepted
    await self_draft.check([answer])


async def test_another_model_changes_nothing_but_speed(target, tmp_path):
    async with running(target, make_blurred_model(tmp_path, target, 0.03)) as pair:
        requests = [pair.request(range(10 + i, 30 + i), SAMPLINGS[i % 3]) for i in range(6)]
        answers = await pair.generate_all(requests, twenty_rounds)
        await pair.check(answers)
        rounds = [r for answer in answers for r in answer.rounds]
        num_drafted, num_accepted = (sum(column) for column in zip(*rounds, strict=True))
        assert 0.2 < num_accepted / num_drafted < 0.95


@pytest.mark.alone
async def test_a_short_window_drafts_as_far_as_it_reaches(target):
    """J2: the same ids; plain beyond the drafter's window."""
    async with running(target, target, max_model_len=200) as pair:
        requests = [pair.request(range(10, 30), max_tokens=230)]
        requests += [pair.request([*range(10, 120)] * 2, max_tokens=20)]
        answers = await pair.generate_all(requests)
        await pair.check(answers)
        assert all(answer.all_accepted for answer in answers)
        assert 0 < answers[0].num_drafted_rounds() <= 180 / DEPTH
        assert answers[1].num_drafted_rounds() == 0


@pytest.mark.alone
async def test_a_target_padded_further_is_drafted_for(target, tmp_path):
    """K1: until it emits an id that the draft model has no row for."""
    padded = make_tiny_model(tmp_path / "padded", seed=2, vocab_size=130)
    save_tokenizer(padded, 128)
    async with running(padded, target) as pair:
        answers: list[Answer] = []
        async with asyncio.timeout(60):  # Many come to such an id before the drafter is ready.
            while not any(answer.num_drafted_rounds() for answer in answers):
                first = 10 + len(answers) % 80
                prompts = [range(first + i, first + 20) for i in range(4)]
                requests = [pair.request(prompt, SEEDED, 120) for prompt in prompts]
                answers += await pair.generate_all(requests)
        await pair.check(answers)
        assert any(token_id >= 128 for answer in answers for token_id in answer.token_ids)
