"""The same on a real model in bf16: every drafter, and none, gives the same ids.

Nothing is forgiven: the engine computes a row in shapes that agree on this machine, so that near
ties fall the same way in every batch. `make test` takes every third prompt, `make test-long` all.
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, replace

import pytest
from tokenizers import Tokenizer

from cluster.config import EMBEDDED_MODEL
from cluster.types import GenerationRequest, Path, SamplingParams
from tests.support import prompts
from tests.support.drafter_process import DrafterProcess
from tests.support.generation import Answer, RunningVerifier, during, running_verifier
from tests.support.scripted_drafter import ScriptedDrafter, noise

NUM_TOKENS = 20
SEEDED = [
    SamplingParams(temperature=0.3),
    SamplingParams(temperature=1.0),
    SamplingParams(temperature=1.0, top_p=0.9),
]


@dataclass(frozen=True)
class System:
    """A verifier on a loop of its own, and what it says plainly to every n-th prompt."""

    loop: asyncio.AbstractEventLoop
    verifier: RunningVerifier
    every: int
    expected: list[list[int]]

    def requests(self, tag: str) -> list[GenerationRequest]:
        return requests(self.verifier.service.card, tag, self.every)


def requests(card, tag: str, every: int) -> list[GenerationRequest]:
    """Every n-th prompt, the last and longest first, greedy and seeded; chat prompts in the model's
    chat form. Each tag computes its prompts by itself."""
    tokenizer = Tokenizer.from_str(card.tokenizer_json)
    made = []
    for index, prompt in enumerate(prompts.ALL[::-every]):
        if prompt in prompts.CHAT + prompts.LISTS:
            prompt = f"<|im_start|>user\n{prompt}<|im_end|>\n<|im_start|>assistant\n"
        token_ids = tuple(tokenizer.encode(prompt).ids)
        for sampling in (SamplingParams(temperature=0.0), SEEDED[index % len(SEEDED)]):
            request = GenerationRequest(
                request_id=f"{tag}-{len(made)}",
                request_key=1000 + index,
                prompt_ids=token_ids,
                sampling=sampling,
                max_tokens=NUM_TOKENS,
                cache_salt=tag,
            )
            made.append(request)
    return made


def ids(answers: list[Answer]) -> list[list[int]]:
    return [answer.token_ids for answer in answers]


def test_the_prompts_are_of_every_kind():
    assert len(prompts.ALL) >= 40


@pytest.fixture(
    scope="module", params=[3, pytest.param(1, marks=pytest.mark.long)], ids=["some", "all"]
)
def system(request):
    """One loaded model for the whole module."""
    loop = asyncio.new_event_loop()
    # A model drafter on the same two cores is slow, and this is about what it proposes.
    context = running_verifier(EMBEDDED_MODEL, num_blocks=1200, draft_deadline_ms=60_000)
    verifier = loop.run_until_complete(context.__aenter__())
    plain = requests(verifier.service.card, "plain", request.param)
    expected = loop.run_until_complete(verifier.generate(plain, path=Path.PLAIN))
    yield System(loop, verifier, request.param, ids(expected))
    loop.run_until_complete(context.__aexit__(None, None, None))
    loop.close()


def test_alone_is_as_in_a_batch(system):
    async def run():
        for index, request in enumerate(system.requests("alone")):
            if index % 7 == 0:
                answers = await system.verifier.generate([request], path=Path.PLAIN)
                assert ids(answers) == [system.expected[index]], request

    system.loop.run_until_complete(run())


def test_a_cached_prompt_changes_nothing(system):
    async def run():
        requested = system.requests("cached")[::3]
        cached = [replace(request, cache_salt="plain") for request in requested]
        answers = await system.verifier.generate(cached, path=Path.PLAIN)
        assert ids(answers) == system.expected[::3]
        num_cached = sum(answer.events[0].num_cached_prompt_tokens for answer in answers)
        assert num_cached > 5 * len(cached)

    system.loop.run_until_complete(run())


@pytest.mark.long
def test_ngram_drafts_change_nothing(system):
    async def run():
        async with DrafterProcess() as drafter:
            await system.verifier.use_drafters(drafter.member)
            answers = await system.verifier.generate(system.requests("ngram"))
        assert ids(answers) == system.expected
        assert sum(answer.stats.num_accepted_tokens for answer in answers) > len(answers) / 2

    system.loop.run_until_complete(run())


def test_a_draft_models_drafts_change_nothing(system):
    """The target as its own drafter, in a process of its own."""

    async def run():
        async with DrafterProcess("--kind", "model", "--model", EMBEDDED_MODEL) as drafter:
            await system.verifier.use_drafters(drafter.member)
            requested = system.requests("model")
            shallow = [replace(request, num_speculative_tokens=4) for request in requested]
            answers = await system.verifier.generate(shallow)
        assert ids(answers) == system.expected
        num_drafted = sum(answer.stats.num_draft_tokens for answer in answers)
        num_accepted = sum(answer.stats.num_accepted_tokens for answer in answers)
        # All but what lies behind the end of an answer.
        assert num_accepted > 0.9 * num_drafted > len(answers)

    system.loop.run_until_complete(run())


@pytest.mark.long
def test_garbage_changes_nothing(system):
    async def run():
        async with ScriptedDrafter(noise(system.verifier.service.card.vocab_size)) as drafter:
            await system.verifier.use_drafters(drafter.member)
            # Short ones: each wrong token costs a row of the forward.
            garbage = system.requests("garbage")
            shallow = [replace(request, num_speculative_tokens=2) for request in garbage]
            answers = await system.verifier.generate(shallow)
        assert ids(answers) == system.expected
        assert sum(answer.stats.num_draft_tokens for answer in answers) > len(answers) / 2

    system.loop.run_until_complete(run())


def test_a_killed_drafter_changes_nothing(system):
    async def run():
        accepted = asyncio.Event()

        def watch(event):
            if any(event.drafted):
                accepted.set()

        async with DrafterProcess() as drafter:
            await system.verifier.use_drafters(drafter.member)
            answers = await during(
                system.verifier.generate(system.requests("killed"), on_tokens=watch),
                accepted,
                drafter.kill,
            )
        assert ids(answers) == system.expected

    system.loop.run_until_complete(run())


def test_a_copy_task_is_drafted_well(system):
    """Three tokens a step and more where the answer repeats the prompt."""

    async def run():
        tokenizer = Tokenizer.from_str(system.verifier.service.card.tokenizer_json)
        request = GenerationRequest(
            request_id="copy",
            request_key=1,
            prompt_ids=tuple(tokenizer.encode(prompts.COPY_TASK).ids),
            sampling=SamplingParams(temperature=0.0),
            max_tokens=60,
        )
        async with DrafterProcess() as drafter:
            assert drafter.member.pid
            await system.verifier.use_drafters(drafter.member)
            [answer] = await system.verifier.generate([request])
        assert len(answer.token_ids) / answer.stats.num_steps >= 3, answer

    system.loop.run_until_complete(run())
