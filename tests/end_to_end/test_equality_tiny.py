"""Equality without exception: on a float32 model every way to serve a request gives the same ids.

Real gRPC on both sides; the drafter is a process of its own where it is to be killed or stopped.
"""

from __future__ import annotations

import asyncio
import random

import pytest

from cluster.errors import InternalError, InvalidRequestError
from cluster.load import DrafterState
from cluster.types import GenerationRequest, Path, SamplingParams
from tests.support.drafter_process import DrafterProcess
from tests.support.generation import during, running_verifier
from tests.support.polling import eventually
from tests.support.scripted_drafter import ScriptedDrafter, misbehaviours
from tests.support.tiny_models import make_tiny_model

VOCAB_SIZE = 128
NUM_TOKENS, MANY_TOKENS = 40, 150
SERVED = {"dtype": "float32", "draft_deadline_ms": 200.0}
"""In time a draft comes on a busy machine too."""
SAMPLINGS = [
    SamplingParams(temperature=0.0),
    SamplingParams(temperature=0.3),
    SamplingParams(temperature=1.0),
    SamplingParams(temperature=1.0, top_p=0.9),
    SamplingParams(temperature=0.8, top_k=10),
]


def requests(
    tag: str, num_tokens: int = NUM_TOKENS, *, cached_from: str = ""
) -> list[GenerationRequest]:
    """Prompts of 1 to 300 tokens, some with much repetition, under every sampling. Each tag
    computes its prompts by itself, but for one that takes what is cached from another."""
    rng = random.Random(7)
    made = []
    for index in range(15):
        word = [rng.randrange(3, VOCAB_SIZE) for _ in range(rng.choice([1, 3, 5]))]
        filler = [rng.randrange(3, VOCAB_SIZE) for _ in range(rng.choice([0, 2, 40]))]
        prompt = (word * rng.choice([1, 4, 50]) + filler + word)[:300]
        made.append(
            GenerationRequest(
                request_id=f"{tag}-{index}",
                request_key=rng.getrandbits(64),
                prompt_ids=tuple(prompt),
                sampling=SAMPLINGS[index % len(SAMPLINGS)],
                max_tokens=num_tokens,
                ignore_eos=True,
                cache_salt=cached_from or tag,
            )
        )
    return made


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return str(make_tiny_model(tmp_path_factory.mktemp("tiny"), vocab_size=VOCAB_SIZE))


def ids(answers):
    return [answer.token_ids for answer in answers]


async def until_accepted(verifier, tag):
    return await verifier.generate_drafted(lambda attempt: requests(f"{tag}-{attempt}"))


async def test_every_way_gives_the_same_ids(model):
    async with running_verifier(model, **SERVED) as verifier:
        alone = []
        for request in requests("alone"):
            alone += ids(await verifier.generate([request], path=Path.PLAIN))
        assert len({tuple(answer) for answer in alone}) > 10, "the model says always the same"
        assert ids(await verifier.generate(requests("batch"), path=Path.PLAIN)) == alone

        cached = await verifier.generate(requests("cached", cached_from="alone"), path=Path.PLAIN)
        assert ids(cached) == alone
        num_cached = sum(answer.events[0].num_cached_prompt_tokens for answer in cached)
        assert num_cached > 0.8 * sum(len(request.prompt_ids) for request in requests("cached"))

        async with DrafterProcess() as drafter:
            await verifier.use_drafters(drafter.member)
            drafted = await until_accepted(verifier, "drafted")
            assert ids(drafted) == alone

        for name, answer in misbehaviours(VOCAB_SIZE).items():
            async with ScriptedDrafter(answer) as drafter:
                await verifier.use_drafters(drafter.member)
                assert ids(await verifier.generate(requests(name))) == alone, name
                assert drafter.batches, f"{name} was never asked"


async def test_the_planner_changes_nothing_but_speed(model):
    async with (
        running_verifier(model, **SERVED, planner="goodput") as verifier,
        DrafterProcess() as drafter,
    ):
        plain = await verifier.generate(requests("plain"), path=Path.PLAIN)
        await verifier.use_drafters(drafter.member)
        planned = await until_accepted(verifier, "planned")
        assert ids(planned) == ids(plain)
        assert verifier.service.load().knee_tokens > 0


