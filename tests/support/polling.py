"""Waiting for something to become true, with a deadline that a busy machine keeps."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable

TIMEOUT_S = 60.0


async def eventually(
    condition: Callable[[], object], timeout_s: float = TIMEOUT_S, every_s: float = 0.002
) -> float:
    """Wait until `condition()` is true; returns how long it took, in seconds."""
    start = time.monotonic()
    while not condition():
        if time.monotonic() - start > timeout_s:
            raise AssertionError(f"not true within {timeout_s:g} s")
        await asyncio.sleep(every_s)
    return time.monotonic() - start


async def until(condition: Callable[[], Awaitable[object]], timeout_s: float) -> None:
    """The same for what has to be awaited."""
    start = time.monotonic()
    while not await condition():
        assert time.monotonic() - start < timeout_s, f"not true within {timeout_s:g} s"
        await asyncio.sleep(0.02)
