"""A Ray cluster of several nodes on this machine: a real GCS and a raylet for each node.

The three applications are deployed on it from a Serve config as `serve deploy` does it. Nodes are
killed as a machine dies: all their processes at once, by SIGKILL.
"""

from __future__ import annotations

import os
import signal
import socket
import time
from typing import Any, Self

import httpx
import psutil
from ray._private.node import Node
from ray.cluster_utils import Cluster
from ray.dashboard.modules.serve.sdk import ServeSubmissionClient

from tests.support.local_system import REPOSITORY

READY_TIMEOUT_S = 180.0
EXIT_TIMEOUT_S = 10.0
NUM_CPUS = 2
"""That each node says it has. Ray starts as many workers at once, wanted or not."""
ENVIRONMENT = {
    "RAY_AUTH_MODE": "disabled",
    "RAY_SERVE_PROXY_READY_CHECK_TIMEOUT_S": "60",  # Five proxies start at once on a small machine.
    "RAY_USAGE_STATS_ENABLED": "0",
    "OMP_NUM_THREADS": "1",
    "TOKENIZERS_PARALLELISM": "false",
    "PYTHONPATH": str(REPOSITORY),
}
"""Of raylets, and so of the workers that they start."""
FAST_DEATH = {
    "health_check_initial_delay_ms": 0,
    "health_check_period_ms": 500,
    "health_check_timeout_ms": 500,
    "health_check_failure_threshold": 3,
}
"""A dead node is known to be dead after 1.5 s instead of 13."""

Config = dict[str, Any]


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


class RayNodes:
    """Use as a context manager. Nodes are added by role, which is their label."""

    def __init__(self) -> None:
        self.port = free_port()
        self.url = f"http://127.0.0.1:{self.port}"
        self._before = {name: os.environ.get(name) for name in ENVIRONMENT}
        self._nodes: dict[str, Node] = {}
        """Workers, by Ray's id of the node."""

    def __enter__(self) -> Self:
        os.environ |= ENVIRONMENT
        self._cluster = Cluster(
            initialize_head=True,
            head_node_args={
                "num_cpus": NUM_CPUS,
                "object_store_memory": 80 << 20,
                "include_dashboard": True,
                "dashboard_port": free_port(),
                "labels": {"paceline-role": "router"},
                "_system_config": FAST_DEATH,
            },
        )
        self.dashboard = f"http://{self._cluster.head_node.webui_url}"
        self._client = ServeSubmissionClient(self.dashboard)
        return self

    def __exit__(self, *_: object) -> None:
        try:
            self._client.delete_applications()
        finally:
            self._cluster.shutdown()
            for name, value in self._before.items():
                if value is None:
                    del os.environ[name]
                else:
                    os.environ[name] = value

    # --- nodes ---

    def add(self, role: str) -> str:
        """Start a node of this role; its id. Only in the main thread, because Ray sets signals."""
        node = self._cluster.add_node(
            num_cpus=NUM_CPUS, object_store_memory=80 << 20, labels={"paceline-role": role}
        )
        self._nodes[node.node_id] = node
        return str(node.node_id)

    def kill(self, node_id: str) -> None:
        """SIGKILL every process of a node, and see that all are dead."""
        node = self._nodes.pop(node_id)
        processes = [
            psutil.Process(info.process.pid)
            for infos in node.all_processes.values()
            for info in infos
        ]
        victims = [*processes, *(c for p in processes for c in p.children(recursive=True))]
        assert len(victims) > 1, "no replica ran there"
        for victim in victims:
            if victim.is_running():
                victim.send_signal(signal.SIGKILL)
        self._cluster.remove_node(node, allow_graceful=False)
        _, alive = psutil.wait_procs(victims, timeout=EXIT_TIMEOUT_S)
        assert not alive

    def kill_serve_controller(self) -> None:
        """SIGKILL it, and see that it is dead."""
        [controller] = [
            process
            for process in psutil.Process().children(recursive=True)
            if "ServeController" in process.name() or "ServeController" in _command(process)
        ]
        controller.kill()
        controller.wait(EXIT_TIMEOUT_S)

    # --- applications ---

    def deploy(self, config: Config) -> None:
        """As `serve deploy`; what has not changed keeps running."""
        self._client.deploy_applications(config)

    def cluster(self) -> dict[str, Any]:
        """GET /v1/cluster."""
        report: dict[str, Any] = httpx.get(f"{self.url}/v1/cluster", timeout=10).json()
        return report

    def wait_for_members(self, **counts: int) -> dict[str, Any]:
        """Until the system is ready and lists so many `verifiers`, so many ready `drafters`."""
        deadline = time.monotonic() + READY_TIMEOUT_S
        report: dict[str, Any] = {}
        while time.monotonic() < deadline:
            if self._is_ready():
                report = self.cluster()
                if all(len(_usable(report[kind])) == count for kind, count in counts.items()):
                    return report
            time.sleep(0.2)
        raise AssertionError(f"not {counts} within {READY_TIMEOUT_S:.0f} s: {self._why(report)}")

    def _is_ready(self) -> bool:
        try:
            return httpx.get(f"{self.url}/health/ready", timeout=5).status_code == 200
        except httpx.TransportError:
            return False

    def _why(self, report: dict[str, Any]) -> str:
        details = self._client.get_serve_details()["applications"]
        states = {
            name: (application["status"], application["message"])
            for name, application in details.items()
        }
        return f"{states}\n{report}"


def _usable(members: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [member for member in members if member.get("state", "ready") == "ready"]


def _command(process: psutil.Process) -> str:
    try:
        return " ".join(process.cmdline())
    except psutil.Error:
        return ""
