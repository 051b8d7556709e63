"""Tools over HTTP: what the model is told, what it may write, and what the client gets of it."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from typing import Any

import pytest

from cluster.config import RouterConfig
from cluster.grammar import GrammarKind, GrammarSpec
from cluster.types import ModelCard
from router.tokenizer import Tokenizer
from router.tools.call_format import HERMES, LLAMA3_JSON, format_of_template
from tests.router.deployment import Deployment, deploy
from tests.router.sse import events
from tests.support.polling import eventually
from tests.support.scripted_verifier import ScriptedVerifier, make_card, saying
from tests.support.tools import HERMES_TEMPLATE, TIME, TOOLS, WEATHER, thinking_card

NAMED = {"type": "function", "function": {"name": "get_weather"}}
PARIS = '{"city": "Paris"}'
WEATHER_CALL = HERMES.write("get_weather", PARIS)
TIME_CALL = HERMES.write("get_time", "{}")
BOTH = f"Let me look.\n{WEATHER_CALL}\n{TIME_CALL}"


@asynccontextmanager
async def saying_model(
    text: str, card: ModelCard | None = None, **config: Any
) -> AsyncIterator[Deployment]:
    """A router whose model says `text`."""
    card = replace(card or make_card(), max_model_len=8192)
    verifier = ScriptedVerifier(saying(text), card=card)
    async with deploy(config=RouterConfig(**config)) as deployment:
        deployment.service.serve_model(card)
        await deployment.add(verifier)
        yield deployment


def prompt_of(deployment: Deployment) -> str:
    request = deployment.verifier.submitted[-1]
    tokenizer = Tokenizer(deployment.verifier.card)
    return tokenizer.decode(request.prompt_ids, skip_special_tokens=False)


def grammar_of(deployment: Deployment) -> GrammarSpec | None:
    return deployment.verifier.submitted[-1].grammar


async def answer(deployment: Deployment, **fields: Any) -> dict[str, Any]:
    """The one choice, told without the calls' ids."""
    response = await deployment.chat(**fields)
    assert response.status_code == 200, response.text
    choice: dict[str, Any] = response.json()["choices"][0]
    for call in choice["message"].get("tool_calls", []):
        assert call.pop("id").startswith("call_")
    return choice


async def streamed(deployment: Deployment, **fields: Any) -> dict[str, Any]:
    """The same put together from a stream."""
    response = await deployment.chat(stream=True, **fields)
    assert response.status_code == 200, response.text
    message: dict[str, Any] = {"role": None, "content": None, "refusal": None}
    finish_reason = None
    for chunk in events(response.text)[:-1]:
        [choice] = chunk["choices"]
        delta = choice["delta"]
        message["role"] = delta.get("role", message["role"])
        for field in ("content", "reasoning_content"):
            if delta.get(field):
                message[field] = (message.get(field) or "") + delta[field]
        for call in delta.get("tool_calls", []):
            calls = message.setdefault("tool_calls", [])
            if call["index"] == len(calls):
                assert call["id"].startswith("call_")
                assert call["type"] == "function"
                calls.append({"type": "function", "function": {**call["function"]}})
            else:
                assert call.keys() == {"index", "function"}
                assert call["function"].keys() == {"arguments"}
                calls[call["index"]]["function"]["arguments"] += call["function"]["arguments"]
        assert finish_reason is None, "nothing follows the end"
        finish_reason = choice["finish_reason"]
    return {"index": 0, "message": message, "logprobs": None, "finish_reason": finish_reason}


async def test_text_and_calls_come_apart() -> None:
    async with saying_model(BOTH) as deployment:
        choice = await answer(deployment, tools=TOOLS)
    functions = [call["function"] for call in choice["message"]["tool_calls"]]
    assert functions == [
        {"name": "get_weather", "arguments": PARIS},
        {"name": "get_time", "arguments": "{}"},
    ]
    assert choice["message"]["content"] == "Let me look."
    assert choice["finish_reason"] == "tool_calls"


async def test_a_stream_in_blocks_tells_what_the_whole_reply_tells() -> None:
    async with saying_model("") as deployment:
        for text in (BOTH, WEATHER_CALL, "1 < 2", WEATHER_CALL + TIME_CALL + "\n"):
            for size in (1, 2, 5, 9):
                deployment.verifier.script = saying(text, size)
                whole = await answer(deployment, tools=TOOLS)
                assert await streamed(deployment, tools=TOOLS) == whole


