"""`paceline status`."""

from __future__ import annotations

import json
import signal
import subprocess
import sys

import pytest

from cluster.commands import status
from tests.cluster.scripted_router import ScriptedRouter, fails, says
from tests.support.polling import TIMEOUT_S

REPORT = {
    "mode": "speculative",
    "reason": "auto: 2.0 running per verifier, below 12",
    "since_s": 42.4,
    "acceptance_per_position": [0.8, 0.5],
    "routers": [
        {
            "replica_id": "router00aaaa",
            "node_id": "node0000bbbb",
            "pid": 11,
            "in_flight": 3,
            "ready": True,
        }
    ],
    "verifiers": [
        {
            "replica_id": "verifier1",
            "node_id": "node0000bbbb",
            "pid": 12,
            "address": "10.0.0.1:4000",
            "model": "tiny",
            "state": "ready",
            "load_age_s": 0.1,
            "running": 2,
            "waiting": 1,
            "kv_blocks_used": 5,
            "kv_blocks_total": 80,
            "step_ms": 31.337,
            "knee_tokens": 6,
        }
    ],
    "drafters": [
        {
            "replica_id": "drafter1",
            "node_id": "node0000bbbb",
            "pid": 13,
            "address": "10.0.0.2:4000",
            "model": "ngram",
            "state": "ready",
            "sessions": 2,
            "tokens_per_s": 120.5,
            "queue_ms": 0.25,
            "rtt_ms": 1.5,
            "acceptance_rate": 0.625,
        },
        {
            "replica_id": "",
            "node_id": "",
            "pid": 0,
            "address": "",
            "model": "",
            "state": "unused",
            "sessions": 0,
            "tokens_per_s": 0.0,
            "queue_ms": 0.0,
            "rtt_ms": 0.0,
            "acceptance_rate": None,
        },
    ],
}


def test_it_shows_mode_members_load_and_acceptance(paceline):
    router = ScriptedRouter({"/v1/cluster": says(REPORT)})
    with router.running():
        code, out, err = paceline("status", "--url", router.url)
    assert (code, err) == (0, "")
    lines = [line.split() for line in out.splitlines() if line]
    assert out.startswith("speculative for 42 s: auto: 2.0 running per verifier, below 12\n")
    assert lines[1][-3:] == ["position:", "80%", "50%"]
    del lines[1]
    assert lines[1] == ["ROUTER", "READY", "IN", "FLIGHT", "NODE", "PID"]
    assert lines[2] == ["router00", "yes", "3", "node0000", "11"]
    assert lines[4] == ["verifier", "ready", "2", "1", "5/80", "31.3", "6", "tiny", "10.0.0.1:4000"]
    assert lines[6][:3] == ["drafter1", "ready", "2"]
    assert "62.5%" in lines[6]
    assert lines[7] == ["-", "unused", "0", "0.0", "0.0", "0.0", "-", "-", "-"]


def test_the_columns_are_aligned():
    lines = status.render(REPORT).splitlines()
    drafters = lines[lines.index(next(line for line in lines if line.startswith("DRAFTER"))) :]
    column = drafters[0].index("ADDRESS")
    assert drafters[1][column:] == "10.0.0.2:4000"
    assert drafters[2][column:] == "-"


def test_a_cluster_without_members_says_so():
    text = status.render(REPORT | {"verifiers": [], "drafters": []})
    assert "no verifier runs" in text
    assert "no drafter runs" in text


@pytest.mark.parametrize(
    ("since_s", "shown"), [(0.0, "0 s"), (119.0, "119 s"), (600.0, "10 min"), (90_000.0, "25 h")]
)
def test_the_time_since_the_last_switch(since_s, shown):
    assert status.render(REPORT | {"since_s": since_s}).startswith(f"speculative for {shown}: ")


def test_json_is_the_body_as_it_came(paceline):
    router = ScriptedRouter({"/v1/cluster": says(REPORT | {"new_field": 1})})
    with router.running():
        code, out, err = paceline("status", "--json", "--url", router.url)
    assert (code, err) == (0, "")
    assert json.loads(out) == REPORT | {"new_field": 1}


def test_watch_repeats_until_ctrl_c_and_survives_an_outage():
    answers = iter([says(REPORT), fails(503, "draining"), says(REPORT | {"mode": "plain"})])
    last = says(REPORT | {"mode": "plain"})
    router = ScriptedRouter({"/v1/cluster": lambda handler: next(answers, last)(handler)})
    command = [sys.executable, "-u", "-m", "cluster.cli", "status", "--watch", "--url"]
    with (
        router.running(),
        subprocess.Popen(
            [*command, router.url], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
        ) as process,
    ):
        assert process.stdout is not None
        assert process.stderr is not None
        try:
            first = next(line for line in process.stdout if " for 42 s: " in line)
            second = next(line for line in process.stdout if " for 42 s: " in line)
            process.send_signal(signal.SIGINT)
            assert process.wait(TIMEOUT_S) == 0
        finally:
            process.kill()
        assert (first.split()[0], second.split()[0]) == ("speculative", "plain")
        assert process.stderr.read().count("draining") == 1


def test_watch_fails_if_there_is_nothing_to_watch(paceline):
    router = ScriptedRouter({"/v1/cluster": fails(503, "draining")})
    with router.running():
        code, _, err = paceline("status", "--watch", "--url", router.url)
    assert code == 1
    assert "draining" in err


def test_watch_clears_a_terminal(paceline, terminal, monkeypatch):
    router = ScriptedRouter({"/v1/cluster": says(REPORT)})
    naps = iter([None])

    def nap(seconds):
        if next(naps, "tired") == "tired":
            raise KeyboardInterrupt

    monkeypatch.setattr("time.sleep", nap)
    terminal()
    with router.running():
        code, out, _ = paceline("status", "--watch", "--url", router.url)
    assert code == 0
    assert out.count("\x1b[H\x1b[2J") == 1
