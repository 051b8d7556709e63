"""Drafters inside the verifier and clients' predictions, through the router and gRPC: the same
answers as plain, whoever drafts, and exact counts."""

from __future__ import annotations

import itertools
import random
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from typing import Any

import httpx
import pytest

from cluster.config import DrafterConfig, RouterConfig
from cluster.types import GenerationRequest, Member, Path, SamplingParams
from drafter_service.service import DrafterService
from router.api import create_app
from router.service import RouterService
from tests.support.generation import RunningVerifier, running_verifier
from tests.support.polling import TIMEOUT_S, eventually, until
from tests.support.scripted_drafter import ScriptedDrafter, noise
from tests.support.tiny_models import make_tiny_model

VOCAB_SIZE = 128
NUM_TOKENS = 40


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return str(make_tiny_model(tmp_path_factory.mktemp("tiny"), vocab_size=VOCAB_SIZE))


def requests(tag: str) -> list[GenerationRequest]:
    rng = random.Random(7)
    made = []
    for index in range(16):
        word = [rng.randrange(3, VOCAB_SIZE) for _ in range(rng.choice([1, 3, 5]))]
        filler = [rng.randrange(3, VOCAB_SIZE) for _ in range(rng.choice([0, 2, 40]))]
        prompt = (word * rng.choice([1, 4, 50]) + filler + word)[:200]
        made.append(
            GenerationRequest(
                request_id=f"{tag}-{index}",
                request_key=rng.getrandbits(64),
                prompt_ids=tuple(prompt),
                sampling=SamplingParams(temperature=rng.choice([0.0, 0.3, 1.0])),
                max_tokens=NUM_TOKENS,
                ignore_eos=True,
                cache_salt=tag,
            )
        )
    return made


def ids(answers):
    return [answer.token_ids for answer in answers]


async def test_every_drafter_and_all_together_change_nothing(model):
    async with running_verifier(model, dtype="float32") as verifier:
        expected = ids(await verifier.generate(requests("plain"), path=Path.PLAIN))
    rng = random.Random(1)
    predictions = [
        tuple(i if rng.random() < 0.95 else rng.randrange(VOCAB_SIZE) for i in answer)
        for answer in expected
    ]
    for kinds in (("ngram",), ("suffix",), ("ngram", "suffix")):
        async with running_verifier(model, dtype="float32", local_drafters=kinds) as verifier:
            await check(verifier, kinds, expected, predictions)


async def check(verifier: RunningVerifier, kinds, expected, predictions) -> None:
    """Alone, with predictions, and merged with a replica that talks nonsense."""

    def drafted_by(answers) -> set[str]:
        return {
            run.drafter for answer in answers for event in answer.events for run in event.draft_runs
        }

    answers = await verifier.generate(requests("local"))
    assert ids(answers) == expected
    assert drafted_by(answers) <= set(kinds)
    assert sum(answer.stats.num_accepted_tokens for answer in answers) > 0

    predicted = [
        replace(request, prediction_ids=prediction)
        for request, prediction in zip(requests("predicted"), predictions, strict=True)
    ]
    for path in Path:
        answers = await verifier.generate(predicted, path=path)
        assert ids(answers) == expected
        assert "prediction" in drafted_by(answers)
        assert drafted_by(answers) <= {"prediction", *kinds}
        num_steps = sum(answer.stats.num_steps for answer in answers)
        assert num_steps < 0.5 * NUM_TOKENS * len(answers)

    async with ScriptedDrafter(noise(VOCAB_SIZE)) as drafter:
        await verifier.use_drafters(drafter.member)
        merged = await verifier.generate(requests("merged"))
        assert ids(merged) == expected
        assert len(drafted_by(merged)) > 1


async def test_a_suffix_drafter_replica_learns_from_the_outputs_of_one_tenant_alone(model):
    async with running_verifier(model, dtype="float32") as verifier:
        asked = [replace(request, drafter="suffix") for request in requests("plain")]
        expected = ids(await verifier.generate(asked, path=Path.PLAIN))
        drafter = await DrafterService.start(DrafterConfig(kind="suffix"), host="127.0.0.1")
        await verifier.use_drafters(Member(drafter.incarnation, drafter.address))

        async def num_steps(tag: str, salt: str) -> int:
            again = [
                replace(request, request_id=f"{tag}-{index}", cache_salt=salt)
                for index, request in enumerate(asked)
            ]
            answers = await verifier.generate(again)
            assert ids(answers) == expected
            assert {answer.stats.drafter for answer in answers} <= {"suffix", ""}
            return sum(answer.stats.num_steps for answer in answers)

        first = await num_steps("first", "us")
        other = await num_steps("other", "them")
        assert abs(first - other) < 0.2 * first
        attempts = itertools.count()

        async def far_fewer() -> bool:
            """Unless answers are over before their prompts are read."""
            return await num_steps(f"again-{next(attempts)}", "us") < 0.7 * min(first, other)

        await until(far_fewer, TIMEOUT_S)
        await drafter.stop(grace_s=0.1)


# --- as a client sees it ------------------------------------------------------------------------