async def test_reasoning_has_a_field_of_its_own() -> None:
    text = f"<think>\nParis <tool_call>?\n</think>\n\n{BOTH}"
    async with saying_model("", thinking_card()) as deployment:
        for size in (1, 3, 6):
            deployment.verifier.script = saying(text, size)
            whole = await answer(deployment, tools=TOOLS)
            assert await streamed(deployment, tools=TOOLS) == whole
    assert whole["message"]["reasoning_content"] == "Paris <tool_call>?"
    assert whole["message"]["content"] == "Let me look."
    assert len(whole["message"]["tool_calls"]) == 2


REASONING = "<think>\nParis?\n</think>"


@pytest.mark.parametrize(
    ("text", "reasoning"),
    [
        (f"{REASONING}\n\nYes.", REASONING),
        (f"\n{REASONING}", f"\n{REASONING}"),
        ("<think>\nNever ends", "<think>\nNever ends<|im_end|>"),
        (f"Yes. {REASONING}", ""),
        ("Yes. </think> No.", ""),
    ],
)
async def test_tokens_of_reasoning_are_counted(text: str, reasoning: str) -> None:
    card = thinking_card()
    tokenizer = Tokenizer(card)
    async with saying_model("", card) as deployment:
        for size in (1, 3, 6):
            deployment.verifier.script = saying(text, size, card=card)
            usage = (await deployment.chat("hi")).json()["usage"]
            count = usage["completion_tokens_details"]["reasoning_tokens"]
            assert count == len(tokenizer.encode_rendered(reasoning))


@pytest.mark.parametrize("size", [1, 3, 8])
async def test_reasoning_in_a_block_that_crosses_the_cap_is_counted_up_to_it(size: int) -> None:
    card = thinking_card()
    async with saying_model("", card) as deployment:
        deployment.verifier.script = saying("<think>\n" + "hmm " * 90, size, card=card)
        usage = (await deployment.chat("hi", max_tokens=62)).json()["usage"]
    assert usage["completion_tokens"] == 62
    assert usage["completion_tokens_details"]["reasoning_tokens"] == 62


async def test_thinking_that_the_prompt_opened_counts_from_the_first_token() -> None:
    template = HERMES_TEMPLATE.replace("assistant\n'", "assistant\n<think>\n'")
    card = thinking_card(chat_template=template)
    async with saying_model("", card) as deployment:
        deployment.verifier.script = saying("hm</think>Yes.", card=card)
        usage = (await deployment.chat("hi")).json()["usage"]
    reasoning = Tokenizer(card).encode_rendered("hm</think>")
    assert usage["completion_tokens_details"]["reasoning_tokens"] == len(reasoning)


async def test_tokenize_tells_of_tools_and_template_variables_as_a_completion_does() -> None:
    fields = {
        "messages": CONVERSATION,
        "tools": TOOLS,
        "chat_template_kwargs": {"enable_thinking": False},
    }
    for card in (make_card(), thinking_card()):
        async with saying_model("ok", card) as deployment:
            told = await deployment.client.post("/tokenize", json=fields)
            body = {"model": "tiny", **fields}
            await deployment.client.post("/v1/chat/completions", json=body)
            assert tuple(told.json()["tokens"]) == deployment.verifier.submitted[-1].prompt_ids
            for name in ("tools", "chat_template_kwargs"):
                refused = await deployment.client.post(
                    "/tokenize", json={"prompt": "x", name: fields[name]}
                )
                assert refused.status_code == 400
                assert refused.json()["error"]["param"] == name


FINISHES: list[tuple[dict[str, Any], str, str]] = [
    ({"tool_choice": "required"}, WEATHER_CALL, "tool_calls"),
    ({"tool_choice": NAMED}, WEATHER_CALL, "stop"),
    ({"tool_choice": "auto"}, WEATHER_CALL, "tool_calls"),
    ({}, "Hello", "stop"),
    ({"max_tokens": 40}, WEATHER_CALL, "length"),
]


