"""The command as a person types it."""

from __future__ import annotations

import json
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from aiohttp import web

from benchmarks.loadtest.record import Outcome
from benchmarks.loadtest.results import read_results
from cluster.cli import main
from tests.benchmarks.loadtest.scripted_server import (
    Exchange,
    ScriptedServer,
    answering,
    refusal,
    scripted_server,
)

REPOSITORY = Path(__file__).parents[3]
PROFILE = """
description: two levels, two arms
prompts: {kind: generated, families: {chat: 1, copy: 1}, output_tokens: {low: 8, high: 8}}
load: {kind: closed, concurrency: [1, 3], requests: 12}
arms: [{name: a, body: {seed: 1}}, {name: b, body: {seed: 2}}]
baseline: a
slo: {ttft_ms: 5000}
warmup_requests: 2
"""


@pytest.fixture
def profile(tmp_path: Path) -> Path:
    path = tmp_path / "profile.yaml"
    path.write_text(PROFILE)
    return path


def loadtest(server: ScriptedServer, profile: Path, out: Path, *more: str) -> int:
    words = ["--url", f"{server.url}/v1", "--profile", str(profile), "--out", str(out)]
    return main(["loadtest", *words, *more])


def test_a_run_writes_what_it_found(
    tmp_path: Path, profile: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "deep" / "out"
    with scripted_server(answering(4, 2, 0.001)) as server:
        assert loadtest(server, profile, out, "--api-key", "secret") == 0
        headers = server.headers
    assert {header["Authorization"] for header in headers} == {"Bearer secret"}
    results, records = read_results(out)
    assert results.is_valid
    assert [(cell.level, cell.repeat) for cell in results.cells] == (
        [("1 user", 0)] * 2 + [("3 users", 0)] * 2
    )
    assert len(records) == 4 * 12
    assert {record.outcome for record in records} == {Outcome.OK}
    # Two warm-up requests for each arm, and the one that learns what the server accepts.
    assert len(server.bodies) == 4 * 12 + 2 * 2 + 1
    assert {group.arm for group in results.groups} == {"a", "b"}
    assert all(group.attainment and group.attainment.value == 1.0 for group in results.groups)
    assert all(group.speedup for group in results.groups)
    page = (out / "report.html").read_text()
    assert "secret" not in page
    printed = capsys.readouterr()
    assert printed.out.strip() == str(out / "report.html")
    told = printed.err.splitlines()
    assert told[0].startswith("[1/4] 1 user, ")
    assert re.search(r"12 ok, 0 not, 96 tokens in \d", told[0])
    assert "\r" not in printed.err, "a progress bar without a terminal"


def test_arms_ask_the_same_with_their_own_fields_and_salt(tmp_path: Path, profile: Path) -> None:
    with scripted_server(answering(1, 8)) as server:
        assert loadtest(server, profile, tmp_path / "out", "--seed", "5") == 0
    by_salt: dict[str, list[dict[str, object]]] = {}
    for body in server.bodies:
        by_salt.setdefault(str(body["cache_salt"]), []).append(body)
    del by_salt["warm-up"]
    assert len(by_salt) == 4, "cells share a salt"
    first, second, *_ = by_salt.values()
    assert {body["seed"] for body in first} ^ {body["seed"] for body in second} == {1, 2}
    texts = [sorted(str(body["messages"]) for body in cell) for cell in (first, second)]
    assert texts[0] == texts[1]
    with scripted_server(answering(1, 8)) as again:
        assert loadtest(again, profile, tmp_path / "again", "--seed", "5") == 0
    assert sorted(str(b["messages"]) for b in again.bodies) == (
        sorted(str(b["messages"]) for b in server.bodies)
    ), "another run with this seed asked something else"


def test_a_server_that_refuses_our_extra_fields(tmp_path: Path, profile: Path) -> None:
    async def strict(exchange: Exchange) -> web.StreamResponse:
        for name in ("cache_salt", "continuous_usage_stats"):
            if name in json.dumps(exchange.body):
                body = {"error": {"message": f"unknown field {name}", "type": "x", "code": None}}
                return web.json_response(body, status=400)
        await exchange.begin()
        await exchange.text(None)
        await exchange.text(None)
        return await exchange.done(8)

    with scripted_server(strict) as server:
        assert loadtest(server, profile, tmp_path / "out") == 0
    results, records = read_results(tmp_path / "out")
    assert all(record.chunk_tokens == () for record in records)
    assert all(group.tpot_ms and group.output_tokens_per_s for group in results.groups)


def test_an_arm_that_the_server_refuses_is_named(
    tmp_path: Path, profile: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    async def script(exchange: Exchange) -> web.StreamResponse:
        if exchange.body.get("seed") == 2:
            return web.json_response({"error": {"message": "seed: not here"}}, status=400)
        return await answering(1, 8)(exchange)

    with scripted_server(script) as server:
        assert loadtest(server, profile, tmp_path / "out") == 1
    assert "arm 'b': the first request failed: 400 seed: not here" in capsys.readouterr().err


def test_no_server(tmp_path: Path, profile: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with scripted_server(answering()) as server:
        pass
    assert loadtest(server, profile, tmp_path / "out") == 1
    assert "lists no model. Is the server up?" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (["--profile", "quick"], "--out is needed"),
        (["--out", "x"], "--profile is needed"),
        (["--out", "x", "--profile", "quick", "--url", "ftp://x"], "must look like"),
        (["--out", "x", "--profile", "quick", "--workers", "-1"], "must not be negative"),
    ],
)
def test_bad_usage(words: list[str], told: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["loadtest", *words])
    assert ended.value.code == 2
    assert told in capsys.readouterr().err


def test_list(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["loadtest", "--list"]) == 0
    assert "quick" in capsys.readouterr().out


@pytest.mark.alone
def test_rates_as_multiples_of_a_capacity_that_is_measured(tmp_path: Path) -> None:
    path = tmp_path / "overload.yaml"
    path.write_text(
        "prompts: {kind: generated, output_tokens: {low: 2, high: 2}}\n"
        "load: {kind: open, rate_of_capacity: [0.5, 4], capacity_concurrency: 2, duration_s: 1,\n"
        "       arrivals: constant}\n"
        "slo: {ttft_ms: 500}\n"
    )
    under_way = 0

    async def script(exchange: Exchange) -> web.StreamResponse:
        """Two at once, each of 0.1 s: 20 a second. A third is refused."""
        nonlocal under_way
        if under_way == 2:
            return refusal(503, "full", Retry_After="1")
        under_way += 1
        try:
            return await answering(2, 1, 0.1)(exchange)
        finally:
            under_way -= 1

    with scripted_server(script) as server:
        assert loadtest(server, path, tmp_path / "out") == 0
    results, _ = read_results(tmp_path / "out")
    assert results.capacity_rps is not None
    assert 5 < results.capacity_rps <= 20
    light, heavy = results.groups
    assert (light.level, heavy.level) == ("0.5 x capacity", "4 x capacity")
    assert heavy.level_value == pytest.approx(4 * results.capacity_rps)
    assert heavy.refusals is not None
    assert heavy.refusals.by_code == {"503 full": heavy.refusals.count}
    assert heavy.attainment is not None
    assert heavy.attainment.value < 0.7


@pytest.mark.alone
def test_a_replay_has_the_times_and_lengths_of_its_trace(tmp_path: Path) -> None:
    path = tmp_path / "replay.yaml"
    (tmp_path / "t.jsonl").write_text(
        '{"timestamp": 1000, "input_length": 40, "output_length": 3}\n'
        '{"timestamp": 1600, "input_length": 10, "output_length": 5}\n'
    )
    path.write_text(
        "prompts: {kind: generated}\n"
        "load: {kind: replay, trace: t.jsonl, speed: [4], duration_s: 1}\n"
    )
    with scripted_server(answering(1, 1)) as server:
        assert loadtest(server, path, tmp_path / "out") == 0
    _, records = read_results(tmp_path / "out")
    assert [record.scheduled_s for record in records] == [0.0, pytest.approx(0.15)]
    assert sorted(body["max_tokens"] for body in server.bodies[-2:]) == [3, 5]


def test_ctrl_c_leaves_a_report_of_what_was_found(tmp_path: Path) -> None:
    profile, out = tmp_path / "long.yaml", tmp_path / "out"
    profile.write_text(
        "prompts: {kind: generated}\nload: {kind: closed, concurrency: [3], duration_s: 600}\n"
        "warmup_requests: 0\n"
    )

    async def script(exchange: Exchange) -> web.StreamResponse:
        """The first ones are answered, then everything hangs."""
        return await answering(2, 1, 0.0 if exchange.number < 10 else 600.0)(exchange)

    with scripted_server(script) as server:
        words = ["--url", server.url, "--profile", str(profile), "--out", str(out)]
        process = subprocess.Popen(
            [sys.executable, "-m", "cluster.cli", "loadtest", *words],
            cwd=REPOSITORY,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        while len(server.bodies) < 13:
            assert server.asked.wait(60), "it asked nothing"
            server.asked.clear()
        process.send_signal(signal.SIGINT)
        _, told = process.communicate(timeout=60)
    assert process.returncode == 1
    assert "interrupted after" in told
    assert "Traceback" not in told
    results, records = read_results(out)
    assert results.run.interrupted
    outcomes = [record.outcome for record in records]
    # The first two of ten were the warm-up's.
    assert outcomes.count(Outcome.OK) == 8
    assert outcomes.count(Outcome.CANCELLED) == 3
    assert results.groups[0].window_s < 600
    assert "interrupted" in (out / "report.html").read_text()


def test_compare_when_it_runs_and_later(
    tmp_path: Path, profile: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with scripted_server(answering(4, 2, 0.010)) as slow:
        assert loadtest(slow, profile, tmp_path / "slow") == 0
    with scripted_server(answering(4, 2, 0.002)) as fast:
        assert loadtest(fast, profile, tmp_path / "fast", "--compare", str(tmp_path / "slow")) == 0
    page = tmp_path / "fast" / "report.html"
    beside = page.read_text()
    assert "Against the other run" in beside
    page.unlink()
    words = ["--out", str(tmp_path / "fast"), "--compare", str(tmp_path / "slow")]
    assert main(["loadtest", *words]) == 0
    assert page.read_text() == beside
    capsys.readouterr()
    words[-1] = str(tmp_path / "nowhere")
    assert main(["loadtest", *words]) == 1
    assert "holds no finished load test" in capsys.readouterr().err
    (tmp_path / "slow" / "results.json").write_text("{}")
    words[-1] = str(tmp_path / "slow")
    assert main(["loadtest", *words]) == 1
    assert "another version" in capsys.readouterr().err


def test_nothing_heavy_is_imported_for_other_commands() -> None:
    """The parser is built for every command; a run needs neither torch nor Ray."""
    check = (
        "import sys; from cluster.cli import main; main(['loadtest', '--list']); "
        "heavy = {'torch', 'ray', 'transformers'} & sys.modules.keys(); assert not heavy, heavy"
    )
    subprocess.run([sys.executable, "-c", check], check=True, cwd=REPOSITORY, timeout=120)
