"""Whatever a client sends: an error in OpenAI's shape that names the field, and nothing held."""

from __future__ import annotations

import json
from contextlib import AbstractAsyncContextManager
from typing import Any

import httpx
import pytest

from cluster.config import LimitsConfig, RouterConfig
from router.schema import ChatCompletionRequest, CompletionRequest
from tests.router.deployment import Deployment, deploy
from tests.support.polling import eventually
from tests.support.scripted_verifier import ScriptedVerifier, saying

HI = [{"role": "user", "content": "hi"}]
NESTED = "[" * 40 + "]" * 40


def chat(**fields: Any) -> dict[str, Any]:
    return {"model": "tiny", "messages": HI, **fields}


def messages(*items: Any) -> dict[str, Any]:
    return {"model": "tiny", "messages": list(items)}


# What is wrong, (status, param), for POST /v1/chat/completions.
CHAT: list[tuple[Any, int, str | None]] = [
    (b"", 400, None),
    (b"{", 400, None),
    (b'{"model": "tiny"', 400, None),
    (b"[]", 400, None),
    (b"null", 400, None),
    (b'"text"', 400, None),
    (b"\xff\xfe", 400, None),
    (b'{"model": NaN}', 400, None),
    (b'{"model": "tiny", "messages": [], "temperature": 1e999}', 400, "temperature"),
    (b'{"model": "tiny", "model": "tiny"}', 400, "model"),
    (b'{"model": "tiny", "seed": ' + b"9" * 5000 + b"}", 400, None),
    (f'{{"model": "tiny", "metadata": {NESTED}}}'.encode(), 400, None),
    (b'{"a":' * 100_000, 400, None),
    (b'{"model": "tiny", "messages": [{"role": "user", "content": "\\ud83d"}]}', 400, None),
    ({f"k{index}": 0 for index in range(5000)}, 400, None),
    ({"model": "tiny", "metadata": {f"k{index}": "" for index in range(5000)}}, 400, None),
    ({}, 400, "model"),
    ({"model": "tiny"}, 400, "messages"),
    ({"model": "other", "messages": HI}, 404, "model"),
    ({"model": 5, "messages": HI}, 400, "model"),
    ({"model": None, "messages": HI}, 400, "model"),
    (messages(), 400, "messages"),
    ({"model": "tiny", "messages": "hi"}, 400, "messages"),
    (messages("hi"), 400, "messages[0]"),
    (messages({"role": "robot", "content": "hi"}), 400, "messages[0].role"),
    (messages({"content": "hi"}), 400, "messages[0].role"),
    (messages({"role": "user"}), 400, "messages[0].content"),
    (messages({"role": "user", "content": None}), 400, "messages[0].content"),
    (messages({"role": "assistant", "content": None}), 400, "messages[0].content"),
    (messages({"role": "user", "content": 5}), 400, "messages[0].content"),
    (messages({"role": "user", "content": "hi", "x": 1}), 400, "messages[0].x"),
    (
        messages(
            {"role": "user", "content": [{"type": "image_url", "image_url": {"url": "http://x"}}]}
        ),
        400,
        "messages[0].content[0].type",
    ),
    (messages({"role": "user", "content": "a " * 600}), 400, "messages"),
    (chat(unknown_field=1), 400, "unknown_field"),
    (chat(temperature="hot"), 400, "temperature"),
    (chat(temperature=-0.1), 400, "temperature"),
    (chat(temperature=2.1), 400, "temperature"),
    (chat(temperature=True), 400, "temperature"),
    (chat(top_p=0), 400, "top_p"),
    (chat(top_p=1.1), 400, "top_p"),
    (chat(top_k=-2), 400, "top_k"),
    (chat(top_k=2.5), 400, "top_k"),
    (chat(max_tokens=0), 400, "max_tokens"),
    (chat(max_tokens=-1), 400, "max_tokens"),
    (chat(max_tokens=1.5), 400, "max_tokens"),
    (chat(max_tokens=10**6), 400, "max_tokens"),
    (chat(max_completion_tokens=10**6), 400, "max_completion_tokens"),
    (chat(max_tokens=5, max_completion_tokens=6), 400, "max_completion_tokens"),
    (chat(n=0), 400, "n"),
    (chat(n=2**31), 400, "n"),
    (chat(n=9), 400, "n"),
    (chat(stop=""), 400, "stop"),
    (chat(stop=["a", ""]), 400, "stop[1]"),
    (chat(stop=["a"] * 5), 400, "stop"),
    (chat(stop="x" * 65), 400, "stop"),
    (chat(stop=[1]), 400, "stop[0]"),
    (chat(stop_token_ids=[-1]), 400, "stop_token_ids[0]"),
    (chat(stop_token_ids=[10**6]), 400, "stop_token_ids"),
    (chat(seed=2**64), 400, "seed"),
    (chat(seed="x"), 400, "seed"),
    (chat(stream="yes"), 400, "stream"),
    (chat(stream_options={"include_usage": True}), 400, "stream_options"),
    (chat(stream=True, stream_options={"usage": True}), 400, "stream_options.usage"),
    (
        chat(stream=True, stream_options={"include_obfuscation": True}),
        400,
        "stream_options.include_obfuscation",
    ),
    (chat(cache_salt=""), 400, "cache_salt"),
    (chat(cache_salt="x" * 257), 400, "cache_salt"),
    (chat(cache_salt=5), 400, "cache_salt"),
    (chat(speculation={"mode": "maybe"}), 400, "speculation.mode"),
    (chat(speculation={"num_speculative_tokens": 65}), 400, "speculation.num_speculative_tokens"),
    (chat(speculation={"drafter": "medusa"}), 400, "speculation.drafter"),
    (chat(speculation="on"), 400, "speculation"),
    (chat(presence_penalty=3), 400, "presence_penalty"),
    (chat(repetition_penalty=0), 400, "repetition_penalty"),
    (chat(min_tokens=30, max_tokens=20, ignore_eos=True), 400, "min_tokens"),
    (chat(logit_bias={"5": 101}), 400, "logit_bias.5"),
    (chat(logit_bias={"five": 1}), 400, "logit_bias"),
    (chat(logit_bias={"-5": 1}), 400, "logit_bias"),
    (chat(logit_bias={"7": 1, "07": 2}), 400, "logit_bias"),
    (chat(logit_bias={"99999": 1}), 400, "logit_bias"),
    (chat(logit_bias={str(i): 1 for i in range(1025)}), 400, "logit_bias"),
    (chat(frequency_penalty=-2.1), 400, "frequency_penalty"),
    (chat(min_p=1.5), 400, "min_p"),
    (chat(bad_words=[""]), 400, "bad_words[0]"),
    (chat(bad_words="no"), 400, "bad_words"),
    (chat(logprobs=5), 400, "logprobs"),
    (chat(logprobs=True, top_logprobs=21), 400, "top_logprobs"),
    (chat(top_logprobs=5), 400, "top_logprobs"),
    (chat(tools=[{"type": "function"}]), 400, "tools[0].function"),
    (chat(tool_choice="required"), 400, "tool_choice"),
    (chat(prediction="x"), 400, "prediction"),
    (chat(prediction={"content": "x"}), 400, "prediction.type"),
    (chat(prediction={"type": "content"}), 400, "prediction.content"),
    (chat(prediction={"type": "text", "content": "x"}), 400, "prediction.type"),
    (chat(prediction={"type": "content", "content": None}), 400, "prediction.content"),
    (
        chat(prediction={"type": "content", "content": [{"type": "image_url"}]}),
        400,
        "prediction.content[0].type",
    ),
    (chat(prediction={"type": "content", "content": "x" * 513}), 400, "prediction.content"),
    (chat(priority=1 << 31), 400, "priority"),
    (chat(priority="high"), 400, "priority"),
    (chat(service_tier="gold"), 400, "service_tier"),
    (chat(chat_template="{{ 1 }}"), 400, "chat_template"),
]