async def test_finish_reasons_are_openai_s() -> None:
    async with saying_model("") as deployment:
        for fields, text, reason in FINISHES:
            deployment.verifier.script = saying(text)
            for tell in (answer, streamed):
                choice = await tell(deployment, tools=TOOLS, **fields)
                assert choice["finish_reason"] == reason


async def test_a_call_cut_at_max_tokens_is_told_as_far_as_it_came() -> None:
    async with saying_model(WEATHER_CALL) as deployment:
        choice = await answer(deployment, tools=TOOLS, max_tokens=53)
    [call] = choice["message"]["tool_calls"]
    assert PARIS.startswith(call["function"]["arguments"])
    assert call["function"]["arguments"] != PARIS
    assert choice["message"]["content"] is None


async def test_without_tools_a_call_is_content() -> None:
    async with saying_model(WEATHER_CALL) as deployment:
        for fields in ({}, {"tools": TOOLS, "tool_choice": "none"}, {"tools": []}):
            choice = await answer(deployment, **fields)
            assert choice["message"]["content"] == WEATHER_CALL
            assert "tool_calls" not in choice["message"]
            assert choice["finish_reason"] == "stop"
            assert grammar_of(deployment) is None
            assert "get_time" not in prompt_of(deployment)


async def test_each_choice_has_its_own_calls() -> None:
    async with saying_model(WEATHER_CALL) as deployment:
        choices = (await deployment.chat(tools=TOOLS, n=3)).json()["choices"]
    ids = {choice["message"]["tool_calls"][0]["id"] for choice in choices}
    assert len(ids) == 3


async def test_llama_s_calls() -> None:
    weather = LLAMA3_JSON.write("get_weather", PARIS)
    async with saying_model(weather, tool_call_format="llama3_json") as deployment:
        whole = await answer(deployment, tools=TOOLS)
        assert await streamed(deployment, tools=TOOLS) == whole
        assert LLAMA3_JSON.before_name in prompt_of(deployment)
        response = await deployment.chat(
            tools=TOOLS, response_format={"type": "json_object"}, tool_choice="auto"
        )
        assert response.json()["error"]["param"] == "response_format"
    [call] = whole["message"]["tool_calls"]
    assert call["function"] == {"name": "get_weather", "arguments": PARIS}


TEMPLATES: list[tuple[str, str | None]] = [
    ('<tool_call>\\n{\\"name\\": <name>, \\"arguments\\": <json>}\\n</tool_call>', "hermes"),
    ('<|start_header_id|> {"name": function name, "parameters": dictionary}', "llama3_json"),
    ("<tool_call>\n<function=name>\n<parameter=a>", None),
    ('[TOOL_CALLS] [{"name": "f", "arguments": {}}]', None),
    ('[AVAILABLE_TOOLS] {"name": "f", "parameters": {}}', None),
]


@pytest.mark.parametrize(("source", "name"), TEMPLATES)
def test_the_format_is_seen_from_the_template(source: str, name: str | None) -> None:
    found = format_of_template(source)
    assert (found and found.name) == name


# --- what the model is told ---------------------------------------------------------------------

CONVERSATION = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": "Weather and time?"},
    {
        "role": "assistant",
        "content": None,
        "tool_calls": [
            {
                "id": "call_1",
                "type": "function",
                "function": {"name": "get_weather", "arguments": PARIS},
            },
            {"id": "call_2", "type": "function", "function": {"name": "get_time", "arguments": ""}},
        ],
    },
    {"role": "tool", "tool_call_id": "call_1", "content": "rain"},
    {"role": "tool", "tool_call_id": "call_2", "content": [{"type": "text", "text": "noon"}]},
]


async def test_a_template_that_knows_no_tools_gets_them_as_text() -> None:
    async with saying_model("ok") as deployment:
        body = {"model": "tiny", "messages": CONVERSATION, "tools": TOOLS}
        response = await deployment.client.post("/v1/chat/completions", json=body)
        assert response.status_code == 200, response.text
        prompt = prompt_of(deployment)
    system, user, assistant, results, _ = prompt.split("<|im_end|>")
    assert system.startswith("<|im_start|>system\nBe brief.\n\n")
    assert json.dumps(WEATHER) in system
    assert json.dumps(TIME) in system
    assert user.endswith("Weather and time?")
    assert assistant.endswith(f"{WEATHER_CALL}\n{HERMES.write('get_time', '{}')}")
    assert "<|im_start|>user\n" in results
    assert results.endswith(
        "<tool_response>\nrain\n</tool_response>\n<tool_response>\nnoon\n</tool_response>"
    )


