"""echo with logprobs: what lm-eval and its like score a prompt with."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Coroutine
from contextlib import asynccontextmanager
from typing import Any

import pytest

from cluster.config import LimitsConfig, RouterConfig
from cluster.types import ModelCard
from router.generation import Generation
from router.logprobs import CompletionLogprobs
from router.tokenizer import Tokenizer
from tests.router.deployment import Deployment, deploy
from tests.router.sse import events
from tests.support.polling import eventually
from tests.support.scripted_verifier import (
    PROMPT_CHUNK_TOKENS,
    ScriptedVerifier,
    make_card,
    saying,
    sentencepiece_tokenizer_json,
)

CARD = make_card()
TOKENIZER = Tokenizer(CARD)
TEXT = "the quick \N{SNOWMAN} fox"
ANSWER = " jumps over"


def ids_of(text: str) -> tuple[int, ...]:
    return TOKENIZER.encode(text, add_special_tokens=False)


IDS, ANSWER_IDS = ids_of(TEXT), ids_of(ANSWER)


async def told(deployment: Deployment, prompt: object = TEXT, **fields: Any) -> dict[str, Any]:
    fields = {"echo": True, "logprobs": 1, "temperature": 0, **fields}
    return (await deployment.complete(prompt, **fields)).json()


def _generations(deployment: Deployment) -> list[Generation]:
    return [choice.generation for reply in deployment.service._auto for choice in reply.choices]


def _num_told(deployment: Deployment) -> int:
    return sum(len(generation.prompt_logprobs) for generation in _generations(deployment))


@asynccontextmanager
async def _running(asking: Coroutine[Any, Any, Any]) -> AsyncIterator[asyncio.Task[Any]]:
    task = asyncio.create_task(asking)
    try:
        yield task
    finally:
        task.cancel()


def check(choice: dict[str, Any], token_ids: tuple[int, ...], num_top: int) -> None:
    logprobs = choice["logprobs"]
    assert logprobs["token_logprobs"] == [None, *(-i / 8 for i in token_ids[1:])]
    assert logprobs["tokens"] == [TOKENIZER.token_text(i)[0] for i in token_ids]
    assert logprobs["top_logprobs"][0] is None
    for token_id, top in zip(token_ids[1:], logprobs["top_logprobs"][1:], strict=True):
        assert len(top) == num_top
        if num_top:
            assert max(top.values()) == -token_id / 8


async def test_every_prompt_token_is_told_but_the_first() -> None:
    async with deploy(ScriptedVerifier(saying(ANSWER, ends=False))) as deployment:
        body = await told(deployment, max_tokens=len(ANSWER_IDS))
        (choice,) = body["choices"]
        assert choice["text"] == TEXT + ANSWER
        check(choice, IDS + ANSWER_IDS, 1)
        (submitted,) = deployment.verifier.submitted
        assert (submitted.num_prompt_logprobs, submitted.num_top_logprobs) == (1, 1)


async def test_nothing_need_be_generated() -> None:
    async with deploy(ScriptedVerifier(saying(ANSWER))) as deployment:
        body = await told(deployment, max_tokens=0)
        (choice,) = body["choices"]
        assert (choice["text"], choice["finish_reason"]) == (TEXT, "length")
        check(choice, IDS, 1)
        assert body["usage"]["completion_tokens"] == 0
        assert body["usage"]["prompt_tokens"] == len(IDS)
        bare = await told(deployment, max_tokens=0, logprobs=None)
        assert (bare["choices"][0]["text"], bare["choices"][0]["logprobs"]) == (TEXT, None)


async def test_as_lm_eval_asks() -> None:
    """Lists of ids, one token more; its sum leaves the last one out."""
    prompts = [list(IDS), list(IDS[:3]), [IDS[0]]]
    async with deploy(ScriptedVerifier(saying(ANSWER))) as deployment:
        body = await told(deployment, prompts, max_tokens=1, seed=1234)
        for index, (choice, prompt) in enumerate(zip(body["choices"], prompts, strict=True)):
            assert choice["index"] == index
            check(choice, (*prompt, ANSWER_IDS[0]), 1)
            assert len(choice["logprobs"]["token_logprobs"]) == len(prompt) + 1


@pytest.mark.parametrize("num_top", [0, 3])
async def test_a_stream_tells_the_same(num_top: int) -> None:
    async with deploy(ScriptedVerifier(saying(ANSWER, 2, ends=False))) as deployment:
        fields = {"max_tokens": len(ANSWER_IDS), "logprobs": num_top, "n": 2}
        whole = await told(deployment, **fields)
        response = await deployment.complete(TEXT, echo=True, stream=True, **fields)
        *chunks, _ = events(response.text)
        for index, choice in enumerate(whole["choices"]):
            check(choice, IDS + ANSWER_IDS, num_top)
            parts = [c["choices"][0] for c in chunks if c["choices"][0]["index"] == index]
            assert "".join(part["text"] for part in parts) == TEXT + ANSWER
            for name, values in choice["logprobs"].items():
                streamed = [value for part in parts for value in part["logprobs"][name]]
                assert streamed == values


async def test_a_long_prompt_is_told_like_a_short_one() -> None:
    """It is written beside the event loop."""
    ids = (IDS * 100)[:511]
    async with deploy(ScriptedVerifier(saying(ANSWER))) as deployment:
        body = await told(deployment, [list(ids), list(ids)], max_tokens=1)
        for choice in body["choices"]:
            check(choice, (*ids, ANSWER_IDS[0]), 1)


async def test_offsets_are_where_tokens_begin_in_the_text() -> None:
    """A character in three tokens begins once; special tokens have no text of their own."""
    special = CARD.eos_token_ids[0]
    prompt = [special, *IDS, special, *ids_of("lazy")]
    async with deploy(ScriptedVerifier(saying(ANSWER, ends=False))) as deployment:
        body = await told(deployment, prompt, max_tokens=len(ANSWER_IDS))
    (choice,) = body["choices"]
    logprobs, text = choice["logprobs"], choice["text"]
    assert text == TEXT + "lazy" + ANSWER
    offsets = logprobs["text_offset"]
    assert offsets == sorted(offsets)
    assert offsets[:2] == [0, 0]
    for token, offset in zip(logprobs["tokens"], offsets, strict=True):
        if token == CARD.eos_token:
            continue
        if token.startswith("bytes:"):
            assert text[offset] == "\N{SNOWMAN}"
        else:
            assert text[offset:].startswith(token)


def test_a_space_that_the_tokenizer_puts_first_is_no_character_of_the_text() -> None:
    card = ModelCard("m", 99, 300, "v", "f", (2,), sentencepiece_tokenizer_json(), "")
    tokenizer = Tokenizer(card)
    ids = [tokenizer.special_ids["<s>"], *tokenizer.encode("\u2581ab", add_special_tokens=False)]
    assert tokenizer.decode(ids) == " ab"
    writer = CompletionLogprobs(tokenizer, "ab", [(token_id, None) for token_id in ids])
    told = writer.part([])
    assert told["tokens"] == ["<s>", " a", "b"]
    assert told["text_offset"] == [0, 0, 1]


async def test_who_does_not_ask_is_not_told() -> None:
    async with deploy(ScriptedVerifier(saying(ANSWER))) as deployment:
        for fields in ({"echo": False}, {"logprobs": None}):
            await told(deployment, **fields)
        submitted = deployment.verifier.submitted
        assert [request.num_prompt_logprobs for request in submitted] == [None, None]


async def test_a_verifier_lost_while_it_scores_is_not_noticed() -> None:
    """The next one begins with the prompt again, and nothing is told twice."""
    begun: dict[str, Any] = {"max_tokens": 2, "prompt": list(IDS * 3)}
    async with deploy(ScriptedVerifier(saying(ANSWER))) as deployment:
        expected = (await told(deployment, **begun))["choices"]
    first = ScriptedVerifier(saying(ANSWER), step_s=0.05)
    async with deploy(first) as deployment:
        asking = told(deployment, **begun)
        async with _running(asking) as answer:
            await eventually(lambda: _num_told(deployment) >= PROMPT_CHUNK_TOKENS)
            first.paused = True
            assert _num_told(deployment) < 3 * len(IDS) - 1, "the fault came too late"
            second = await deployment.add(ScriptedVerifier(saying(ANSWER)))
            await first.kill()
            assert (await answer)["choices"] == expected
        assert [r.num_prompt_logprobs for r in second.submitted] == [1]


async def test_a_verifier_lost_behind_the_prompt_is_not_asked_for_it_again() -> None:
    first = ScriptedVerifier(saying(ANSWER, ends=False), step_s=0.05)
    async with deploy(first) as deployment:
        asking = told(deployment, list(IDS), max_tokens=len(ANSWER_IDS))
        async with _running(asking) as answer:
            await eventually(lambda: any(g.token_ids for g in _generations(deployment)))
            first.paused = True
            second = await deployment.add(ScriptedVerifier(saying(ANSWER, ends=False)))
            await first.kill()
            check((await answer)["choices"][0], IDS + ANSWER_IDS, 1)
        (resumed,) = second.submitted
        assert resumed.num_prompt_logprobs is None
        assert resumed.resumed_ids


async def test_a_verifier_that_leaves_them_out_fails_the_request() -> None:
    class Forgetful(ScriptedVerifier):
        def _next_scored(self, running: Any) -> tuple[int, ...]:
            return ()

    async with deploy(Forgetful(saying(ANSWER))) as deployment:
        response = await deployment.complete(TEXT, echo=True, logprobs=1)
        assert response.status_code == 500
        assert "log probabilities" in response.json()["error"]["message"]
        assert (await deployment.complete(TEXT)).status_code == 200


async def test_what_cannot_be_done_is_refused_by_field() -> None:
    config = RouterConfig(limits=LimitsConfig(max_prompt_logprobs=40))
    async with deploy(ScriptedVerifier(saying(ANSWER)), config=config) as deployment:
        for fields, param in (
            ({"max_tokens": 0}, "max_tokens"),
            ({"max_tokens": 0, "echo": True, "max_completion_tokens": 2}, "max_completion_tokens"),
            ({"max_tokens": 0, "echo": True, "min_tokens": 1}, "min_tokens"),
            ({"max_tokens": -1, "echo": True}, "max_tokens"),
            ({"echo": True, "logprobs": 20}, "logprobs"),
            ({"echo": True, "logprobs": 1, "n": 8}, "logprobs"),
            ({"echo": True, "suffix": "end"}, "suffix"),
        ):
            response = await deployment.complete(TEXT, **fields)
            assert (response.status_code, response.json()["error"]["param"]) == (400, param)
        chat = await deployment.chat(max_tokens=0)
        assert (chat.status_code, chat.json()["error"]["param"]) == (400, "max_tokens")
        assert not deployment.verifier.submitted
