"""A process that stands still, with proof: SIGSTOP may take effect after `os.kill` has returned."""

from __future__ import annotations

import os
import signal
from pathlib import Path

from tests.support.polling import eventually


async def stand_still(pid: int) -> None:
    """SIGSTOP, and wait until every thread of the process stands still."""
    os.kill(pid, signal.SIGSTOP)
    await eventually(lambda: stands_still(pid))


def stands_still(pid: int) -> bool:
    tasks = f"/proc/{pid}/task"
    stats = [Path(tasks, thread, "stat").read_text() for thread in os.listdir(tasks)]
    return {stat.rpartition(")")[2].split()[0] for stat in stats} == {"T"}