def complete(**fields: Any) -> dict[str, Any]:
    return {"model": "tiny", "prompt": "hi", **fields}


COMPLETIONS: list[tuple[Any, int, str | None]] = [
    ({"model": "tiny"}, 400, "prompt"),
    (complete(prompt=""), 400, "prompt"),
    (complete(prompt=[]), 400, "prompt"),
    (complete(prompt=[[]]), 400, "prompt[0]"),
    (complete(prompt=["hi", ""]), 400, "prompt"),
    (complete(prompt=["hi", 5]), 400, "prompt[1]"),
    (complete(prompt=[5, "hi"]), 400, "prompt[1]"),
    (complete(prompt=[5, -1]), 400, "prompt[1]"),
    (complete(prompt=[10**6]), 400, "prompt"),
    (complete(prompt=[2**70]), 400, "prompt[0]"),
    (complete(prompt=[[5], [10**6]]), 400, "prompt"),
    (complete(prompt=[5] * 512), 400, "prompt"),
    (complete(prompt=["hi"] * 33), 400, "prompt"),
    (complete(best_of=2), 400, "best_of"),
    (complete(logprobs=True), 400, "logprobs"),
    (complete(logprobs=21), 400, "logprobs"),
    (complete(logprobs=21, echo=True), 400, "logprobs"),
    (complete(max_tokens=0), 400, "max_tokens"),
    (complete(cache_salt="x" * 257), 400, "cache_salt"),
    (complete(suffix="x"), 400, "suffix"),
    (complete(messages=HI), 400, "messages"),
    (complete(max_tokens=512), 400, "max_tokens"),
]


