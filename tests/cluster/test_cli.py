"""What every command has in common: usage, exit codes, a server that is not there or is another."""

from __future__ import annotations

import os
import socket
import subprocess
import sys

import pytest

from cluster import cli
from tests.cluster.scripted_router import MODELS, ScriptedRouter, fails, says

REPORT_OF_NOTHING = {
    "mode": "plain",
    "reason": "none",
    "since_s": 0.0,
    "acceptance_per_position": [],
    "routers": [],
    "verifiers": [],
    "drafters": [],
}
COMMANDS = [("status",), ("chat", "hello")]


@pytest.mark.parametrize(
    "argv",
    [
        (),
        ("fly",),
        ("serve", "--port", "0"),
        ("serve", "--port", "65536"),
        ("serve", "--port", "http"),
        ("status", "--verbose"),
        ("status", "extra"),
        ("chat", "one", "two"),
        *[("status", "--url", url) for url in ("localhost", "ftp://a", "http://", "http://a:b")],
    ],
)
def test_bad_usage_is_exit_code_2_and_says_what_is_wrong(argv, capsys):
    with pytest.raises(SystemExit) as exit_:
        cli.main(argv)
    assert exit_.value.code == 2
    assert "usage: paceline" in capsys.readouterr().err


@pytest.mark.parametrize("argv", [("--help",), ("status", "--help"), ("chat", "--help")])
def test_help_is_exit_code_0(argv, capsys):
    with pytest.raises(SystemExit) as exit_:
        cli.main(argv)
    assert exit_.value.code == 0
    assert "usage: paceline" in capsys.readouterr().out


@pytest.mark.parametrize("argv", COMMANDS)
def test_a_server_that_is_not_there(argv, paceline):
    with socket.socket() as unheard:  # Bound and not listening: nobody else takes the port.
        unheard.bind(("127.0.0.1", 0))
        url = f"http://127.0.0.1:{unheard.getsockname()[1]}"
        code, out, err = paceline(*argv, "--url", url)
    assert (code, out) == (1, "")
    assert url in err
    assert "refused" in err
    assert "make serve" in err


@pytest.mark.parametrize("argv", COMMANDS)
def test_a_server_that_hangs_up(argv, paceline):
    def hang_up(handler):
        handler.close_connection = True

    router = ScriptedRouter({"/v1/cluster": hang_up, "/v1/models": hang_up})
    with router.running():
        code, out, err = paceline(*argv, "--url", router.url)
    assert (code, out) == (1, "")
    assert "make serve" in err


@pytest.mark.parametrize("argv", COMMANDS)
def test_a_server_that_does_not_answer(argv, paceline, monkeypatch):
    monkeypatch.setattr("cluster.commands.api_client.REPLY_TIMEOUT_S", 0.05)
    with socket.socket() as silent:
        silent.bind(("127.0.0.1", 0))
        silent.listen()
        code, out, err = paceline(*argv, "--url", f"http://127.0.0.1:{silent.getsockname()[1]}")
    assert (code, out) == (1, "")
    assert "timed out" in err


@pytest.mark.parametrize("argv", COMMANDS)
@pytest.mark.parametrize(
    "answer",
    [
        says("<html>It works</html>"),
        says([1, 2]),
        says({}),
        says({"mode": "plain", "data": [{}]}),
        says("not found", 404),
        says({"detail": "Not Found"}, 404),
        says({"error": "down"}, 500),
    ],
)
def test_a_server_that_is_no_router(argv, answer, paceline):
    router = ScriptedRouter({"/v1/cluster": answer, "/v1/models": answer})
    with router.running():
        code, out, err = paceline(*argv, "--url", router.url)
    assert (code, out) == (1, "")
    assert "does not answer as a Paceline router does" in err
    assert "--url" in err


@pytest.mark.parametrize("argv", COMMANDS)
def test_a_router_that_is_not_ready(argv, paceline):
    answer = fails(503, "no verifier is running yet", retry_after="2")
    router = ScriptedRouter({"/v1/cluster": answer, "/v1/models": answer})
    with router.running():
        code, out, err = paceline(*argv, "--url", router.url)
    assert (code, out) == (1, "")
    assert "no verifier is running yet" in err
    assert "Try again in 2 s" in err


def test_output_that_nobody_reads_ends_quietly():
    router = ScriptedRouter({"/v1/models": says(MODELS), "/v1/cluster": says(REPORT_OF_NOTHING)})
    with router.running():
        reader, writer = os.pipe()
        os.close(reader)
        command = [sys.executable, "-m", "cluster.cli", "status", "--url", router.url]
        result = subprocess.run(
            command, stdout=writer, stderr=subprocess.PIPE, text=True, check=False, timeout=60
        )
        os.close(writer)
    assert result.returncode == 1
    assert result.stderr == ""


def test_the_other_commands_start_without_ray():
    program = "import sys, cluster.cli; print('ray' in sys.modules, 'grpc' in sys.modules)"
    command = [sys.executable, "-c", program]
    result = subprocess.run(command, capture_output=True, text=True, check=True, timeout=60)
    assert result.stdout.split() == ["False", "False"]