async def test_a_template_that_knows_tools_gets_them_as_such() -> None:
    card = thinking_card()
    async with saying_model("ok", card) as deployment:
        body = {"model": "tiny", "messages": CONVERSATION, "tools": TOOLS}
        response = await deployment.client.post("/v1/chat/completions", json=body)
        assert response.status_code == 200, response.text
        prompt = prompt_of(deployment)
    assert f"{json.dumps(WEATHER)}\n{json.dumps(TIME)}\n<|im_end|>" in prompt
    assert f'"arguments": {PARIS}' in prompt, "arguments are an object for the template"
    assert "<|im_start|>tool\n[get_weather] rain" in prompt, "a result names its function"


async def test_arguments_that_are_no_object_stay_text() -> None:
    card = thinking_card()
    deep = '{"a":' * 900 + "1" + "}" * 900
    async with saying_model("ok", card) as deployment:
        for arguments in ('{"city": "Par', "[1]", '{"a": 1e999}', "[" * 100_000, deep):
            call = {**CONVERSATION[2]["tool_calls"][0]}  # type: ignore[index]
            call["function"] = {"name": "get_weather", "arguments": arguments}
            messages = [{"role": "assistant", "content": "", "tool_calls": [call]}]
            body = {"model": "tiny", "messages": messages, "tools": TOOLS}
            response = await deployment.client.post("/v1/chat/completions", json=body)
            assert response.status_code in (200, 400), response.text
            if response.status_code == 400:  # Longer than the window.
                assert response.json()["error"]["param"] == "messages"


async def test_thinking_can_be_turned_off() -> None:
    async with saying_model('{"a": 1}', thinking_card()) as deployment:
        schema = {"type": "json_object"}
        await answer(deployment, response_format=schema)
        grammar = grammar_of(deployment)
        assert grammar is not None
        assert "think" in grammar.text
        await answer(
            deployment, response_format=schema, chat_template_kwargs={"enable_thinking": False}
        )
        assert grammar_of(deployment) == GrammarSpec(GrammarKind.JSON_OBJECT)
        assert prompt_of(deployment).endswith("<think>\n\n</think>\n\n")


async def test_a_schema_that_is_not_strict_may_be_too_much() -> None:
    odd = {"type": "object", "properties": {"a": {"type": "string", "pattern": "(?=x)y"}}}
    tool = {"type": "function", "function": {"name": "odd", "parameters": odd}}
    strict = {"type": "function", "function": {**tool["function"], "strict": True}}  # type: ignore[dict-item]
    async with saying_model("ok") as deployment:
        await answer(deployment, tools=[WEATHER, tool])
        grammar = grammar_of(deployment)
        assert grammar is not None
        assert "(?=x)" not in grammar.text
        assert '"maxLength": 8' in grammar.text, "the other one is still held to its schema"
        response = await deployment.chat(tools=[WEATHER, strict])
        assert response.json()["error"]["param"] == "tools[1].function.parameters"


# --- what is refused ----------------------------------------------------------------------------


def function(**fields: Any) -> dict[str, Any]:
    return {"type": "function", "function": {"name": "f", **fields}}


def called(**fields: Any) -> list[dict[str, Any]]:
    return [{"role": "user", "content": "hi"}, {"role": "assistant", "content": None, **fields}]


