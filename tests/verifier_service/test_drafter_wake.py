"""Drafters that sleep are called for as long as they are wanted, one call at a time."""

from __future__ import annotations

import asyncio

from ray.exceptions import RayError

from tests.support.polling import eventually
from verifier_service.drafter_wake import DrafterWake


class Deployment:
    """Its drafters come with the third call; the first ends in an error, the second never."""

    def __init__(self) -> None:
        self.num_calls = self.num_open = 0
        self.awake = False

    def lacks(self) -> bool:
        return not self.awake

    async def call(self) -> None:
        self.num_calls += 1
        self.num_open += 1
        try:
            assert self.num_open == 1
            if self.num_calls == 1:
                raise RayError
            if self.num_calls == 2:
                await asyncio.Event().wait()
            self.awake = True
        finally:
            self.num_open -= 1


async def test_calls_go_on_until_drafters_are_there():
    deployment = Deployment()
    wake = DrafterWake(deployment.lacks, deployment.call, look_s=0.001, call_timeout_s=0.05)
    await eventually(lambda: deployment.awake)
    assert deployment.num_calls == 3
    deployment.awake = False
    await eventually(lambda: deployment.awake)
    wake.close()
