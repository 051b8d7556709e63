"""The ratio tests with real models and gRPC: laws come where they are asked for and can be told."""

from __future__ import annotations

from contextlib import asynccontextmanager

import pytest

from cluster.config import DrafterConfig, KVCacheConfig, ModelConfig
from cluster.types import GenerationRequest, Member, SamplingParams
from drafter_service.service import DrafterService
from tests.support.generation import running_verifier
from tests.support.tiny_models import make_blurred_model, make_tiny_model
from verifier_service.draft_trie import DraftOutcome

pytestmark = [pytest.mark.alone, pytest.mark.long]

NUM_TOKENS = 200
PROMPT = tuple(range(5, 25))


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    target = make_tiny_model(tmp_path_factory.mktemp("target"))
    return target, make_blurred_model(tmp_path_factory.mktemp("drafter"), target, 0.02)


@asynccontextmanager
async def drafter(kind, folder):
    model = ModelConfig(source=str(folder), dtype="float32") if kind == "model" else None
    config = DrafterConfig(kind=kind, model=model, kv_cache=KVCacheConfig(num_blocks=200))
    service = await DrafterService.start(config, host="127.0.0.1")
    try:
        yield Member(service.incarnation, service.address)
    finally:
        await service.stop(0.1)


def requests(**fields):
    return [
        GenerationRequest(
            request_id=f"{fields} {key}",
            request_key=key,
            prompt_ids=PROMPT,
            max_tokens=NUM_TOKENS,
            ignore_eos=True,
            sampling=SamplingParams(**{"temperature": 1.0} | fields),
        )
        for key in range(4)
    ]


async def answers(folders, rule, kind, asked):
    """What they get, and what became of the drafts."""
    target, draft_model = folders
    async with (
        drafter(kind, draft_model) as member,
        running_verifier(
            str(target), dtype="float32", draft_deadline_ms=5_000, verification=rule
        ) as verifier,
    ):
        await verifier.use_drafters(member)
        given = await verifier.generate(asked)
        outcomes = dict(verifier.service._engine.draft_outcomes)
        return given, outcomes


@pytest.mark.parametrize("rule", ["rejection", "block"])
async def test_a_model_drafter_tells_its_laws(folders, rule):
    """And greedy requests beside them give the tokens that they always give."""
    given, outcomes = await answers(folders, rule, "model", requests() + requests(temperature=0.0))
    greedy = given[4:]
    assert all(len(answer.token_ids) == NUM_TOKENS for answer in given)
    assert sum(answer.stats.num_accepted_tokens for answer in given[:4]) > 20
    assert outcomes[DraftOutcome.LAWLESS] == 0
    assert outcomes[DraftOutcome.USED] > 0
    coupled, _ = await answers(folders, "coupled", "model", requests() + requests(temperature=0.0))
    assert [a.token_ids for a in greedy] == [a.token_ids for a in coupled[4:]]
    assert [a.token_ids for a in given[:4]] != [a.token_ids for a in coupled[:4]]


async def test_a_drafter_without_laws_is_verified_by_coupling(folders):
    """It is not asked for any, and what comes are the tokens of the coupled rule."""
    given, outcomes = await answers(folders, "rejection", "ngram", requests(top_k=2))
    coupled, _ = await answers(folders, "coupled", "ngram", requests(top_k=2))
    assert [a.token_ids for a in given] == [a.token_ids for a in coupled]
    assert outcomes[DraftOutcome.LAWLESS] == 0
