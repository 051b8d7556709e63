"""Runs the whole system on this machine: a Ray cluster of our own, with the Serve YAML deployed on
it by the request that `serve deploy` makes too. Everything it started ends with it."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import sys
import threading
import time
import urllib.error
import urllib.request
from pathlib import Path
from typing import Any

import psutil
import ray
import yaml
from ray.dashboard.modules.serve.sdk import ServeSubmissionClient

from cluster.commands.command_error import CommandError

READY_TIMEOUT_S = 900.0
"""The first start converts or downloads the model."""
_POLL_S = 0.5
_HAPROXY_PORTS = (
    "RAY_SERVE_HAPROXY_STATS_PORT",
    "RAY_SERVE_HAPROXY_METRICS_PORT",
    "RAY_SERVE_FALLBACK_PROXY_HTTP_PORT",
    "RAY_SERVE_FALLBACK_PROXY_GRPC_PORT",
)
_DRAIN_TIMEOUT_S = 12.0
_EXIT_TIMEOUT_S = 5.0
_MIN_LOGICAL_CPUS = 8
"""Ray's CPUs are bookkeeping; a small laptop must be able to place every replica."""


class LaunchError(CommandError):
    """The system did not come up; the message says why."""


def run(config_path: Path, port: int | None) -> None:
    """Serve until SIGINT or SIGTERM. Raise LaunchError if the system does not get ready."""
    stop = threading.Event()
    config = _load_config(config_path, port)
    _check_port_is_free(config)
    _prepare_haproxy()
    try:
        _start(config, stop)
        if not stop.is_set():
            _print_welcome(_url(config))
            stop.wait()
    finally:
        _say("stopping")
        _stop()


def _check_port_is_free(config: dict[str, Any]) -> None:
    """Another server there would answer in our place."""
    host, port = _host_and_port(config)
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host, port))
        except OSError as error:
            raise LaunchError(
                f"cannot listen on {host}:{port}: {error.strerror}; choose another with --port, "
                f"or PORT=... make serve"
            ) from error


def _prepare_haproxy() -> None:
    """With RAY_SERVE_ENABLE_HA_PROXY=1, Serve's HAProxy ingress on free ports, so that two systems
    fit on one machine. Set before Ray starts, because its processes inherit it; what the user has
    set stays.

    It brings the first token some 10 ms earlier than Serve's Python proxy, and is not the default
    because it notices a client that leaves only when it next writes to it, and spins until then.
    """
    if os.environ.get("RAY_SERVE_ENABLE_HA_PROXY") != "1":
        return
    settings = {
        "RAY_SERVE_HAPROXY_NBTHREAD": "1",
        "RAY_SERVE_DIRECT_INGRESS_MIN_DRAINING_PERIOD_S": "0",
    }
    settings |= {name: str(_free_port()) for name in _HAPROXY_PORTS}
    for name, value in settings.items():
        os.environ.setdefault(name, value)


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def _start(config: dict[str, Any], stop: threading.Event) -> None:
    _say("starting Ray")
    context = ray.init(
        address="local",
        num_cpus=max(_MIN_LOGICAL_CPUS, os.cpu_count() or 1),
        include_dashboard=True,
        log_to_driver=False,
        object_store_memory=128 << 20,  # Tokens never pass through it.
        logging_level="warning",
    )
    for signum in (signal.SIGINT, signal.SIGTERM):  # After Ray, which sets its own.
        signal.signal(signum, lambda *_: stop.set())
    dashboard = f"http://{context.dashboard_url}"
    client = ServeSubmissionClient(dashboard)
    _say(f"deploying the applications (dashboard: {dashboard})")
    client.deploy_applications(config)
    _wait_until_ready(client, _url(config), stop)


def _wait_until_ready(client: ServeSubmissionClient, url: str, stop: threading.Event) -> None:
    deadline = time.monotonic() + READY_TIMEOUT_S
    seen: dict[str, str] = {}
    while not stop.is_set():
        applications = client.get_serve_details()["applications"]
        for name, details in applications.items():
            status = details["status"]
            if seen.get(name) != status:
                seen[name] = status
                _say(f"  {name}: {status.lower()}")
            if status == "DEPLOY_FAILED":
                raise LaunchError(f"application {name} failed to start: {_why(details)}")
        if _is_ready(url):
            return
        if time.monotonic() > deadline:
            raise LaunchError(f"{url}/health/ready did not answer within {READY_TIMEOUT_S:.0f} s")
        stop.wait(_POLL_S)


def _why(application: dict[str, Any]) -> str:
    messages = [application["message"]]
    messages += [deployment["message"] for deployment in application["deployments"].values()]
    return "\n".join(filter(None, messages))


def _is_ready(url: str) -> bool:
    try:
        with urllib.request.urlopen(f"{url}/health/ready", timeout=2) as response:
            return bool(response.status == 200)
    except (urllib.error.URLError, TimeoutError, ConnectionError):
        return False


def _stop() -> None:
    """Drain the applications, end Ray, and see that every process we started is gone."""
    from ray import serve  # Reads the settings of the ingress when it is imported.

    started = psutil.Process().children(recursive=True)
    if ray.is_initialized():
        # A thread, because a Ray that is itself in trouble may never answer.
        drain = threading.Thread(target=serve.shutdown, daemon=True)
        drain.start()
        drain.join(_DRAIN_TIMEOUT_S)
        ray.shutdown()
    _, left = psutil.wait_procs(started, timeout=_EXIT_TIMEOUT_S)
    for process in left:
        with contextlib.suppress(psutil.NoSuchProcess):
            process.kill()


def _load_config(path: Path, port: int | None) -> dict[str, Any]:
    try:
        config = yaml.safe_load(path.read_text())
    except OSError as error:
        raise LaunchError(f"cannot read {path}: {error.strerror}") from error
    except yaml.YAMLError as error:
        raise LaunchError(f"{path} is not YAML: {error}") from error
    if not isinstance(config, dict) or "applications" not in config:
        raise LaunchError(f"{path} is not a Ray Serve config: it has no `applications`")
    if port is not None:
        config.setdefault("http_options", {})["port"] = port
    return config


def _host_and_port(config: dict[str, Any]) -> tuple[str, int]:
    http = config.get("http_options", {})
    return http.get("host", "127.0.0.1"), http.get("port", 8000)


def _url(config: dict[str, Any]) -> str:
    host, port = _host_and_port(config)
    return f"http://{'127.0.0.1' if host == '0.0.0.0' else host}:{port}"


def _print_welcome(url: str) -> None:
    with urllib.request.urlopen(f"{url}/v1/models", timeout=10) as response:
        model = json.load(response)["data"][0]["id"]
    _say(f"ready: {url}")
    body = {
        "model": model,
        "stream": True,
        "messages": [{"role": "user", "content": "What is a paceline?"}],
    }
    curl = f"curl -N {url}/v1/chat/completions -H 'Content-Type: application/json' -d"
    _say(f"\n  {curl} \\\n    '{json.dumps(body)}'\n")
    _say("Ray's own commands in another shell: RAY_AUTH_MODE=token serve status")
    _say("Ctrl-C stops everything.")


def _say(line: str) -> None:
    print(line, flush=True, file=sys.stdout)
