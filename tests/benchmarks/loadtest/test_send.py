"""What is recorded of a request, whatever the server does with it."""

from __future__ import annotations

import asyncio
import json
import time
from dataclasses import replace
from typing import Any

import pytest
from aiohttp import web
from hypothesis import given, settings
from hypothesis import strategies as st

from benchmarks.loadtest.client import Ask, Clock, Target, Watched, http_session, send
from benchmarks.loadtest.prompts import Prompt
from benchmarks.loadtest.record import Outcome, RequestRecord
from tests.benchmarks.loadtest.scripted_server import (
    Exchange,
    Script,
    answering,
    refusal,
    scripted_server,
)
from tests.support.polling import TIMEOUT_S

PROMPT = Prompt(({"role": "user", "content": "hi"},), 8, "chat", session="s-1")
TARGET = Target("", "chat", "scripted", timeout_s=TIMEOUT_S)
ASK = Ask(3, 5, PROMPT, {"temperature": 0}, "salt", 0.0)


async def sent(url: str, target: Target = TARGET, ask: Ask = ASK) -> RequestRecord:
    async with http_session() as session:
        records: list[RequestRecord] = []
        clock = Clock(time.perf_counter())
        record = await send(session, replace(target, url=url), clock, ask, records)
    assert records == [record]
    assert (record.cell, record.index, record.family) == (3, 5, "chat")
    return record


def outcome_of(script: Script, **changes: Any) -> RequestRecord:
    with scripted_server(script) as server:
        return asyncio.run(sent(server.url, replace(TARGET, **changes)))


def test_a_good_answer() -> None:
    spoken = {"path": "plain", "reason": "auto", "num_draft_tokens": 4, "num_accepted_tokens": 2}
    figures = {"speculative_decoding": {"acceptance_histogram": [1, 0, 1]}}
    with scripted_server(answering(4, 2, 0.05, speculation=spoken, metrics=figures)) as server:
        record = asyncio.run(sent(server.url))
    assert record.outcome is Outcome.OK
    assert record.status == 200
    assert record.chunk_tokens == (2, 4, 6, 8)
    assert (record.prompt_tokens, record.cached_tokens, record.output_tokens) == (10, 4, 8)
    assert record.speculation == {**spoken, "num_steps": 0}
    assert record.accepted_histogram == (1, 0, 1)
    assert 0 < record.sent_s < record.chunk_s[0] < record.chunk_s[3] <= record.end_s
    # Three gaps of 50 ms bring the six tokens after the first chunk, which may itself be late.
    assert record.tpot_s is not None
    assert record.tpot_s >= 0.120 / 6
    (body,) = server.bodies
    assert body == {
        "model": "scripted",
        "messages": [{"role": "user", "content": "hi"}],
        "cache_salt": "salt",
        "max_tokens": 8,
        "stream": True,
        "stream_options": {"include_usage": True, "continuous_usage_stats": True},
        "temperature": 0,
    }
    assert server.headers[0]["x-session-affinity"] == "s-1"


def test_completions() -> None:
    async def script(exchange: Exchange) -> web.StreamResponse:
        await exchange.begin()
        await exchange.event({"choices": [{"index": 0, "text": "a"}]})
        return await exchange.done(1)

    with scripted_server(script) as server:
        plain = replace(TARGET, endpoint="completions", usage_per_chunk=False, has_cache_salt=False)
        record = asyncio.run(sent(server.url, plain))
        assert record.outcome is Outcome.OK
        assert len(record.chunk_s) == 1
        assert record.chunk_tokens == (), "the chunk did not say"
        assert server.bodies[0]["prompt"] == "hi"
        assert server.bodies[0]["stream_options"] == {"include_usage": True}
        assert "cache_salt" not in server.bodies[0]


def test_a_role_alone_is_no_first_token() -> None:
    async def script(exchange: Exchange) -> web.StreamResponse:
        await exchange.begin()
        await exchange.event({"choices": [{"index": 0, "delta": {"role": "assistant"}}]})
        await asyncio.sleep(0.1)
        await exchange.text(1)
        return await exchange.done(1)

    record = outcome_of(script)
    assert len(record.chunk_s) == 1
    assert record.ttft_s is not None
    assert record.ttft_s >= 0.1


def test_refusals_keep_status_code_and_retry_after() -> None:
    for status, told, expected in ((429, "2.5", 2.5), (503, "soon", None), (503, "nan", None)):

        async def script(
            exchange: Exchange, status: int = status, told: str = told
        ) -> web.StreamResponse:
            return refusal(status, "full", Retry_After=told)

        record = outcome_of(script)
        assert record.outcome is Outcome.REFUSED
        assert (record.status, record.code, record.retry_after_s) == (status, "full", expected)
        assert record.message == "the system is full"
        assert record.e2e_s > 0