async def test_depth_and_limits_change_without_a_restart_and_nothing_else_does(model):
    async with running_verifier(model, **SERVED) as verifier, DrafterProcess() as drafter:
        await verifier.use_drafters(drafter.member)
        service = verifier.service
        now = service.config
        shallow = now.speculation.model_copy(update={"num_speculative_tokens": 1})
        service.reconfigure(now.model_copy(update={"speculation": shallow}))
        answers = await until_accepted(verifier, "shallow")
        assert max(len(answer.stats.drafted_per_position) for answer in answers) == 1
        for section, update in (
            ("speculation", {"planner": "goodput"}),
            ("kv_cache", {"block_size": 32}),
        ):
            other = getattr(now, section).model_copy(update=update)
            with pytest.raises(InvalidRequestError, match="user_config"):
                service.reconfigure(now.model_copy(update={section: other}))


async def test_health_fails_when_the_engine_has_ended(model):
    async with running_verifier(model, **SERVED) as verifier:
        verifier.service.check_health()
        verifier.service._engine.stop(60.0)
        with pytest.raises(InternalError, match="ended"):
            verifier.service.check_health()


async def test_a_drafter_killed_in_the_middle_of_answers_changes_nothing(model):
    async with running_verifier(model, **SERVED) as verifier, DrafterProcess() as drafter:
        expected = ids(await verifier.generate(requests("plain", MANY_TOKENS), path=Path.PLAIN))
        await verifier.use_drafters(drafter.member)
        accepted = asyncio.Event()

        def watch(event):
            if any(event.drafted):
                accepted.set()

        answers = await during(
            verifier.generate(requests("killed", MANY_TOKENS), on_tokens=watch),
            accepted,
            drafter.kill,
        )
        assert ids(answers) == expected
        assert verifier.num_ready_drafters == 0
        states = {load.state for load in verifier.service.load().drafters}
        assert states <= {DrafterState.LOST, DrafterState.CONNECTING}


async def test_a_drafter_that_hangs_costs_no_more_than_its_deadline(model):
    async with running_verifier(model, **SERVED) as verifier, DrafterProcess() as drafter:
        expected = ids(await verifier.generate(requests("plain", MANY_TOKENS), path=Path.PLAIN))
        await verifier.use_drafters(drafter.member)
        accepted = asyncio.Event()

        def watch(event):
            if any(event.drafted):
                accepted.set()

        answers = await during(
            verifier.generate(requests("hung", MANY_TOKENS), on_tokens=watch),
            accepted,
            drafter.stop,
        )
        assert drafter.is_stopped()
        assert ids(answers) == expected


async def test_another_drafter_takes_over(model):
    async with (
        running_verifier(model, **SERVED) as verifier,
        DrafterProcess() as first,
        DrafterProcess() as second,
    ):
        expected = ids(await verifier.generate(requests("plain", MANY_TOKENS), path=Path.PLAIN))
        await verifier.use_drafters(first.member, second.member)
        accepted = asyncio.Event()

        def watch(event):
            if any(event.drafted):
                accepted.set()

        answers = await during(
            verifier.generate(requests("moved", MANY_TOKENS), on_tokens=watch), accepted, first.kill
        )
        assert ids(answers) == expected
        assert verifier.num_ready_drafters == 1


async def test_a_restarted_drafter_is_used_again(model):
    async with running_verifier(model, **SERVED) as verifier:
        async with DrafterProcess() as first:
            await verifier.use_drafters(first.member)
            await first.kill()
        async with DrafterProcess() as second:
            await verifier.use_drafters(second.member)
            assert await until_accepted(verifier, "again")


async def test_without_any_drafter_everything_is_served_plain(model):
    async with running_verifier(model, **SERVED) as verifier:
        answers = await verifier.generate(requests("nobody"))
        assert all(len(answer.token_ids) == NUM_TOKENS for answer in answers)
        assert all(answer.stats.num_draft_tokens == 0 for answer in answers)


@pytest.mark.alone
async def test_a_router_that_leaves_frees_everything_within_a_second(model):
    async with running_verifier(model, **SERVED) as verifier, DrafterProcess() as drafter:
        await verifier.use_drafters(drafter.member)
        streams = [verifier.client.submit(request) for request in requests("leaver", 500)]
        await anext(streams[0])
        assert verifier.service.load().kv_blocks_used > 0
        await verifier.client.close()

        def freed():
            load = verifier.service.load()
            sessions = sum(drafter.sessions for drafter in load.drafters)
            return load.running == load.waiting == load.kv_blocks_used == sessions == 0

        await eventually(freed, 1.0)
