"""A cluster as its users start it, with Ray's own commands from `ray start` to the end: two nodes,
token authentication, the applications deployed from a file, the load test submitted as a job."""

from __future__ import annotations

import asyncio
import itertools
import json
import statistics
import time
from pathlib import Path

import httpx
import psutil
import pytest
import yaml

from benchmarks.loadtest.record import Outcome
from benchmarks.loadtest.results import REPORT, read_results
from cluster import cli
from tests.support.ray_command_line import RayCommandLine
from tests.support.ray_nodes import free_port
from tests.support.tiny_models import make_tiny_model

pytestmark = [pytest.mark.ray, pytest.mark.long]

NUM_WORKERS = 4
NUM_STREAMS, NUM_TOKENS, NUM_ROUNDS = 200, 150, 8
MAX_GROWTH_MB = 3.0
"""In a round: 100 bytes a chunk, which is less than any chunk has."""
PROFILE = """
prompts: {kind: generated, families: {chat: 1, copy: 1}, output_tokens: {low: 24, high: 48}}
load: {kind: open, arrivals: constant, rate: [10], duration_s: 6}
body: {temperature: 0, ignore_eos: true, speculation: {mode: "on"}}
"""
"""An arrival each tenth of a second."""


def serve_config(folder: Path, port: int) -> Path:
    """local.yaml with tiny models: the drafter has the target's."""
    config = yaml.safe_load(cli.DEFAULT_CONFIG.read_text())
    config["http_options"]["port"] = port
    source = str(make_tiny_model(folder / "model"))
    model = {"source": source, "dtype": "float32", "name": "tiny"}
    for application in config["applications"]:
        if application["name"] == "drafter":
            application["args"] |= {"kind": "model", "model": model}
        elif application["name"] == "verifier":
            application["args"] |= {"model": model}
    path = folder / "serve.yaml"
    path.write_text(yaml.safe_dump(config))
    return path


@pytest.fixture(scope="module")
def cluster():
    with RayCommandLine() as running:
        running.add_node("verifier")
        yield running


@pytest.fixture(scope="module")
def url(cluster, tmp_path_factory):
    port = free_port()
    config = serve_config(tmp_path_factory.mktemp("config"), port)
    cluster.run("serve", "deploy", str(config), "--address", cluster.dashboard)
    return f"http://127.0.0.1:{port}"


def wait_until_ready(cluster: RayCommandLine) -> dict[str, str]:
    """What `serve status` says of each application, once none is deploying."""
    for _ in range(60):
        status = yaml.safe_load(cluster.run("serve", "status", "--address", cluster.dashboard))
        states = {name: told["status"] for name, told in status["applications"].items()}
        if "DEPLOYING" not in states.values() and "NOT_STARTED" not in states.values():
            return states
    raise AssertionError(states)


def test_ray_asks_for_its_token(cluster):
    assert httpx.get(f"{cluster.dashboard}/api/jobs/").status_code == 401
    wrong = {"Authorization": f"Bearer {'0' * 64}"}
    assert httpx.get(f"{cluster.dashboard}/api/jobs/", headers=wrong).status_code == 403


def test_serve_status_says_that_all_three_run(cluster, url):
    states = wait_until_ready(cluster)
    assert states == dict.fromkeys(("verifier", "drafter", "router"), "RUNNING")
    assert httpx.get(f"{url}/health/ready", timeout=60).status_code == 200


def test_a_third_turn_with_parts_no_content_and_a_tool_passes_the_ingress(cluster, url):
    tool = {"name": "time", "parameters": {"type": "object", "properties": {}}}
    call = {"id": "call_1", "type": "function", "function": {"name": "time", "arguments": "{}"}}
    turns = [
        {
            "role": "user",
            "content": [{"type": "text", "text": "hi"}, {"type": "text", "text": "!"}],
        },
        {"role": "assistant", "content": "hello"},
        {"role": "user", "content": "what time is it?"},
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "call_1", "content": "noon"},
    ]
    for number in (1, 3, 5):
        body = {"model": "tiny", "messages": turns[:number], "max_tokens": 4}
        body |= {"tools": [{"type": "function", "function": tool}], "tool_choice": "none"}
        reply = httpx.post(f"{url}/v1/chat/completions", json=body, timeout=30)
        assert reply.status_code == 200, reply.text
        assert reply.json()["usage"]["completion_tokens"] > 0