BAD: list[tuple[dict[str, Any], str]] = [
    ({"tools": "get_time"}, "tools"),
    ({"tools": [{"type": "function"}]}, "tools[0].function"),
    ({"tools": [{"type": "retrieval", "function": {"name": "f"}}]}, "tools[0].type"),
    ({"tools": [function(name="")]}, "tools[0].function.name"),
    ({"tools": [function(name="get weather")]}, "tools[0].function.name"),
    ({"tools": [function(name="f" * 65)]}, "tools[0].function.name"),
    ({"tools": [function(name="f\n")]}, "tools[0].function.name"),
    ({"tools": [function(), function()]}, "tools[1].function.name"),
    ({"tools": [function(x=1)]}, "tools[0].function.x"),
    ({"tools": [function(parameters=[])]}, "tools[0].function.parameters"),
    ({"tools": [function(parameters={"type": "array"})]}, "tools[0].function.parameters.type"),
    ({"tools": [function(strict="yes")]}, "tools[0].function.strict"),
    (
        {"tools": [function(strict=True, parameters={"properties": {"a": {"type": 7}}})]},
        "tools[0].function.parameters",
    ),
    (
        {"tools": [function(parameters={"description": "x" * (1 << 17)})]},
        "tools[0].function.parameters",
    ),
    (
        {"tools": [function(parameters={"x-guidance": {}})]},
        "tools[0].function.parameters.x-guidance",
    ),
    ({"tools": [function(name=f"f{index}") for index in range(129)]}, "tools"),
    ({"tool_choice": "required"}, "tool_choice"),
    ({"tool_choice": NAMED}, "tool_choice"),
    ({"tools": TOOLS, "tool_choice": "any"}, "tool_choice"),
    ({"tools": TOOLS, "tool_choice": {"type": "function"}}, "tool_choice.function"),
    (
        {"tools": TOOLS, "tool_choice": {"type": "function", "function": {"name": "f"}}},
        "tool_choice.function.name",
    ),
    (
        {
            "tools": TOOLS,
            "tool_choice": {
                "type": "allowed_tools",
                "allowed_tools": {"mode": "auto", "tools": [function()]},
            },
        },
        "tool_choice.allowed_tools.tools[0].function.name",
    ),
    ({"tools": TOOLS, "parallel_tool_calls": "no"}, "parallel_tool_calls"),
    ({"tools": TOOLS, "ignore_eos": True}, "ignore_eos"),
    ({"functions": [{"name": "f"}]}, "functions"),
    ({"function_call": "auto"}, "function_call"),
    ({"chat_template_kwargs": {"tools": True}}, "chat_template_kwargs.tools"),
    ({"chat_template_kwargs": {"a": [1]}}, "chat_template_kwargs.a"),
    ({"messages": [{"role": "tool", "content": "x"}]}, "messages[0].tool_call_id"),
    ({"messages": [{"role": "function", "name": "f", "content": "x"}]}, "messages[0].role"),
    ({"messages": called(tool_calls=[{"id": "1"}])}, "messages[1].tool_calls[0].type"),
    (
        {"messages": called(tool_calls=[{"id": "1", "type": "function", "function": {}}])},
        "messages[1].tool_calls[0].function.name",
    ),
]


async def test_bad_requests_name_the_field() -> None:
    async with saying_model("ok") as deployment:
        for fields, param in BAD:
            body = {"model": "tiny", "messages": [{"role": "user", "content": "hi"}], **fields}
            response = await deployment.client.post("/v1/chat/completions", json=body)
            assert response.status_code == 400, (fields, response.text)
            assert response.json()["error"]["param"] == param, response.text
        await eventually(lambda: deployment.is_idle)
        assert not deployment.verifier.submitted


async def test_a_template_with_calls_of_its_own_form_is_refused_until_told() -> None:
    card = thinking_card(chat_template=HERMES_TEMPLATE.replace("<tool_call>", "[CALL]"))
    async with saying_model("ok", card) as deployment:
        response = await deployment.chat(tools=TOOLS)
        assert response.json()["error"]["param"] == "tools"
        assert "tool_call_format" in response.json()["error"]["message"]
        assert (await deployment.chat()).status_code == 200
    async with saying_model(WEATHER_CALL, card, tool_call_format="hermes") as deployment:
        assert (await answer(deployment, tools=TOOLS))["finish_reason"] == "tool_calls"


async def test_the_documentation_describes_the_fields() -> None:
    async with saying_model("ok") as deployment:
        document = (await deployment.client.get("/openapi.json")).json()
    path = document["paths"]["/v1/chat/completions"]["post"]
    properties = path["requestBody"]["content"]["application/json"]["schema"]["properties"]
    [tools] = [arm for arm in properties["tools"]["anyOf"] if arm["type"] == "array"]
    assert tools["maxItems"] == 128
    function_schema = tools["items"]["properties"]["function"]
    assert function_schema["properties"]["name"]["pattern"] == "^[a-zA-Z0-9_-]{1,64}$"
    assert "allowed_tools" in json.dumps(properties["tool_choice"])
    assert properties["functions"]["deprecated"]
