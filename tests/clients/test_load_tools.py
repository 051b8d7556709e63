"""Load generators, unmodified, complete against a real server, streaming and not.

Their exit codes prove nothing: some end with 0 when every request failed. So requests and tokens
are counted in what they wrote.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import httpx
import pytest

from router.cluster_scrape import SHARED_FOR_S
from tests.clients.packages import python_of
from tests.clients.server import Served, run_client, served

pytestmark = pytest.mark.long

PROGRAMS = Path(__file__).parent / "programs"
NUM_REQUESTS = 6
NUM_TOKENS = 16


def read_json(folder: Path, name: str) -> dict[str, Any]:
    """Of the one file of this name below."""
    (file,) = folder.rglob(name)
    return json.loads(file.read_text(encoding="utf-8"))


async def aiperf(system: Served, out: Path, *arguments: str) -> dict[str, Any]:
    """Its summary."""
    program = python_of("aiperf").parent / "aiperf"
    command = (
        f"profile --model {system.model} --url {system.url} --tokenizer {system.tokenizer} "
        f"--concurrency 2 --request-count {NUM_REQUESTS} --isl 30 --osl {NUM_TOKENS} "
        f"--extra-inputs ignore_eos:true --extra-inputs min_tokens:{NUM_TOKENS} "
        f"--extra-inputs temperature:0 --use-server-token-count --ui simple --artifact-dir {out}"
    )
    await run_client(
        [program, *command.split(), *arguments],
        cwd=out.parent,
        may_ask_hub=True,
    )
    return read_json(out, "profile_export_aiperf.json")


@pytest.mark.parametrize("endpoint", ["chat", "completions"])
async def test_aiperf(endpoint: str, model: Path, tmp_path: Path) -> None:
    """Streaming, it reads acceptance per request, and finds what we counted."""
    async with served(model) as system:
        found = await aiperf(system, tmp_path / "out", "--endpoint-type", endpoint, "--streaming")
        assert found["request_count"]["avg"] == NUM_REQUESTS
        assert found["output_sequence_length"]["min"] == NUM_TOKENS
        assert found["output_sequence_length"]["max"] == NUM_TOKENS
        assert found["time_to_first_token"]["avg"] > 0
        length = found["spec_decode_token_weighted_acceptance_length"]["avg"]
        totals = system.router.totals
        expected = 1 + totals.num_accepted_tokens / totals.num_draft_steps
        assert length == pytest.approx(expected, rel=0.01)
        assert length > 1.5


async def test_aiperf_without_streaming(model: Path, tmp_path: Path) -> None:
    async with served(model, speculative=False) as system:
        found = await aiperf(system, tmp_path / "out", "--endpoint-type", "chat")
        assert found["request_count"]["avg"] == NUM_REQUESTS
        assert found["output_sequence_length"]["min"] == NUM_TOKENS


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/completions"])
async def test_guidellm(path: str, model: Path, tmp_path: Path) -> None:
    async with served(model) as system:
        report = tmp_path / "report.json"
        backend = f"kind=openai_http,target={system.url},model={system.model}"
        command = (
            f"run --backend {backend},request_format={path} "
            f"--tokenizer kind=hf_auto,model={system.tokenizer} "
            f"--data kind=synthetic_text,prompt_tokens=30,output_tokens={NUM_TOKENS} "
            f"--profile kind=concurrent,streams=2 "
            f"--constraint kind=max_requests,count={NUM_REQUESTS} "
            f"--output kind=json,path={report} --disable-console-interactive"
        )
        program = python_of("guidellm").parent / "guidellm"
        await run_client([program, *command.split()], cwd=tmp_path)
        (benchmark,) = read_json(tmp_path, report.name)["benchmarks"]
        requests = benchmark["requests"]
        assert not requests["errored"]
        assert len(requests["successful"]) == NUM_REQUESTS
        assert {request["output_tokens"] for request in requests["successful"]} == {NUM_TOKENS}
        assert system.num_accepted_drafts > 0


def counts(system: Served) -> tuple[int, int, int]:
    """Steps with drafts, drafts, accepted drafts; of all requests that have ended."""
    totals = system.router.totals
    return totals.num_draft_steps, totals.num_draft_tokens, totals.num_accepted_tokens


@pytest.mark.parametrize(
    ("backend", "path"),
    [("openai", "/v1/completions"), ("openai-chat", "/v1/chat/completions")],
)
async def test_vllm_bench_serve(backend: str, path: str, model: Path, tmp_path: Path) -> None:
    """It always streams. Acceptance it takes from two scrapes, as the difference over its run, and
    finds what we counted meanwhile."""
    duration_s = 2 * SHARED_FOR_S  # else both scrapes are one
    async with served(model) as system:
        sampling = {"max_tokens": 100, "ignore_eos": True, "temperature": 0}
        body = {"model": system.model, "prompt": "la la la", **sampling}
        async with httpx.AsyncClient(base_url=system.url, timeout=60) as client:
            assert (await client.post("/v1/completions", json=body)).status_code == 200
        before = counts(system)
        assert all(before), "counters that were at zero show no difference"
        command = (
            f"--backend {backend} --endpoint {path} --base-url {system.url} "
            f"--model {system.model} --tokenizer {system.tokenizer} "
            f"--dataset-name random --random-input-len 30 --random-output-len {NUM_TOKENS} "
            f"--num-prompts {NUM_REQUESTS} --request-rate {NUM_REQUESTS / duration_s} "
            "--ignore-eos --temperature 0 --disable-tqdm "
            "--save-result --save-detailed --result-filename result.json"
        )
        python = python_of("vllm_bench")
        await run_client([python, PROGRAMS / "vllm_bench_serve.py", *command.split()], cwd=tmp_path)
        counted = tuple(after - start for after, start in zip(counts(system), before, strict=True))
    assert all(counted), "no drafts, no figures"
    found = read_json(tmp_path, "result.json")
    assert (found["completed"], found["failed"]) == (NUM_REQUESTS, 0)
    assert not any(found["errors"])
    assert found["output_lens"] == [NUM_TOKENS] * NUM_REQUESTS
    assert len(found["ttfts"]) == NUM_REQUESTS
    assert min(found["ttfts"]) > 0
    names = ("num_drafts", "draft_tokens", "accepted_tokens")
    assert tuple(found[f"spec_decode_{name}"] for name in names) == counted
    num_drafts, _, num_accepted = counted
    length = found["spec_decode_acceptance_length"]
    assert length == pytest.approx(1 + num_accepted / num_drafts)
    assert length > 1.5
