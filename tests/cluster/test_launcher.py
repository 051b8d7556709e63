"""What `paceline serve` refuses before it starts anything."""

from __future__ import annotations

import socket
import subprocess
import sys

import pytest


def serve(*arguments):
    command = [sys.executable, "-m", "cluster.cli", "serve", *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)


def test_a_port_that_is_taken_is_named():
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        done = serve("--port", port)
    assert done.returncode == 1
    assert f"cannot listen on 127.0.0.1:{port}" in done.stderr
    assert "--port" in done.stderr


@pytest.mark.parametrize(
    ("text", "told"),
    [(None, "cannot read"), ("a: [", "is not YAML"), ("a: 1", "has no `applications`")],
)
def test_a_config_that_is_none_is_refused(tmp_path, text, told):
    path = tmp_path / "config.yaml"
    if text is not None:
        path.write_text(text)
    done = serve("--config", path)
    assert done.returncode == 1
    assert told in done.stderr


@pytest.mark.parametrize("port", ["0", "65536", "x"])
def test_a_port_that_is_none_is_bad_usage(port):
    assert serve("--port", port).returncode == 2
