"""A drafter as a process of its own, to be killed, stopped and drained, with proof that it was."""

from __future__ import annotations

import asyncio
import signal
import sys
from pathlib import Path
from typing import Self

from cluster.rpc import new_incarnation
from cluster.types import Member
from tests.support.polling import TIMEOUT_S
from tests.support.standstill import stand_still, stands_still

REPOSITORY = Path(__file__).parents[2]
START_TIMEOUT_S = 240.0
"""A model is loaded in it."""


class DrafterProcess:
    """`python -m drafter_service` on a free port. Use as an async context manager."""

    def __init__(self, *args: str, port: int = 0) -> None:
        """`args` are given to it as they are."""
        self.args = args
        self.incarnation = new_incarnation()
        self.port = port
        self.address = ""
        self._process: asyncio.subprocess.Process | None = None

    async def __aenter__(self) -> Self:
        self._process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-m", "drafter_service", "--port", str(self.port)),
            *("--incarnation", self.incarnation, *self.args),
            cwd=REPOSITORY,
            stdout=asyncio.subprocess.PIPE,
        )
        assert self._process.stdout is not None
        line = await asyncio.wait_for(self._process.stdout.readline(), START_TIMEOUT_S)
        assert line.startswith(b"listening on "), line
        self.address = line.decode().split()[-1]
        return self

    async def __aexit__(self, *_: object) -> None:
        if self._child.returncode is None:
            self._child.send_signal(signal.SIGKILL)
            await self._child.wait()

    @property
    def member(self) -> Member:
        return Member(self.incarnation, self.address, pid=self._child.pid)

    async def kill(self) -> None:
        """SIGKILL, and wait until it is dead of it."""
        self._child.send_signal(signal.SIGKILL)
        assert await asyncio.wait_for(self._child.wait(), TIMEOUT_S) == -signal.SIGKILL

    async def stop(self) -> None:
        """SIGSTOP, and wait until every thread of it stands still."""
        await stand_still(self._child.pid)

    def resume(self) -> None:
        self._child.send_signal(signal.SIGCONT)

    async def terminate(self) -> int:
        """SIGTERM; returns the exit status."""
        self._child.send_signal(signal.SIGTERM)
        return await asyncio.wait_for(self._child.wait(), TIMEOUT_S)

    def is_stopped(self) -> bool:
        return stands_still(self._child.pid)

    @property
    def _child(self) -> asyncio.subprocess.Process:
        assert self._process is not None
        return self._process
