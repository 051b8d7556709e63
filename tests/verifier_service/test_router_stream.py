"""What a verifier owes to a router that says nothing: no requests for ever, and few reports."""

from __future__ import annotations

import asyncio
import time

from cluster.load import DrafterLoad, DrafterState
from cluster.protocol.messages import RouterBatch
from cluster.types import ErrorEvent
from tests.support.polling import eventually
from tests.support.raw_router import RawRouter, engineless_verifier, every
from verifier_service.events import Cancelled, Submitted

LEASE_MS = 2_500
"""Longer than what a check counts where this machine stood still (cluster/lease.py)."""


async def test_what_runs_for_a_router_that_falls_silent_is_freed():
    async with engineless_verifier() as verifier, RawRouter(verifier.address, LEASE_MS) as router:
        await router.submit("a", "b")
        await eventually(lambda: verifier.servicer.num_requests == 2)
        submitted = [message.seq for message in verifier.inbox if isinstance(message, Submitted)]
        # Its heart beats: messages that say nothing.
        await every(0.1, lambda: router.send(RouterBatch()), 1.5 * LEASE_MS / 1e3)
        assert verifier.servicer.num_requests == 2
        assert verifier.servicer.num_expired == 0
        # It says nothing more, though its stream is open and it reads.
        silent_s = await eventually(lambda: verifier.servicer.num_requests == 0)
        assert silent_s > LEASE_MS / 1e3 / 2
        assert verifier.servicer.num_expired == 2
        cancelled = [message.seq for message in verifier.inbox if isinstance(message, Cancelled)]
        assert cancelled == submitted
        assert verifier.servicer.num_streams == 1
        await eventually(lambda: len(router.events) == 2)
        for event, name in zip(router.events, ("a", "b"), strict=True):
            assert isinstance(event, ErrorEvent)
            assert (event.request_id, event.kind) == (name, "UpstreamLostError")
        # It comes back to life on the same stream.
        await router.submit("a")
        await eventually(lambda: verifier.servicer.num_requests == 1)


async def test_without_a_lease_silence_means_nothing():
    async with engineless_verifier() as verifier, RawRouter(verifier.address) as router:
        await router.submit("a")
        await eventually(lambda: verifier.servicer.num_requests == 1)
        await asyncio.sleep(1.5 * LEASE_MS / 1e3)
        assert verifier.servicer.num_requests == 1


async def test_an_idle_router_is_silent_and_its_lease_is_fresh_when_it_submits():
    async with engineless_verifier() as verifier, RawRouter(verifier.address, LEASE_MS) as router:
        await asyncio.sleep(1.5 * LEASE_MS / 1e3)
        await router.submit("a")
        await eventually(lambda: verifier.servicer.num_requests == 1)
        await every(0.1, lambda: router.send(RouterBatch()), LEASE_MS / 1e3)
        assert (verifier.servicer.num_requests, verifier.servicer.num_expired) == (1, 0)


async def num_reports(router: RawRouter, within_s: float) -> int:
    before = len(router.batches)
    await asyncio.sleep(within_s)
    return len(router.batches) - before


async def test_load_is_reported_often_where_requests_run_and_seldom_elsewhere():
    async with (
        engineless_verifier() as verifier,
        RawRouter(verifier.address) as busy,
        RawRouter(verifier.address) as idle,
    ):
        await busy.submit("a")
        await eventually(lambda: busy.batches and idle.batches)
        started = time.monotonic()
        often, seldom = await asyncio.gather(num_reports(busy, 1.5), num_reports(idle, 1.5))
        assert seldom <= 1 + time.monotonic() - started
        assert often > 2 * seldom, "it is reported every 0.1 s"
        await idle.send(RouterBatch(load_interval_ms=60_000))
        await num_reports(idle, 1.1)
        assert await num_reports(idle, 1.2) == 0
        # News of drafters does not wait.
        verifier.report_drafters(DrafterLoad("d", DrafterState.READY))
        await eventually(lambda: idle.batches[-1].load.drafters, 30)


async def test_what_was_freed_is_reported_soon():
    async with engineless_verifier() as verifier, RawRouter(verifier.address) as router:
        await router.send(RouterBatch(load_interval_ms=60_000))
        await router.submit("a")
        await eventually(lambda: verifier.servicer.num_requests == 1)
        await router.send(RouterBatch(cancels=("a",)))
        await eventually(lambda: verifier.servicer.num_requests == 0)
        before = len(router.batches)
        await eventually(lambda: len(router.batches) > before, 30)