def content_of(body: Any) -> bytes:
    return body if isinstance(body, bytes) else json.dumps(body).encode()


def check_error(response: httpx.Response, status: int, param: str | None) -> None:
    assert (response.status_code, response.json()["error"]["param"]) == (status, param), (
        response.text
    )
    error = response.json()["error"]
    assert error.keys() == {"message", "type", "param", "code"}
    assert error["type"] == "invalid_request_error"
    assert error["message"]


async def check_unharmed(deployment: Deployment) -> None:
    await eventually(lambda: deployment.is_idle)
    assert (await deployment.chat()).status_code == 200


async def test_bad_chat_requests(deployment: Deployment) -> None:
    for body, status, param in CHAT:
        response = await deployment.client.post("/v1/chat/completions", content=content_of(body))
        check_error(response, status, param)
        await check_unharmed(deployment)
    assert len(deployment.verifier.submitted) == len(CHAT)  # the good ones only


async def test_bad_completion_requests(deployment: Deployment) -> None:
    for body, status, param in COMPLETIONS:
        response = await deployment.client.post("/v1/completions", content=content_of(body))
        check_error(response, status, param)
        await check_unharmed(deployment)


NEUTRAL: dict[str, Any] = {
    "presence_penalty": 0,
    "frequency_penalty": 0.0,
    "repetition_penalty": 1,
    "min_p": 0,
    "min_tokens": 0,
    "logprobs": False,
    "top_logprobs": 0,
    "logit_bias": {},
    "bad_words": [],
    "priority": 3,
    "response_format": {"type": "text"},
    "tools": [],
    "tool_choice": "none",
    "parallel_tool_calls": True,
    "service_tier": "flex",
    "store": True,
    "metadata": {"a": "b"},
    "user": "me",
    "safety_identifier": "x",
    "prompt_cache_key": "y",
    "top_k": -1,
    "top_p": 1,
    "stop": [],
    "stop_token_ids": [],
    "max_completion_tokens": 50,
    "max_tokens": 50,
}


