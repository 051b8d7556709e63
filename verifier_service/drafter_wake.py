"""Wakes drafters that were scaled to zero: one call at a time, which waits for a replica."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable

from ray.exceptions import RayError

logger = logging.getLogger("ray.serve")

LOOK_S = 1.0
"""Between two looks at whether drafters are wanted."""
CALL_TIMEOUT_S = 60.0
"""For a call. A replica that takes longer to start is called again, which changes nothing."""


class DrafterWake:
    """Make it inside a running event loop. `lacks` says whether sequences want drafters that are
    not there, `call` calls the deployment's handle and waits for a replica."""

    def __init__(
        self,
        lacks: Callable[[], bool],
        call: Callable[[], Awaitable[None]],
        look_s: float = LOOK_S,
        call_timeout_s: float = CALL_TIMEOUT_S,
    ) -> None:
        self._lacks = lacks
        self._call = call
        self._look_s = look_s
        self._call_timeout_s = call_timeout_s
        self._task = asyncio.create_task(self._watch())

    def close(self) -> None:
        self._task.cancel()

    async def _watch(self) -> None:
        while True:
            if self._lacks():
                logger.info("no drafter is there and sequences want one: waking the deployment")
                try:
                    async with asyncio.timeout(self._call_timeout_s):
                        await self._call()
                except (TimeoutError, RayError) as error:
                    logger.warning("no drafter woke: %s", error or "the call took too long")
            await asyncio.sleep(self._look_s)
