"""Tools through OpenAI's own SDK: its types, its way to put streams together, and round trips."""

from __future__ import annotations

import json
import re
from collections.abc import AsyncIterator, Iterable
from dataclasses import replace
from typing import Any, Literal

import openai
import pydantic
import pytest

from cluster.types import GenerationRequest
from router.tokenizer import Tokenizer
from router.tools.call_format import HERMES
from tests.router.deployment import deploy
from tests.support.http_server import serve_http
from tests.support.scripted_verifier import ScriptedVerifier, Step, make_card, saying
from tests.support.tools import TOOLS

WEATHER_CALL = HERMES.write("get_weather", '{"city": "Paris"}')
TIME_CALL = HERMES.write("get_time", "{}")
NAMED = {"type": "function", "function": {"name": "get_weather"}}
BOTH = f"Let me look.\n{WEATHER_CALL}\n{TIME_CALL}"
TOKENIZER = Tokenizer(make_card())
HI = [{"role": "user", "content": "Weather and time?"}]


def script(request: GenerationRequest) -> Iterable[Step]:
    """Calls both, and says what came of it when that is known."""
    prompt = TOKENIZER.decode(request.prompt_ids)
    results = re.findall(r"<tool_response>\n(.*)\n</tool_response>", prompt)
    text = f"It is {' and '.join(results)}." if results else BOTH
    return saying(text, 4)(request)


@pytest.fixture
async def sdk() -> AsyncIterator[openai.AsyncOpenAI]:
    card = replace(make_card(), max_model_len=8192)
    async with deploy() as deployment:
        deployment.service.serve_model(card)
        await deployment.add(ScriptedVerifier(script, card=card))
        async with (
            serve_http(deployment.app) as url,
            openai.AsyncOpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0) as client,
        ):
            yield client


def told(message: Any) -> list[tuple[str, Any]]:
    return [(c.function.name, json.loads(c.function.arguments)) for c in message.tool_calls]


EXPECTED = [("get_weather", {"city": "Paris"}), ("get_time", {})]


@pytest.mark.parametrize(
    ("choice", "reason"), [("auto", "tool_calls"), ("required", "tool_calls"), (NAMED, "stop")]
)
async def test_calls(sdk: openai.AsyncOpenAI, choice: Any, reason: str) -> None:
    reply = await sdk.chat.completions.create(
        model="tiny", messages=HI, tools=TOOLS, tool_choice=choice
    )
    message = reply.choices[0].message
    # The verifier plays its script whatever the grammar; a name that may not be called is text.
    assert told(message) == EXPECTED[: 1 if choice is NAMED else 2]
    assert reply.choices[0].finish_reason == reason
    assert all(call.type == "function" and call.id for call in message.tool_calls or ())


async def test_the_sdk_puts_a_stream_together(sdk: openai.AsyncOpenAI) -> None:
    events = []
    async with sdk.chat.completions.stream(model="tiny", messages=HI, tools=TOOLS) as stream:
        async for event in stream:
            events.append(event.type)
        reply = await stream.get_final_completion()
    assert told(reply.choices[0].message) == EXPECTED
    assert reply.choices[0].message.content == "Let me look."
    assert reply.choices[0].finish_reason == "tool_calls"
    assert events.count("tool_calls.function.arguments.done") == 2
    assert events.count("tool_calls.function.arguments.delta") > 2


async def test_a_round_trip_with_results(sdk: openai.AsyncOpenAI) -> None:
    reply = await sdk.chat.completions.create(model="tiny", messages=HI, tools=TOOLS)
    message = reply.choices[0].message
    assert message.tool_calls
    results = [
        {"role": "tool", "tool_call_id": call.id, "content": content}
        for call, content in zip(message.tool_calls, ["rain", "noon"], strict=True)
    ]
    conversation = [*HI, message.model_dump(), *results]
    reply = await sdk.chat.completions.create(model="tiny", messages=conversation, tools=TOOLS)
    assert reply.choices[0].message.content == "It is rain and noon."
    assert reply.choices[0].message.tool_calls is None
    assert reply.choices[0].finish_reason == "stop"


async def test_what_the_sdk_derives_from_a_model_is_taken(sdk: openai.AsyncOpenAI) -> None:
    class GetWeather(pydantic.BaseModel):
        """Weather of a city."""

        city: str
        unit: Literal["C", "F"] | None = None

    tool = openai.pydantic_function_tool(GetWeather, name="get_weather")
    reply = await sdk.chat.completions.parse(model="tiny", messages=HI, tools=[tool])
    [call] = reply.choices[0].message.tool_calls or ()
    assert call.function.parsed_arguments == GetWeather(city="Paris")


async def test_errors_name_the_field(sdk: openai.AsyncOpenAI) -> None:
    with pytest.raises(openai.BadRequestError) as caught:
        await sdk.chat.completions.create(model="tiny", messages=HI, tool_choice="required")
    assert caught.value.param == "tool_choice"
