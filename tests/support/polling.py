"""Waiting for something to become true, with a deadline."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable


async def eventually(
    condition: Callable[[], object], timeout_s: float = 5.0, every_s: float = 0.002
) -> float:
    """Wait until `condition()` is true; returns how long it took, in seconds."""
    start = time.monotonic()
    while not condition():
        if time.monotonic() - start > timeout_s:
            raise AssertionError(f"not true within {timeout_s:g} s")
        await asyncio.sleep(every_s)
    return time.monotonic() - start
