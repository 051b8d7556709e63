"""What every member imports stays light."""

from __future__ import annotations

import subprocess
import sys

import pytest

HEAVY = ("torch", "transformers", "ray", "engine", "router", "verifier_service", "drafter_service")


@pytest.mark.parametrize(
    "modules",
    [
        "cluster.types, cluster.errors, cluster.load, cluster.config",
        "cluster.protocol.messages, cluster.protocol.codec, cluster.protocol.prefix_hash",
        "cluster.rpc, cluster.fingerprint",
        "cluster.cli, cluster.commands.status, cluster.commands.chat",
    ],
)
def test_they_bring_nothing_heavy(modules):
    assert imported_by(modules) == []


def test_the_test_would_see_it():
    assert "ray" in imported_by("cluster.membership")


def imported_by(modules: str) -> list[str]:
    """Heavy modules that a fresh interpreter has after importing these."""
    program = f"import sys, {modules}; print(*[n for n in {HEAVY} if n in sys.modules])"
    command = [sys.executable, "-c", program]
    result = subprocess.run(command, capture_output=True, text=True, check=True, timeout=60)
    return result.stdout.split()
