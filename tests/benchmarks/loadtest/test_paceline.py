"""Against the real thing: router, verifier and drafter, on a real port."""

from __future__ import annotations

import asyncio
import time
from pathlib import Path

from benchmarks.loadtest.results import read_results
from cluster.cli import main
from tests.clients.server import Served, found_by
from tests.support.tiny_models import make_tiny_model

PROFILE = """
body: {temperature: 0, ignore_eos: true}
prompts: {kind: generated, families: {chat: 1, session: 1}, output_tokens: {low: 64, high: 64}}
load: {kind: closed, concurrency: [2], requests: 6}
arms:
  - {name: "on", body: {speculation: {mode: "on"}}}
  - {name: "off", body: {speculation: {mode: "off"}}}
baseline: "off"
slo: {ttft_ms: 60000}
"""


async def test_paths_and_acceptance_come_from_the_router(tmp_path: Path) -> None:
    profile = tmp_path / "profile.yaml"
    profile.write_text(PROFILE)

    async def run(system: Served) -> Path:
        out = tmp_path / f"out-{time.monotonic_ns()}"
        words = ["--url", system.url, "--profile", str(profile), "--out", str(out)]
        assert await asyncio.to_thread(main, ["loadtest", *words]) == 0
        return out

    outs = await found_by(run, make_tiny_model(tmp_path / "tiny"), speculative=True)
    results, records = read_results(outs[-1])
    groups = {group.arm: group for group in results.groups}
    assert groups["on"].paths == {"speculative": 6}
    assert groups["off"].paths == {"plain": 6}
    assert {record.output_tokens for record in records} == {64}
    assert all(sum(record.new_tokens()) == 64 for record in records)
    assert all(record.chunk_tokens for record in records), "the router counts in every chunk"
    told = groups["on"].acceptance
    assert told is not None
    assert told.num_accepted_tokens > 0, "the drafter runs the verifier's own model"
    steps = told.histogram
    assert sum(count * steps[count] for count in range(len(steps))) == told.num_accepted_tokens
    assert groups["off"].acceptance is not None
    assert groups["off"].acceptance.num_draft_tokens == 0
    assert groups["on"].cached_share is not None
    assert any(results.timeline.mode), "the cluster's mode was not seen"
    assert results.run.server["cluster"]["verifiers"]
