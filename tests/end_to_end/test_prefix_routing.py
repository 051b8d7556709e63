"""Requests with shared prefixes over several real verifiers: they land where their prefix is."""

from __future__ import annotations

import asyncio
import random

import pytest

from tests.support.real_system import real_system
from tests.support.tiny_models import make_tiny_model

NUM_PREFIXES, NUM_REQUESTS, PREFIX_LEN, TAIL_LEN = 20, 200, 64, 8


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return str(make_tiny_model(tmp_path_factory.mktemp("tiny")))


async def test_shared_prefixes_are_computed_once_and_no_replica_takes_too_much(model):
    rng = random.Random(11)
    words = [[rng.randrange(3, 128) for _ in range(PREFIX_LEN)] for _ in range(NUM_PREFIXES)]
    asked = [rng.randrange(NUM_PREFIXES) for _ in range(NUM_REQUESTS)]
    async with real_system(model, num_verifiers=3) as system:
        slots = asyncio.Semaphore(6)

        async def ask(prefix: int) -> int:
            tail = [rng.randrange(3, 128) for _ in range(TAIL_LEN)]
            async with slots:
                reply = await system.complete(words[prefix] + tail, max_tokens=2)
            assert reply.status == 200
            return int(reply.body["usage"]["prompt_tokens_details"]["cached_tokens"])

        cached = await asyncio.gather(*map(ask, asked))
        taken = [
            verifier.load().prefix_cache_query_tokens / (PREFIX_LEN + TAIL_LEN)
            for verifier in system.verifiers
        ]
    ideal = (NUM_REQUESTS - len(set(asked))) * PREFIX_LEN
    assert sum(cached) >= 0.8 * ideal
    assert sum(taken) == NUM_REQUESTS
    assert max(taken) <= 1.5 * NUM_REQUESTS / 3
