"""Log probabilities in OpenAI's shapes: one entry per delivered token, streamed or whole."""

from __future__ import annotations

from typing import Any

import pytest

from router.tokenizer import Tokenizer
from tests.router.deployment import Deployment, deploy
from tests.router.sse import events
from tests.support.scripted_verifier import ScriptedVerifier, make_card, saying

CARD = make_card()
TOKENIZER = Tokenizer(CARD)
TEXT = "the fox \N{SNOWMAN} jumps"


def ids_of(text: str) -> tuple[int, ...]:
    return TOKENIZER.encode(text, add_special_tokens=False)


ALL_IDS = (*ids_of(TEXT), *CARD.eos_token_ids)


async def chat_logprobs(deployment: Deployment, **fields: Any) -> list[dict[str, Any]]:
    """Of a whole reply; those of the stream are the same."""
    whole = (await deployment.chat(logprobs=True, **fields)).json()
    entries = whole["choices"][0]["logprobs"]["content"]
    assert len(entries) == whole["usage"]["completion_tokens"]
    streamed = await deployment.chat(logprobs=True, stream=True, **fields)
    *chunks, _ = events(streamed.text)
    choices = [chunk["choices"][0] for chunk in chunks]
    assert [e for choice in choices for e in choice["logprobs"]["content"]] == entries
    return entries


@pytest.mark.parametrize("size", [1, 2, 16])
async def test_a_chat_tells_every_token_it_delivers(size: int) -> None:
    """A character in three tokens is three entries, whose bytes make it."""
    async with deploy(ScriptedVerifier(saying(TEXT, size))) as deployment:
        entries = await chat_logprobs(deployment, top_logprobs=2)
        assert [e["logprob"] for e in entries] == [-i / 8 for i in ALL_IDS]
        spelled = b"".join(bytes(e["bytes"]) for e in entries)
        assert spelled.decode() == TEXT + CARD.eos_token
        assert [e["token"] for e in entries if e["token"].startswith("bytes:")]
        for entry, token_id in zip(entries, ALL_IDS, strict=True):
            logprobs = [top["logprob"] for top in entry["top_logprobs"]]
            assert logprobs == [-token_id / 8, -token_id / 8 - 1]
            assert entry["top_logprobs"][0]["token"] == entry["token"]
        assert (await chat_logprobs(deployment))[0]["top_logprobs"] == []


@pytest.mark.parametrize("size", [1, 4, 16])
async def test_tokens_behind_a_stop_are_not_told(size: int) -> None:
    async with deploy(ScriptedVerifier(saying("the fox STOP jumps", size))) as deployment:
        entries = await chat_logprobs(deployment, stop=["STOP"])
        assert [e["logprob"] for e in entries] == [-i / 8 for i in ids_of("the fox STOP")]


@pytest.mark.parametrize("size", [1, 3, 16])
async def test_a_completion_tells_where_its_tokens_begin(size: int) -> None:
    text = "the quick fox jumps"
    async with deploy(ScriptedVerifier(saying(text, size, ends=False))) as deployment:
        fields = {"logprobs": 1, "max_tokens": len(ids_of(text))}
        told = (await deployment.complete(**fields)).json()["choices"][0]["logprobs"]
        assert "".join(told["tokens"]) == text
        assert told["text_offset"] == [
            len("".join(told["tokens"][:index])) for index in range(len(told["tokens"]))
        ]
        assert told["token_logprobs"] == [-i / 8 for i in ids_of(text)]
        assert [list(top.values()) for top in told["top_logprobs"]] == [
            [value] for value in told["token_logprobs"]
        ]
        *chunks, _ = events((await deployment.complete(stream=True, **fields)).text)
        for name, values in told.items():
            parts = [chunk["choices"][0]["logprobs"][name] for chunk in chunks]
            assert [value for part in parts for value in part] == values


async def test_who_asks_for_none_gets_none() -> None:
    async with deploy(ScriptedVerifier(saying(TEXT))) as deployment:
        assert (await deployment.chat()).json()["choices"][0]["logprobs"] is None
        assert (await deployment.complete()).json()["choices"][0]["logprobs"] is None
        assert [request.num_top_logprobs for request in deployment.verifier.submitted] == [None] * 2
