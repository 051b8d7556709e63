"""The router stays light."""

from __future__ import annotations

import subprocess
import sys

PROGRAM = """
import sys
import router.api
heavy = {"torch", "transformers", "engine", "verifier_service", "drafter_service", "ray"}
print(*sorted(heavy & sys.modules.keys()))
"""


def test_the_router_imports_nothing_heavy() -> None:
    result = subprocess.run(
        [sys.executable, "-c", PROGRAM], capture_output=True, text=True, check=True, timeout=60
    )
    assert result.stdout.split() == []