def test_other_statuses_are_errors() -> None:
    async def script(exchange: Exchange) -> web.StreamResponse:
        return web.Response(status=500, text="<html>oops</html>")

    record = outcome_of(script)
    assert (record.outcome, record.status) == (Outcome.ERROR, 500)
    assert record.message == "<html>oops</html>"


def test_an_error_event_in_the_middle_is_a_failure() -> None:
    async def script(exchange: Exchange) -> web.StreamResponse:
        await exchange.begin()
        await exchange.text(3)
        await exchange.event({"error": {"message": "verifier lost", "code": "upstream_lost"}})
        return await exchange.done(3)

    record = outcome_of(script)
    assert record.outcome is Outcome.BROKEN
    assert (record.message, record.code) == ("verifier lost", "upstream_lost")
    assert len(record.chunk_s) == 1


@pytest.mark.parametrize(
    "spoiled",
    [b"", b"data: {not json}\n\n", b'data: {"choices": 5}\n\n', b"data: [1]\n\n", b"data: 7\n\n",
     b'data: {"choices": [], "usage": {"completion_tokens": "many"}}\n\n',
     b"data: " + b"[" * 100_000 + b"\n\n"],
)  # fmt: skip
def test_nonsense_or_no_done_is_a_failure(spoiled: bytes) -> None:
    async def script(exchange: Exchange) -> web.StreamResponse:
        await exchange.begin()
        await exchange.text(2)
        await exchange.send(spoiled)
        return exchange.cut()

    record = outcome_of(script)
    assert record.outcome is Outcome.BROKEN
    assert record.message
    assert len(record.chunk_s) == 1


def test_a_connection_that_breaks_is_a_failure() -> None:
    async def script(exchange: Exchange) -> web.StreamResponse:
        await exchange.begin()
        await exchange.text(2)
        exchange.abort()
        return exchange.cut()

    assert outcome_of(script).outcome is Outcome.BROKEN


def test_a_timeout_is_a_failure_of_that_request() -> None:
    record = outcome_of(answering(4, 2, 600.0), timeout_s=1.0)
    assert record.outcome is Outcome.TIMEOUT
    assert len(record.chunk_s) == 1
    assert record.e2e_s >= 1.0


def test_no_server_is_unreachable() -> None:
    with scripted_server(answering()) as server:
        gone = server.url
    record = asyncio.run(sent(gone))
    assert (record.outcome, record.status) == (Outcome.UNREACHABLE, None)


FIELDS = st.sampled_from(
    ["choices", "delta", "content", "text", "usage", "completion_tokens", "prompt_tokens", "error",
     "prompt_tokens_details", "cached_tokens", "speculation", "num_draft_tokens", "metrics", "code",
     "speculative_decoding", "acceptance_histogram", "finish_reason", "message", "path"]
)  # fmt: skip
JSON_VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(FIELDS, inner, max_size=4),
    max_leaves=12,
)


@settings(max_examples=40, deadline=None)
@given(st.dictionaries(FIELDS, JSON_VALUES), st.dictionaries(FIELDS, JSON_VALUES))
def test_whatever_a_chunk_holds_it_becomes_a_record(first: object, second: object) -> None:
    watched = Watched(Clock(0.0), ASK)
    watched.status = 200
    for value in (first, second):
        watched.receive(b"data: " + json.dumps(value).encode() + b"\n\n")
    watched.receive(b"data: [DONE]\n\n")
    record = watched.record()
    assert record.outcome in (Outcome.OK, Outcome.BROKEN)
    assert isinstance(record.path, str)
    assert len(record.new_tokens()) == len(record.chunk_s)
    watched.refuse(json.dumps(first).encode(), {})


def test_what_ended_by_ctrl_c_has_a_record() -> None:
    async def cancelled(url: str) -> list[RequestRecord]:
        records: list[RequestRecord] = []
        async with http_session() as session:
            clock = Clock(time.perf_counter())
            target = replace(TARGET, url=url)
            task = asyncio.create_task(send(session, target, clock, ASK, records))
            async with asyncio.timeout(TIMEOUT_S):
                while not server.asked.is_set():  # noqa: ASYNC110
                    await asyncio.sleep(0.005)
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)
        return records

    with scripted_server(answering(4, 2, 10.0)) as server:
        (record,) = asyncio.run(cancelled(server.url))
    assert record.outcome is Outcome.CANCELLED
