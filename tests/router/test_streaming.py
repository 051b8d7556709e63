"""The shape and the timing of streams, and what is told about speculation."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest

from cluster.config import AdmissionConfig, PathPolicyConfig, RouterConfig
from cluster.load import VerifierLoad
from cluster.types import ErrorEvent, GenerationRequest, Path
from router.schema import ChatCompletionRequest, parse
from router.tokenizer import Tokenizer
from tests.router.deployment import Deployment, deploy
from tests.router.sse import chat_text, events, finish_reasons
from tests.support.polling import eventually
from tests.support.scripted_verifier import (
    ScriptedVerifier,
    Step,
    blocks,
    endless,
    make_card,
    saying,
)

CARD = make_card()


def ids_of(text: str) -> list[int]:
    return list(Tokenizer(CARD).encode(text, add_special_tokens=False))


async def stream(deployment: Deployment, **fields: Any) -> list[Any]:
    response = await deployment.chat(stream=True, **fields)
    assert response.status_code == 200
    assert response.headers["content-type"].startswith("text/event-stream")
    return events(response.text)


async def test_one_chunk_per_step_the_first_with_the_role_the_last_with_the_reason() -> None:
    block_texts = ["uvw", "xyz", "u"]
    script = [Step(tuple(ids_of(text)), 2) for text in block_texts]
    script[-1] = Step((*script[-1].token_ids, *CARD.eos_token_ids), 1)
    async with deploy(ScriptedVerifier(lambda r: script)) as deployment:
        *chunks, done = await stream(deployment)
    assert done == "[DONE]"
    choices = [chunk["choices"][0] for chunk in chunks]
    assert [choice["delta"]["content"] for choice in choices] == block_texts
    assert [choice["delta"].get("role") for choice in choices] == ["assistant", None, None]
    assert [choice["finish_reason"] for choice in choices] == [None, None, "stop"]
    assert len({chunk["id"] for chunk in chunks}) == 1
    assert all("usage" not in chunk for chunk in chunks)
    assert all(chunk["object"] == "chat.completion.chunk" for chunk in chunks)
    assert ["speculation" in chunk for chunk in chunks] == [False, False, True]


async def test_usage_comes_in_a_chunk_of_its_own_only_if_asked(deployment: Deployment) -> None:
    *chunks, usage, done = await stream(deployment, stream_options={"include_usage": True})
    assert done == "[DONE]"
    assert usage["choices"] == []
    assert usage["usage"]["completion_tokens"] == len(ids_of("the quick brown fox")) + 1
    assert usage["usage"]["prompt_tokens"] == len(deployment.verifier.submitted[-1].prompt_ids)
    assert usage["speculation"]["path"] == "plain"
    assert not any("metrics" in chunk or "speculation" in chunk for chunk in chunks)


async def test_continuous_usage_grows_with_every_chunk(deployment: Deployment) -> None:
    options = {"continuous_usage_stats": True, "include_usage": True}
    *chunks, _ = await stream(deployment, stream_options=options)
    counts = [chunk["usage"]["completion_tokens"] for chunk in chunks]
    assert counts == sorted(counts)
    assert counts[0] == 1


def cached_tokens(body: Any) -> int:
    return int(body["usage"]["prompt_tokens_details"]["cached_tokens"])


@pytest.mark.parametrize("stop", [None, "brown"])
async def test_usage_tells_how_much_of_the_prompts_was_cached(stop: str | None) -> None:
    """Of each prompt what no choice had to compute; known from the first token on, so that a stop
    string does not hide it."""
    counts: list[int] = []

    def script(request: GenerationRequest) -> Iterator[Step]:
        first, *others = blocks(ids_of("the quick brown fox"))
        yield replace(first, num_cached_prompt_tokens=counts.pop(0))
        yield from others

    async with deploy(ScriptedVerifier(script)) as deployment:
        counts[:] = [16]
        assert cached_tokens((await deployment.chat(stop=stop)).json()) == 16
        counts[:] = [16, 32, 8, 0, 5, 7]
        body = (await deployment.complete(["hi", "ho", "ha"], n=2, stop=stop)).json()
        assert cached_tokens(body) == 16 + 0 + 5
        counts[:] = [16]
        options = {"continuous_usage_stats": True, "include_usage": True}
        *chunks, _ = await stream(deployment, stream_options=options, stop=stop)
        assert {cached_tokens(chunk) for chunk in chunks} == {16}


async def test_choices_of_a_stream_are_told_apart(deployment: Deployment) -> None:
    *chunks, done = await stream(deployment, n=3)
    assert done == "[DONE]"
    assert [chat_text(chunks, index) for index in range(3)] == ["the quick brown fox"] * 3
    assert finish_reasons(chunks) == ["stop"] * 3
    firsts = [c["choices"][0] for c in chunks if c["choices"][0]["delta"].get("role")]
    assert sorted(choice["index"] for choice in firsts) == [0, 1, 2]
    assert sum("speculation" in chunk for chunk in chunks) == 1
    assert "speculation" in chunks[-1]


async def test_choices_and_prompts_have_their_own_noise(deployment: Deployment) -> None:
    body = (await deployment.complete(["hi", "ho"], n=3, seed=7)).json()
    assert [choice["index"] for choice in body["choices"]] == list(range(6))
    submitted = deployment.verifier.submitted
    assert len({request.request_key for request in submitted}) == 6
    await deployment.complete(["hi", "ho"], n=3, seed=7)
    again = deployment.verifier.submitted[6:]
    assert [r.request_key for r in again] == [r.request_key for r in submitted[:6]]
    assert len({r.request_id for r in deployment.verifier.submitted}) == 12
    await deployment.complete("hi")
    await deployment.complete("hi")
    assert deployment.verifier.submitted[-1].request_key != submitted[-2].request_key


async def test_fields_arrive_at_the_verifier(deployment: Deployment) -> None:
    deployment.verifier.ready_drafter("ngram")
    await eventually(lambda: bool(deployment.service.pool.load().drafters))
    await deployment.complete(
        [5, 6],
        temperature=0.5,
        top_p=0.9,
        top_k=7,
        max_tokens=3,
        ignore_eos=True,
        stop_token_ids=[9],
        cache_salt="tenant",
        speculation={"mode": "on", "num_speculative_tokens": 4, "drafter": "ngram"},
    )
    request = deployment.verifier.submitted[-1]
    assert request.prompt_ids == (5, 6)
    assert (request.sampling.temperature, request.sampling.top_p, request.sampling.top_k) == (
        0.5,
        0.9,
        7,
    )
    assert (request.max_tokens, request.ignore_eos) == (3, True)
    assert request.stop_token_ids == {9}
    assert (request.path, request.num_speculative_tokens) == (Path.SPECULATIVE, 4)
    assert request.drafter == "ngram"
    assert request.cache_salt == "tenant"
    assert 0 < request.deadline_ms <= 600_000
    await deployment.chat(cache_salt="another")
    assert deployment.verifier.submitted[-1].cache_salt == "another"


async def test_defaults_are_openais(deployment: Deployment) -> None:
    await deployment.complete("hi")
    request = deployment.verifier.submitted[-1]
    assert (request.sampling.temperature, request.sampling.top_p) == (1.0, 1.0)
    assert (request.max_tokens, request.cache_salt) == (16, "")
    await deployment.chat()
    request = deployment.verifier.submitted[-1]
    assert request.max_tokens == CARD.max_model_len - len(request.prompt_ids)


async def test_echo_gives_the_prompt_back(deployment: Deployment) -> None:
    for prompt in ("say: ", list(ids_of("say: "))):
        whole = (await deployment.complete(prompt, echo=True, max_tokens=2)).json()
        streamed = events(
            (await deployment.complete(prompt, echo=True, max_tokens=2, stream=True)).text
        )
        text = "".join(chunk["choices"][0]["text"] for chunk in streamed[:-1])
        assert whole["choices"][0]["text"] == text
        assert text.startswith("say: the")


async def test_the_first_text_leaves_at_once() -> None:
    async with (
        deploy(ScriptedVerifier(endless(), step_s=0.05)) as deployment,
        deployment.service.chat(_request(max_tokens=30)) as reply,
    ):
        started = time.perf_counter()
        times = [time.perf_counter() - started async for _ in reply.deltas()]
    assert times[0] < times[-1] / 2


def _request(**fields: Any) -> ChatCompletionRequest:
    body = {"model": "tiny", "messages": [{"role": "user", "content": "hi"}], **fields}
    return parse(ChatCompletionRequest, body)


# --- what is told about speculation ---


async def test_figures_of_speculation() -> None:
    text = ids_of("uvwxyzuv")
    script = [
        Step(tuple(text[0:1])),  # the prompt's step, without drafts
        Step(tuple(text[1:4]), 4),  # 2 of 4 accepted
        Step(tuple(text[4:5]), 2),  # 0 of 2
        Step((*text[5:8], *CARD.eos_token_ids), 3),  # 3 of 3
    ]
    async with deploy(ScriptedVerifier(lambda r: script)) as deployment:
        body = (await deployment.chat(speculation={"mode": "on"})).json()
        *_, last, _ = await stream(deployment, speculation={"mode": "on", "trace": True})
        server = (await deployment.client.get("/server_info")).json()
    told = body["speculation"]
    assert told["path"] == "speculative"
    assert "speculation.mode on" in told["reason"]
    assert told["drafter"] == "scripted"
    assert (told["num_steps"], told["num_draft_tokens"], told["num_accepted_tokens"]) == (4, 9, 5)
    assert told["acceptance_per_position"] == [0.6667, 0.6667, 0.5, 0.0]
    metrics = body["metrics"]["speculative_decoding"]
    assert metrics["acceptance_histogram"] == [1, 0, 1, 1, 0]
    assert sum(metrics["acceptance_histogram"]) == metrics["num_spec_steps"] == 3
    assert metrics["num_accepted_draft_tokens"] == 5
    assert metrics["num_draft_tokens"] == 9
    assert metrics["mean_acceptance_length"] == pytest.approx(1 + 5 / 3)
    assert "num_spec_tokens" not in metrics
    details = body["usage"]["completion_tokens_details"]
    assert details == {
        "reasoning_tokens": 0,
        "accepted_prediction_tokens": 0,
        "rejected_prediction_tokens": 0,
    }
    assert last["metrics"] == body["metrics"]
    trace = last["choices"][0]["speculation"]
    [[start, end]] = trace.pop("accepted_spans")
    assert last["choices"][0]["delta"]["content"][start:end] == "zuv"
    assert trace == {
        "num_tokens": 4,
        "num_draft_tokens": 3,
        "num_accepted_tokens": 3,
        "refused_token_ids": [],
    }
    assert server["internal_states"][0]["avg_spec_accept_length"] == pytest.approx(1 + 5 / 3)


async def test_without_drafts_the_figures_are_null(deployment: Deployment) -> None:
    body = (await deployment.chat(speculation={"mode": "off"})).json()
    assert body["speculation"]["path"] == "plain"
    assert body["speculation"]["acceptance_per_position"] == []
    assert body["metrics"] == {"speculative_decoding": None}
    assert deployment.verifier.submitted[-1].path is Path.PLAIN


# --- the cluster's mode ---


async def test_running_auto_requests_follow_the_clusters_mode() -> None:
    verifier = ScriptedVerifier(endless(), step_s=0.01)
    verifier.ready_drafter()
    config = RouterConfig(path_policy=PathPolicyConfig(min_dwell_s=0.0, plain_above_running=16))
    async with deploy(verifier, config=config) as deployment:
        await eventually(lambda: deployment.service.policy.mode is Path.SPECULATIVE)
        modes = ("auto", "on", "off")
        tasks = [
            asyncio.create_task(deployment.chat(speculation={"mode": mode}, max_tokens=100))
            for mode in modes
        ]
        await eventually(lambda: len(verifier.submitted) == 3)
        paths = {request.path for request in verifier.submitted[:2]}
        assert paths == {Path.SPECULATIVE}
        verifier.load = VerifierLoad(running=40, drafters=verifier.drafters)
        await eventually(lambda: bool(verifier.set_paths))
        auto = verifier.submitted[0].request_id
        assert [(c.request_id, c.path) for c in verifier.set_paths] == [(auto, Path.PLAIN)]
        bodies = [(await task).json() for task in tasks]
        assert [b["speculation"]["path"] for b in bodies] == ["plain", "speculative", "plain"]
        assert "40.0 running" in bodies[0]["speculation"]["reason"]
        report = (await deployment.client.get("/v1/cluster")).json()
        assert report["mode"] == "plain"
        assert report["verifiers"][0]["running"] == 40
        assert report["drafters"][0]["state"] == "ready"


# --- refusals and errors ---


async def test_no_verifier_is_503_with_retry_after() -> None:
    async with deploy() as deployment:
        for stream_it in (False, True):
            response = await deployment.chat(stream=stream_it)
            assert response.status_code == 503
            assert int(response.headers["retry-after"]) >= 1
            assert response.json()["error"]["code"] == "not_ready"
        assert (await deployment.client.get("/health/live")).status_code == 200
        for path in ("/health", "/health/ready"):
            response = await deployment.client.get(path)
            assert response.status_code == 503
            assert "no verifier" in response.json()["error"]["message"]


async def test_a_full_router_refuses_before_it_tokenizes() -> None:
    config = RouterConfig(admission=AdmissionConfig(max_concurrent_requests=2, retry_after_s=3))
    async with deploy(ScriptedVerifier(endless(), step_s=0.01), config=config) as deployment:
        running = asyncio.create_task(deployment.chat(n=2, max_tokens=30))
        await eventually(lambda: len(deployment.verifier.submitted) == 2)
        response = await deployment.chat("x " * 5000)  # over the window, if it were tokenized
        assert response.status_code == 503
        assert response.headers["retry-after"] == "3"
        assert response.json()["error"]["type"] == "overloaded_error"
        assert (await deployment.chat(n=3)).status_code == 400
        assert (await running).status_code == 200
        assert (await deployment.chat(max_tokens=1)).status_code == 200
        await eventually(lambda: deployment.is_idle)


async def test_an_error_before_the_first_token_has_its_status() -> None:
    error = ErrorEvent("", "InvalidRequestError", "unknown drafter", "speculation.drafter")
    async with deploy(ScriptedVerifier(lambda r: [Step((), error=error)])) as deployment:
        for stream_it in (False, True):
            response = await deployment.chat(stream=stream_it)
            assert response.status_code == 400
            assert response.json()["error"]["param"] == "speculation.drafter"
        await eventually(lambda: deployment.is_idle)


async def test_an_error_after_the_first_byte_is_in_the_stream() -> None:
    error = ErrorEvent("", "OverloadedError", "out of KV")
    script = [*blocks(ids_of("uv")), Step((), error=error)]
    async with deploy(ScriptedVerifier(lambda r: script)) as deployment:
        *chunks, last = await stream(deployment)
        assert chat_text(chunks) == "uv"
        assert last["error"]["message"] == "out of KV"
        assert (await deployment.chat()).status_code == 503
        await eventually(lambda: deployment.is_idle)


@pytest.mark.parametrize("n", [1, 2])
async def test_the_deadline_is_504(n: int) -> None:
    verifier = ScriptedVerifier(endless(), step_s=0.02)
    config = RouterConfig(request_timeout_s=0.5)
    async with deploy(verifier, config=config) as deployment:
        response = await deployment.chat(n=n)
        assert response.status_code == 504
        assert response.headers["x-should-retry"] == "false"
        *chunks, last = await stream(deployment, n=n)
        assert last["error"]["type"] == "timeout_error"
        assert finish_reasons(chunks) == []
        await eventually(lambda: deployment.is_idle)
        assert len(verifier.cancelled) == 2 * n


async def test_a_conversation_with_parts_null_content_and_tool_messages(
    deployment: Deployment,
) -> None:
    first = (await deployment.chat()).json()["choices"][0]["message"]
    call = {"id": "c1", "type": "function", "function": {"name": "f", "arguments": "{}"}}
    conversation = [
        {"role": "developer", "content": "be brief"},
        {"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]},
        {**first, "annotations": [], "audio": None, "function_call": None, "tool_calls": None},
        {"role": "user", "content": "use it", "name": "me"},
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "content": "result", "tool_call_id": "c1"},
        {"role": "user", "content": "and now?"},
    ]
    body = {"model": "tiny", "messages": conversation}
    response = await deployment.client.post("/v1/chat/completions", json=body)
    assert response.status_code == 200, response.text
    prompt = Tokenizer(CARD).decode(
        deployment.verifier.submitted[-1].prompt_ids, skip_special_tokens=False
    )
    assert "<|im_start|>user\nab<|im_end|>" in prompt
    assert "<|im_start|>system\nbe brief" in prompt


async def test_a_large_prompt_does_not_stop_other_streams() -> None:
    async with deploy(ScriptedVerifier(saying("ok"))) as deployment:
        large = asyncio.create_task(deployment.chat("the quick fox " * 100_000))
        await asyncio.sleep(0.02)
        assert (await deployment.client.get("/health/live")).status_code == 200
        assert not large.done(), "the other request had to wait for the large one"
        assert (await large).status_code == 400
