"""The whole system as a newcomer starts it, used through OpenAI's SDK."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import random
import signal
import socket
import time

import httpx
import openai
import psutil
import pytest
import yaml

from cluster.cli import DEFAULT_CONFIG
from tests.support import prompts
from tests.support.expositions import series_of, total
from tests.support.local_system import STOP_TIMEOUT_S, LocalSystem
from tests.support.polling import eventually

MODEL = "smollm2-135m-instruct"
REPLICA = {"speculation": {"mode": "on", "drafter": "model"}}
"""Drafted for by the drafter's replica: the verifier's own drafter is another one."""
pytestmark = pytest.mark.ray


@pytest.fixture(scope="module")
def system(tmp_path_factory):
    """`make serve`, but that every draft is verified: whether drafts pay on this machine is not
    asked here."""
    config = yaml.safe_load(DEFAULT_CONFIG.read_text())
    verifier = next(a for a in config["applications"] if a["name"] == "verifier")
    verifier["args"]["speculation"] = {"planner": "fixed"}
    file = tmp_path_factory.mktemp("serve") / "local.yaml"
    file.write_text(yaml.safe_dump(config))
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    with LocalSystem(file, port) as running:
        yield running


@pytest.fixture
def client(system):
    return openai.OpenAI(base_url=f"{system.url}/v1", api_key="unused", max_retries=0)


def speculation(mode):
    return {"speculation": {"mode": mode}}


def test_the_model_is_listed(client):
    [model] = client.models.list().data
    assert model.id == MODEL


def test_chat(client):
    reply = client.chat.completions.create(
        model=MODEL,
        messages=[{"role": "user", "content": "What is the capital of France?"}],
        temperature=0,
        max_tokens=30,
    )
    assert "Paris" in reply.choices[0].message.content
    assert reply.usage.completion_tokens <= 30
    assert reply.choices[0].finish_reason == "stop"


def test_a_chat_stream_is_the_same_text(client):
    request = {
        "model": MODEL,
        "messages": [{"role": "user", "content": "Name three colours."}],
        "seed": 11,
        "max_tokens": 40,
    }
    whole = client.chat.completions.create(**request)
    chunks = list(
        client.chat.completions.create(
            **request, stream=True, stream_options={"include_usage": True}
        )
    )
    text = "".join(c.choices[0].delta.content or "" for c in chunks if c.choices)
    assert text == whole.choices[0].message.content
    assert chunks[-1].usage.completion_tokens == whole.usage.completion_tokens


def test_structured_output_logprobs_and_penalties_are_the_same_with_drafts(client):
    """Through every part, as a client would ask for them."""
    schema = {
        "type": "object",
        "properties": {
            "name": {"type": "string", "maxLength": 20},
            "colour": {"enum": ["red", "green", "blue"]},
        },
        "required": ["name", "colour"],
        "additionalProperties": False,
    }
    request = {
        "model": MODEL,
        "messages": [{"role": "user", "content": "Describe an apple as JSON."}],
        "seed": 5,
        "max_tokens": 80,
        "presence_penalty": 0.3,
        "logit_bias": {"0": -100},
        "logprobs": True,
        "top_logprobs": 2,
        "response_format": {
            "type": "json_schema",
            "json_schema": {"name": "apple", "schema": schema},
        },
    }
    drafted, plain = (
        client.chat.completions.create(**request, extra_body=speculation(mode)).choices[0]
        for mode in ("on", "off")
    )
    assert json.loads(plain.message.content)["colour"] in ("red", "green", "blue")
    assert drafted.message == plain.message
    assert drafted.logprobs == plain.logprobs
    assert len(plain.logprobs.content[0].top_logprobs) == 2


def test_completions_speculative_and_plain_are_the_same_text(client):
    request = {"model": MODEL, "prompt": prompts.COPY_TASK, "max_tokens": 60, "temperature": 0}
    drafted = client.completions.create(**request, extra_body=speculation("on"))
    plain = client.completions.create(**request, extra_body=speculation("off"))
    assert drafted.choices[0].text == plain.choices[0].text
    spent = drafted.model_extra["speculation"]
    assert spent["path"] == "speculative"
    assert 60 / spent["num_steps"] >= 3, spent
    assert plain.model_extra["speculation"]["num_draft_tokens"] == 0


def test_drafts_cross_between_two_processes(client, system):
    client.completions.create(
        model=MODEL, prompt=prompts.COPY_TASK, max_tokens=60, extra_body=REPLICA
    )
    report = system.cluster()
    [verifier], [drafter] = report["verifiers"], report["drafters"]
    assert verifier["pid"] != drafter["pid"]
    assert psutil.pid_exists(verifier["pid"])
    assert psutil.pid_exists(drafter["pid"])
    assert verifier["address"] != drafter["address"]
    assert drafter["acceptance_rate"] > 0


def test_a_request_id_is_echoed_once(system):
    reply = httpx.get(f"{system.url}/v1/models", headers={"X-Request-ID": "client-7"})
    assert reply.headers.get_list("x-request-id") == ["client-7"]
    refused = httpx.get(f"{system.url}/v1/models", headers={"X-Request-ID": "a b"})
    assert refused.status_code == 400


def test_metrics_are_of_the_whole_cluster_and_carry_serves_names(client, system):
    client.completions.create(model=MODEL, prompt="Row, row,", max_tokens=4)
    response = httpx.get(f"{system.url}/metrics", timeout=10)
    members = {
        (series.label("application"), series.label("deployment"), series.label("replica"))
        for series in series_of(response.text)
    }
    report = system.cluster()
    expected = {
        (application, deployment, row["replica_id"])
        for application, deployment in (
            ("router", "Router"),
            ("verifier", "Verifier"),
            ("drafter", "Drafter"),
        )
        for row in report[f"{application}s"]
    }
    assert members == expected
    assert total(response.text, "paceline_requests_total", status="200") >= 1
    head = httpx.head(f"{system.url}/metrics", timeout=10)
    assert (head.status_code, head.content) == (200, b"")


def test_bad_requests_are_told_what_is_wrong(client):
    with pytest.raises(openai.BadRequestError) as refused:
        client.chat.completions.create(model=MODEL, messages=[], max_tokens=5)
    assert refused.value.body["param"] == "messages"
    with pytest.raises(openai.NotFoundError):
        client.completions.create(model="gpt-4", prompt="x")


async def test_two_hundred_clients_that_leave_at_random_free_everything_within_a_second(system):
    rng = random.Random(3)
    may_leave = asyncio.Event()

    async def stay(http):
        body = {"model": MODEL, "prompt": "Once", "max_tokens": 500, "stream": True}
        url = f"{system.url}/v1/completions"
        async with http.stream("POST", url, json=body) as response:
            assert response.status_code == 200
            async for _ in response.aiter_lines():
                pass

    async def leave(http, after_s):
        staying = asyncio.create_task(stay(http))
        await may_leave.wait()
        await asyncio.sleep(after_s)
        staying.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await staying

    limits = httpx.Limits(max_connections=200)
    async with httpx.AsyncClient(timeout=60, limits=limits) as http:
        leaving = [asyncio.create_task(leave(http, rng.uniform(0, 2))) for _ in range(200)]

        def running():
            return system.cluster()["verifiers"][0]["running"]

        await eventually(lambda: running() > 20, every_s=0.1)
        may_leave.set()
        await asyncio.gather(*leaving)

    def freed():
        report = system.cluster()
        [router], [verifier], [drafter] = (
            report["routers"],
            report["verifiers"],
            report["drafters"],
        )
        busy = verifier["running"] + verifier["waiting"] + verifier["kv_blocks_used"]
        return busy == drafter["sessions"] == router["in_flight"] == 0

    await eventually(freed, 1.0, every_s=0.1)  # Seldom: asking takes the cores it needs, too.


def test_a_drafter_replica_killed_in_the_middle_of_an_answer(client, system):
    request = {"model": MODEL, "prompt": prompts.COPY_TASK, "max_tokens": 200, "temperature": 0}
    whole = client.completions.create(**request, extra_body=speculation("off"))
    [drafter] = system.cluster()["drafters"]
    stream = client.completions.create(
        **request,
        stream=True,
        extra_body={"speculation": REPLICA["speculation"] | {"trace": True}},
    )
    text = ""
    for chunk in stream:
        text += chunk.choices[0].text
        if chunk.choices[0].model_extra["speculation"]["num_accepted_tokens"]:
            break  # The drafter is at work.
    victim = psutil.Process(drafter["pid"])
    os.kill(victim.pid, signal.SIGKILL)
    victim.wait(5)
    rest = [chunk.choices[0].text for chunk in stream]
    assert len(rest) > 1, "the answer had ended: the test shows nothing"
    assert text + "".join(rest) == whole.choices[0].text


def test_a_new_drafter_replica_is_found_and_used(client, system):
    deadline = time.monotonic() + 60
    while True:
        reply = client.completions.create(
            model=MODEL, prompt=prompts.COPY_TASK, temperature=0, extra_body=REPLICA
        )
        if reply.model_extra["speculation"]["num_accepted_tokens"] > 0:
            break
        assert time.monotonic() < deadline, system.cluster()
        time.sleep(0.5)


def test_ctrl_c_leaves_no_process_behind(system):
    """Last in this file: it stops the system that the others use."""
    processes = system.processes()
    assert len(processes) > 6, "the cluster is not among them: the test shows nothing"
    started = time.monotonic()
    assert system.stop(signal.SIGINT) == 0
    assert time.monotonic() - started < STOP_TIMEOUT_S
    _, alive = psutil.wait_procs(processes, timeout=1)
    assert not alive
