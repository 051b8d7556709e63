"""A replica's own memory is looked through once, and not again."""

from __future__ import annotations

import subprocess
import sys

COUNT = """
import gc
import router.service
from cluster.collector import spare_what_is_loaded
before = len(gc.get_objects())
spare_what_is_loaded()
print(before, len(gc.get_objects()), gc.get_freeze_count())
"""


def test_what_is_loaded_is_not_looked_at_again() -> None:
    said = subprocess.run(
        [sys.executable, "-c", COUNT], check=True, capture_output=True, text=True
    ).stdout
    before, left, spared = map(int, said.split())
    assert before > 10_000
    assert left < 1_000
    assert spared > before / 2