async def test_200_streams_leave_the_proxy_s_memory_flat(cluster, url):
    """Tokens cost next to nothing here, so that Serve's HTTP proxy has the most to do."""
    [proxy] = [process for process in cluster.processes() if "ProxyActor" in process.name()]
    body = {"model": "tiny", "prompt": "x", "max_tokens": NUM_TOKENS, "ignore_eos": True}
    body |= {"speculation": {"mode": "off"}, "stream": True}
    limits = httpx.Limits(max_connections=NUM_STREAMS)

    async def stream(http: httpx.AsyncClient) -> int:
        async with http.stream("POST", "/v1/completions", json=body) as reply:
            assert reply.status_code == 200
            lines = [line async for line in reply.aiter_lines() if line.startswith("data: ")]
        assert lines[-1] == "data: [DONE]"
        return len(lines) - 1  # Steps that came together are one chunk.

    rss_mb, chunks_per_s = [], []
    async with httpx.AsyncClient(base_url=url, timeout=120, limits=limits) as http:
        for _ in range(NUM_ROUNDS):
            started = time.monotonic()
            counts = await asyncio.gather(*(stream(http) for _ in range(NUM_STREAMS)))
            assert sum(counts) >= NUM_STREAMS * NUM_TOKENS / 2
            chunks_per_s.append(sum(counts) / (time.monotonic() - started))
            rss_mb.append(proxy.memory_info().rss / 2**20)
    print(f"chunks per second: {chunks_per_s}; MB of the proxy after each round: {rss_mb}")
    # The median over all pairs of rounds: buffers of the largest round so far may stay.
    pairs = itertools.combinations(enumerate(rss_mb), 2)
    growth = statistics.median((later - mb) / (n - m) for (m, mb), (n, later) in pairs)
    assert growth < MAX_GROWTH_MB


def test_the_warm_up_job(cluster, url):
    printed = cluster.submit_job("python", "-m", "cluster.jobs.warm_up", "--url", url)
    assert "round 2: first token after" in printed


def test_the_load_test_job_spreads_its_workers(cluster, url, tmp_path):
    profile, out = tmp_path / "profile.yaml", tmp_path / "out"
    profile.write_text(PROFILE)
    words = ("--url", url, "--profile", str(profile), "--out", str(out))
    printed = cluster.submit_job("paceline", "loadtest", *words, "--workers", str(NUM_WORKERS))
    assert str(out / REPORT) in printed
    results, records = read_results(out)
    assert results.run.workers == NUM_WORKERS
    assert results.is_valid, results.warnings
    assert len(records) >= 59
    assert sorted(record.index for record in records) == list(range(len(records)))
    assert {record.outcome for record in records} == {Outcome.OK}
    assert results.run.server["model"] == "tiny"
    [group] = results.groups
    assert group.acceptance is not None
    assert group.acceptance.num_accepted_tokens > 0
    report = (out / REPORT).read_text()
    assert report.lower().startswith("<!doctype html>")
    assert "tiny" in report
    actors = cluster.get("/api/v0/actors?detail=1")["data"]["result"]["result"]
    workers = [actor for actor in actors if actor["class_name"] == "Worker"]
    assert len(workers) == NUM_WORKERS
    assert len({actor["node_id"] for actor in workers}) == 2, "they were not spread"


def test_the_profile_job_runs_where_verifiers_do(cluster, tmp_path):
    source, out = str(make_tiny_model(tmp_path / "model")), tmp_path / "profile.json"
    words = ("paceline", "profile", "--model", source, "--dtype", "float32", "--out", str(out))
    cluster.submit_job(*words, role="verifier")
    assert json.loads(out.read_text())["step_ms"]["0"]["1"] > 0
    [job] = [job for job in cluster.get("/api/jobs/") if "paceline profile" in job["entrypoint"]]
    nodes = cluster.get("/api/v0/nodes?detail=1")["data"]["result"]["result"]
    [node] = [node for node in nodes if node["labels"].get("paceline-role") == "verifier"]
    assert job["driver_node_id"] == node["node_id"]


def test_it_stops_and_leaves_no_process(cluster, url):
    """Last in this file: it stops the cluster that the others use."""
    processes = cluster.processes()
    assert len(processes) > 10, "the cluster is not among them: the test shows nothing"
    cluster.run("serve", "shutdown", "--yes", "--address", cluster.dashboard)
    deadline = time.monotonic() + 60  # Serve shuts down behind the command's back.
    while answers(url):
        assert time.monotonic() < deadline
        time.sleep(0.2)
    cluster.stop()
    _, alive = psutil.wait_procs(processes, timeout=5)
    assert not alive
    assert not cluster.processes()


def answers(url: str) -> bool:
    try:
        httpx.get(f"{url}/health/live", timeout=5)
    except httpx.TransportError:
        return False
    return True