async def test_fields_that_change_nothing_are_taken(deployment: Deployment) -> None:
    for name, value in NEUTRAL.items():
        response = await deployment.chat(**{name: value})
        assert response.status_code == 200, (name, response.text)
    assert (await deployment.chat(**NEUTRAL)).status_code == 200
    load_tool = {"ignore_eos": True, "min_tokens": 4, "max_tokens": 4}
    assert (await deployment.chat(**load_tool)).status_code == 200
    assert (await deployment.complete(best_of=2, n=2)).status_code == 200


async def test_null_means_absent_for_every_optional_field(deployment: Deployment) -> None:
    for schema, send in (
        (ChatCompletionRequest, deployment.chat),
        (CompletionRequest, deployment.complete),
    ):
        optional = [name for name, f in schema.model_fields.items() if not f.is_required()]
        response = await send(**dict.fromkeys(optional))
        assert response.status_code == 200, response.text
    speculation = dict.fromkeys(("mode", "num_speculative_tokens", "drafter", "trace"))
    assert (await deployment.chat(speculation=speculation)).status_code == 200


async def test_unusual_text_is_text(deployment: Deployment) -> None:
    for text in ("\0", "\ufffd", "\u2028", "🙂" * 20, "\ud83d\ude42", "a\r\nb"):
        body = json.dumps(chat(messages=[{"role": "user", "content": text}]))
        response = await deployment.client.post("/v1/chat/completions", content=body)
        assert response.status_code == 200, response.text


# --- size ---


def small_deployment() -> AbstractAsyncContextManager[Deployment]:
    return deploy(
        ScriptedVerifier(saying("ok")), config=RouterConfig(limits=LimitsConfig(max_body_bytes=400))
    )


async def test_a_body_over_the_limit_is_refused_by_its_announced_length() -> None:
    async with small_deployment() as deployment:
        response = await deployment.chat("x" * 500)
        check_error(response, 413, None)
        await check_unharmed(deployment)


async def test_a_body_over_the_limit_is_refused_while_it_comes() -> None:
    sent = 0

    async def endless_body() -> Any:
        nonlocal sent
        for _ in range(10_000):
            sent += 100
            yield b" " * 100

    async with small_deployment() as deployment:
        response = await deployment.client.post("/v1/chat/completions", content=endless_body())
        check_error(response, 413, None)
        await check_unharmed(deployment)


# --- routes and headers ---


async def test_unknown_routes_and_methods(deployment: Deployment) -> None:
    for method, path, status in (
        ("GET", "/nope", 404),
        ("POST", "/v1/models", 405),
        ("GET", "/v1/chat/completions", 405),
        ("GET", "/v1/models/other", 404),
        ("POST", "/v1/embeddings", 404),
    ):
        response = await deployment.client.request(method, path)
        assert response.status_code == status
        assert response.json()["error"]["message"]


async def test_the_request_id_is_echoed_and_never_a_key(deployment: Deployment) -> None:
    headers = {"x-request-id": "bench-1.2_3"}
    for _ in range(2):
        response = await deployment.client.get("/v1/models", headers=headers)
        assert response.headers["x-request-id"] == "bench-1.2_3"
    response = await deployment.client.post("/v1/chat/completions", json=chat(), headers=headers)
    assert response.headers["x-request-id"] == "bench-1.2_3"
    assert "bench" not in deployment.verifier.submitted[-1].request_id
    assert (await deployment.client.get("/v1/models")).headers["x-request-id"]


@pytest.mark.parametrize("request_id", ["x" * 65, "a b", "a/b", "http://x", ""])
async def test_a_bad_request_id_is_refused(deployment: Deployment, request_id: str) -> None:
    headers = {"x-request-id": request_id}
    response = await deployment.client.get("/v1/models", headers=headers)
    check_error(response, 400, "X-Request-ID")
    assert response.headers["x-request-id"] != request_id
