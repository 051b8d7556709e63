"""OpenAI's own SDK against a real socket."""

from __future__ import annotations

from collections.abc import AsyncIterator

import openai
import pytest

from tests.router.deployment import deploy
from tests.support.http_server import serve_http
from tests.support.scripted_verifier import ScriptedVerifier, endless, saying

HI = [{"role": "user", "content": "hi"}]


@pytest.fixture
async def sdk() -> AsyncIterator[openai.AsyncOpenAI]:
    async with (
        deploy(ScriptedVerifier(saying("the quick brown fox", 3))) as deployment,
        serve_http(deployment.app) as url,
        openai.AsyncOpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0) as client,
    ):
        yield client


async def test_chat(sdk: openai.AsyncOpenAI) -> None:
    reply = await sdk.chat.completions.create(model="tiny", messages=HI, temperature=0, seed=1)
    assert reply.choices[0].message.content == "the quick brown fox"
    assert reply.choices[0].finish_reason == "stop"
    assert reply.usage is not None
    assert reply.usage.total_tokens == reply.usage.prompt_tokens + reply.usage.completion_tokens
    assert reply.model_extra is not None
    assert reply.model_extra["speculation"]["path"] == "plain"


async def test_chat_stream(sdk: openai.AsyncOpenAI) -> None:
    stream = await sdk.chat.completions.create(
        model="tiny", messages=HI, stream=True, stream_options={"include_usage": True}
    )
    chunks = [chunk async for chunk in stream]
    text = "".join(c.choices[0].delta.content or "" for c in chunks if c.choices)
    assert text == "the quick brown fox"
    assert chunks[0].choices[0].delta.role == "assistant"
    assert chunks[-1].usage is not None
    assert chunks[-2].choices[0].finish_reason == "stop"


async def test_a_reply_can_be_sent_back(sdk: openai.AsyncOpenAI) -> None:
    reply = await sdk.chat.completions.create(model="tiny", messages=HI)
    conversation = [*HI, reply.choices[0].message.model_dump(), *HI]
    again = await sdk.chat.completions.create(model="tiny", messages=conversation)
    assert again.choices[0].message.content


async def test_completions(sdk: openai.AsyncOpenAI) -> None:
    reply = await sdk.completions.create(model="tiny", prompt=["a", "b"], n=2, max_tokens=3)
    assert [choice.index for choice in reply.choices] == [0, 1, 2, 3]
    stream = await sdk.completions.create(model="tiny", prompt=[5, 6], stream=True)
    assert "".join([chunk.choices[0].text async for chunk in stream])


async def test_models(sdk: openai.AsyncOpenAI) -> None:
    assert [model.id async for model in sdk.models.list()] == ["tiny"]
    assert (await sdk.models.retrieve("tiny")).id == "tiny"


async def test_errors_have_their_classes(sdk: openai.AsyncOpenAI) -> None:
    with pytest.raises(openai.BadRequestError) as caught:
        await sdk.chat.completions.create(model="tiny", messages=HI, n=99)
    assert caught.value.param == "n"
    with pytest.raises(openai.NotFoundError):
        await sdk.chat.completions.create(model="other", messages=HI)


async def test_a_lost_verifier_is_an_error_in_the_stream() -> None:
    async with (
        deploy(ScriptedVerifier(endless(), step_s=0.005)) as deployment,
        serve_http(deployment.app) as url,
        openai.AsyncOpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0) as client,
    ):
        stream = await client.chat.completions.create(model="tiny", messages=HI, stream=True)
        await anext(stream)
        await deployment.verifier.kill()
        with pytest.raises(openai.APIError, match=r"UNAVAILABLE|CANCELLED"):
            async for _ in stream:
                pass
