"""`paceline serve` as a process: the three applications on a Ray cluster of their own."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any, Self

import httpx
import psutil

START_TIMEOUT_S = 240.0
STOP_TIMEOUT_S = 20.0
"""The contract: Ctrl-C stops everything within 20 s."""
REPOSITORY = Path(__file__).parents[2]


class LocalSystem:
    """Use as a context manager."""

    def __init__(self, config: Path | None = None, port: int = 8911) -> None:
        self.url = f"http://127.0.0.1:{port}"
        self.started_in_s = 0.0
        self._command = [sys.executable, "-m", "cluster.cli", "serve", "--port", str(port)]
        if config is not None:
            self._command += ["--config", str(config)]
        self._log = tempfile.NamedTemporaryFile("w+", suffix=".log")  # noqa: SIM115
        self._process: subprocess.Popen[str] | None = None

    def __enter__(self) -> Self:
        started = time.monotonic()
        self._process = subprocess.Popen(
            self._command,
            cwd=REPOSITORY,
            stdout=self._log,
            stderr=subprocess.STDOUT,
            text=True,
            env={**os.environ, "OMP_NUM_THREADS": "1", "RAY_USAGE_STATS_ENABLED": "0"},
            start_new_session=True,  # So that a Ctrl-C at the test's terminal is not for it.
        )
        while not self._is_ready():
            if self._process.poll() is not None or time.monotonic() - started > START_TIMEOUT_S:
                self.stop()
                raise AssertionError(f"the system did not start:\n{self.log}")
            time.sleep(0.25)
        self.started_in_s = time.monotonic() - started
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    def stop(self, signum: int = signal.SIGINT) -> int:
        """Signal it once and wait; returns its exit status. Idempotent."""
        assert self._process is not None
        if self._process.poll() is None:
            self._process.send_signal(signum)
        return self._process.wait(2 * STOP_TIMEOUT_S)

    @property
    def log(self) -> str:
        return Path(self._log.name).read_text()

    def processes(self) -> list[psutil.Process]:
        """Every process that it started, itself first."""
        assert self._process is not None
        root = psutil.Process(self._process.pid)
        return [root, *root.children(recursive=True)]

    def cluster(self) -> dict[str, Any]:
        """GET /v1/cluster."""
        report: dict[str, Any] = httpx.get(f"{self.url}/v1/cluster", timeout=10).json()
        return report

    def _is_ready(self) -> bool:
        try:
            return httpx.get(f"{self.url}/health/ready", timeout=2).status_code == 200
        except httpx.TransportError:
            return False