@asynccontextmanager
async def system(model: str, **fields: Any) -> AsyncIterator[httpx.AsyncClient]:
    """A router over a verifier, without drafter replicas."""
    async with running_verifier(model, dtype="float32", **fields) as verifier:
        card = verifier.service.card
        router = RouterService(RouterConfig(), card=card)
        router.start()
        member = Member(
            verifier.service.incarnation, verifier.service.address, fingerprint=card.fingerprint
        )
        router.update_members({member.incarnation: member})
        transport = httpx.ASGITransport(create_app(router))
        try:
            await eventually(lambda: router.not_ready_reason is None)
            await eventually(lambda: bool(router.pool.load().verifiers))
            async with httpx.AsyncClient(transport=transport, base_url="http://router") as client:
                yield client
        finally:
            await router.close()


ASKED: dict[str, Any] = {
    "prompt": "abcabc",
    "temperature": 0,
    "ignore_eos": True,
    # Only tokens of one character, so that text and tokens are the same thing.
    "logit_bias": {str(i): -100 for i in (0, 1, 2, *range(99, VOCAB_SIZE))},
}


async def complete(client: httpx.AsyncClient, card_name: str, **fields: Any) -> dict[str, Any]:
    body = {"model": card_name, **ASKED, **fields}
    response = await client.post("/v1/completions", json=body)
    assert response.status_code == 200, response.text
    reply: dict[str, Any] = response.json()
    return reply


def details(reply: dict[str, Any]) -> tuple[int, int]:
    counts = reply["usage"]["completion_tokens_details"]
    return counts["accepted_prediction_tokens"], counts["rejected_prediction_tokens"]


async def test_what_a_client_gets_for_its_prediction(model):
    async with system(model, local_drafters=("suffix",)) as client:
        name = (await client.get("/v1/models")).json()["data"][0]["id"]
        off = {"mode": "off"}
        plain = await complete(client, name, max_tokens=80, speculation=off)
        text = plain["choices"][0]["text"]
        assert len(set(text)) > 10, "the model says too little to show anything"
        assert details(plain) == (0, 0)
        assert plain["speculation"]["drafter"] is None

        async def predicted(content: str, **fields: Any) -> dict[str, Any]:
            prediction = {"type": "content", "content": content}
            return await complete(client, name, prediction=prediction, **fields)

        right = await predicted(text, max_tokens=80)
        assert right["choices"][0]["text"] == text
        assert details(right) == (80, 0)
        assert right["speculation"]["num_steps"] < 10
        assert right["speculation"]["num_resyncs"] == 0
        only = await predicted(text, max_tokens=80, speculation={"drafter": "prediction"})
        assert only["choices"][0]["text"] == text
        assert only["speculation"]["drafter"] == "prediction"
        assert only["speculation"]["drafters"].keys() == {"prediction"}

        # Not used, so not counted.
        unused = await predicted(text, max_tokens=80, speculation=off)
        assert details(unused) == (0, 0)
        assert unused["choices"][0]["text"] == text

        # What the answer does not reach did not appear in it.
        short = await predicted(text, max_tokens=30)
        assert details(short) == (30, 50)
        both = await predicted(text, max_tokens=30, n=2)
        assert details(both) == (60, 100)

        # A stop string inside a block of accepted drafts.
        stop = text[40:44]
        where = text.index(stop)
        stopped = await predicted(text, max_tokens=80, stop=stop)
        assert stopped["choices"][0]["text"] == text[:where]
        assert stopped["usage"]["completion_tokens"] == where + len(stop)
        assert details(stopped) == (where + len(stop), 80 - where - len(stop))
        assert stopped["speculation"]["drafter"] is not None

        # Another character, and then the same again.
        wrong = "#" if text[30] != "#" else "$"
        edited = text[:30] + wrong + text[31:]
        reply = await predicted(edited, max_tokens=80)
        assert reply["choices"][0]["text"] == text
        assert reply["speculation"]["num_resyncs"] >= 1
        accepted, rejected = details(reply)
        assert accepted >= 70
        assert accepted + rejected == 80

        streamed = []
        body = {
            "model": name,
            **ASKED,
            "max_tokens": 80,
            "stream": True,
            "stream_options": {"include_usage": True},
            "prediction": {"type": "content", "content": edited},
        }
        async with client.stream("POST", "/v1/completions", json=body) as response:
            async for line in response.aiter_lines():
                if line.startswith("data: {"):
                    streamed.append(httpx.Response(200, content=line[6:]).json())
        assert "".join(c["choices"][0]["text"] for c in streamed if c["choices"]) == text
        assert details(streamed[-1]) == (accepted, rejected)


async def test_a_prediction_for_a_sampled_answer_changes_nothing(model):
    async with system(model) as client:
        name = (await client.get("/v1/models")).json()["data"][0]["id"]
        fields = {"max_tokens": 60, "temperature": 0.8, "seed": 5, "n": 2, "top_p": 0.95}
        plain = await complete(client, name, **fields)
        texts = [choice["text"] for choice in plain["choices"]]
        assert texts[0] != texts[1]
        prediction = {"type": "content", "content": texts[1]}
        reply = await complete(client, name, prediction=prediction, **fields)
        assert [choice["text"] for choice in reply["choices"]] == texts
        assert reply["speculation"]["drafters"]["prediction"]["num_accepted_tokens"] > 40
