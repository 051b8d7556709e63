"""A Ray cluster as its users start one: `ray start`, and Ray's commands asked from outside.

Token authentication is on, and every port and folder is the cluster's own. Nodes end by a signal to
the `ray start --block` that holds them, never by `ray stop`, which ends every Ray of the machine.
"""

from __future__ import annotations

import contextlib
import json
import os
import secrets
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any, Self

import httpx
import psutil

from tests.support.local_system import REPOSITORY
from tests.support.ray_nodes import free_port

START_TIMEOUT_S = 120.0
COMMAND_TIMEOUT_S = 180.0
STOP_TIMEOUT_S = 40.0
_NODE_OPTIONS = (
    "--node-ip-address=127.0.0.1",
    "--num-cpus=4",
    f"--object-store-memory={80 << 20}",
)
MARK = "PACELINE_TEST_CLUSTER"
"""In the environment of every process of a cluster, whoever its parent is by now."""


class RayCommandLine:
    """Use as a context manager; entering starts the head."""

    def __init__(self) -> None:
        # Not below a test's own folder: the path of a Unix socket has at most 107 characters.
        self.folder = Path(tempfile.mkdtemp(prefix="ray-"))
        self.address = f"127.0.0.1:{free_port()}"
        self.dashboard = f"http://127.0.0.1:{free_port()}"
        self.token = secrets.token_hex(32)
        token_file = self.folder / "auth_token"
        token_file.write_text(self.token)
        self._mark = secrets.token_hex(8)
        self._nodes: list[subprocess.Popen[bytes]] = []
        inherited = {k: v for k, v in os.environ.items() if not k.startswith("RAY_")}
        self._environment = inherited | {
            "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}",
            "RAY_AUTH_MODE": "token",
            "RAY_AUTH_TOKEN_PATH": str(token_file),
            "RAY_TMPDIR": str(self.folder),
            "RAY_USAGE_STATS_ENABLED": "0",
            "OMP_NUM_THREADS": "1",
            "TOKENIZERS_PARALLELISM": "false",
            MARK: self._mark,
        }

    def __enter__(self) -> Self:
        port, dashboard_port = (url.rpartition(":")[2] for url in (self.address, self.dashboard))
        with contextlib.ExitStack() as stack:
            stack.callback(self._end)
            self._start(
                "--head",
                f"--port={port}",
                f"--dashboard-port={dashboard_port}",
                f"--ray-client-server-port={free_port()}",
            )
            self._wait_for_nodes(1)
            stack.pop_all()
        return self

    def __exit__(self, *_: object) -> None:
        self._end()

    def add_node(self, role: str) -> None:
        """Start another node, which has its role as a label, and wait for it."""
        self._start(f"--address={self.address}", f"--labels=paceline-role={role}")
        self._wait_for_nodes(len(self._nodes))

    def run(self, *command: str) -> str:
        """Run one of Ray's commands, as `run("serve", "status")`; what it printed. Fails if the
        command does."""
        done = subprocess.run(
            command,
            cwd=REPOSITORY,
            env=self._environment | {"RAY_API_SERVER_ADDRESS": self.dashboard},
            capture_output=True,
            text=True,
            timeout=COMMAND_TIMEOUT_S,
            check=False,
        )
        assert done.returncode == 0, f"{command}: {done.stdout}{done.stderr}\n{self.log}"
        return done.stdout

    def submit_job(self, *command: str, role: str = "") -> str:
        """Run it by `ray job submit`, with the runtime environment of our jobs, on a node with this
        role if one is given; what it printed."""
        submit = ["ray", "job", "submit", "--runtime-env", "cluster/jobs/runtime_env.yaml"]
        if role:
            submit += ["--entrypoint-label-selector", json.dumps({"paceline-role": role})]
        name = f"job-{secrets.token_hex(4)}"
        printed = self.run(*submit, "--submission-id", name, "--", *command)
        # The command ends with the log's stream, which may be before the job's end.
        deadline = time.monotonic() + COMMAND_TIMEOUT_S
        while (job := self.get(f"/api/jobs/{name}"))["status"] in ("PENDING", "RUNNING"):
            assert time.monotonic() < deadline, job
            time.sleep(0.5)
        assert job["status"] == "SUCCEEDED", f"{job}\n{printed}"
        return printed

    def get(self, path: str) -> Any:
        """What the dashboard answers, as JSON."""
        headers = {"Authorization": f"Bearer {self.token}"}
        return httpx.get(f"{self.dashboard}{path}", headers=headers, timeout=10).json()

    def stop(self) -> list[int]:
        """End the nodes, the head last; their exit statuses. Idempotent."""
        for node in reversed(self._nodes):
            if node.poll() is None:
                node.send_signal(signal.SIGTERM)
            node.wait(STOP_TIMEOUT_S)
        return [node.returncode for node in self._nodes]

    def processes(self) -> list[psutil.Process]:
        """Every process of the cluster that there is."""
        return [process for process in psutil.process_iter() if self._is_ours(process)]

    @property
    def log(self) -> str:
        """What the nodes printed."""
        return "\n".join(path.read_text() for path in sorted(self.folder.glob("node-*.log")))

    def _end(self) -> None:
        try:
            self.stop()
        finally:
            for process in self.processes():
                process.kill()
            shutil.rmtree(self.folder, ignore_errors=True)

    def _start(self, *options: str) -> None:
        log = self.folder / f"node-{len(self._nodes)}.log"
        with log.open("wb") as file:
            node = subprocess.Popen(
                ("ray", "start", "--block", *_NODE_OPTIONS, *options),
                env=self._environment,
                stdout=file,
                stderr=subprocess.STDOUT,
                start_new_session=True,  # A Ctrl-C at the test's terminal is not for it.
            )
        self._nodes.append(node)

    def _wait_for_nodes(self, count: int) -> None:
        deadline = time.monotonic() + START_TIMEOUT_S
        while self._num_nodes() != count:
            assert self._nodes[-1].poll() is None, f"the node has ended: {self.log}"
            assert time.monotonic() < deadline, f"no node in {START_TIMEOUT_S:g} s: {self.log}"
            time.sleep(0.2)

    def _num_nodes(self) -> int:
        try:
            nodes = self.get("/api/v0/nodes")["data"]["result"]["result"]
        except (httpx.TransportError, ValueError, KeyError, TypeError):
            return 0  # It does not listen yet, or knows nothing yet.
        return sum(node["state"] == "ALIVE" for node in nodes)

    def _is_ours(self, process: psutil.Process) -> bool:
        try:
            return process.environ().get(MARK) == self._mark
        except psutil.Error:
            return False
