"""Runs one cell, or a worker's shard of it."""

from __future__ import annotations

import asyncio
import contextlib
import resource
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

import aiohttp

from benchmarks.loadtest.arrivals import Arrival
from benchmarks.loadtest.cell import Cell, ClosedOffer
from benchmarks.loadtest.client import Ask, Clock, Target, http_session, send
from benchmarks.loadtest.offering import WHOLE, Shard, offer_closed, offer_open
from benchmarks.loadtest.profile import Profile
from benchmarks.loadtest.prompts import PromptSource
from benchmarks.loadtest.record import RequestRecord
from benchmarks.loadtest.server import ServerSample, watch_server

Ended = Callable[[RequestRecord], None]


@dataclass
class CellRun:
    """What happened in a cell. Filled while it runs: an interrupted one is worth something."""

    cell: Cell
    records: list[RequestRecord] = field(default_factory=list)
    samples: list[ServerSample] = field(default_factory=list)
    started_s: float = 0.0
    """Since the start of the load test."""
    wall_s: float = 0.0
    """Until its last request had ended."""
    client_cpu_share: float = 0.0
    """Of one core, used by the busiest event loop that generates load."""
    interrupted: bool = False

    @property
    def window_s(self) -> float:
        """Length of the time in which load was offered; rates are counted within it. Where requests
        are counted, until the last one ended."""
        offer = self.cell.level.offer
        if isinstance(offer, ClosedOffer):
            last = offer.phases[-1].until_s
            offered_s = max((r.end_s for r in self.records), default=0.0)
            offered_s = last if offer.num_requests is None else offered_s
        else:
            offered_s = offer.duration_s
        return min(offered_s, self.wall_s) if self.interrupted else offered_s


@dataclass(frozen=True)
class Job:
    """What a worker must know to run cells."""

    profile: Profile
    target: Target
    prompts: PromptSource
    run_name: str
    """Random: no run may read another's prefixes."""
    shard: Shard = WHOLE


def run_cell(job: Job, run: CellRun, ended: Ended) -> None:
    """`offer_cell` from now on. Raises KeyboardInterrupt at Ctrl-C, `run` being filled so far."""
    asyncio.run(offer_cell(job, run, time.perf_counter(), ended))


async def offer_cell(job: Job, run: CellRun, origin: float, ended: Ended) -> None:
    """Offer the cell's load and wait for the ends; `run` is filled on the way, also when this is
    cancelled.

    Args:
        origin: When the cell starts, as time.perf_counter reads.
        ended: Called for each request that has ended.
    """
    raise_file_limit()
    clock = Clock(origin)
    cpu_s, started_s = time.thread_time(), clock.now_s()
    try:
        await _offer(job, run, clock, ended)
    except asyncio.CancelledError:
        run.interrupted = True
        raise
    finally:
        run.wall_s = clock.now_s()
        run.client_cpu_share = (time.thread_time() - cpu_s) / max(1e-9, run.wall_s - started_s)


async def _offer(job: Job, run: CellRun, clock: Clock, ended: Ended) -> None:
    offer = run.cell.level.offer
    async with http_session() as session:
        sending = _Sender(job, run, session, clock, ended)
        with _watching(job, run, clock):
            if isinstance(offer, ClosedOffer):
                await offer_closed(offer, job.shard, clock, sending)
            else:
                await offer_open(offer, job.shard, clock, sending)


class _Sender:
    """Sends a cell's requests by number."""

    def __init__(
        self, job: Job, run: CellRun, session: aiohttp.ClientSession, clock: Clock, ended: Ended
    ) -> None:
        self._job = job
        self._run = run
        self._session = session
        self._clock = clock
        self._ended = ended
        self._fields = {**job.profile.body, **run.cell.arm.body}
        self._salt = f"{job.run_name}-{run.cell.index}"

    async def __call__(
        self, number: int, arrival: Arrival | None, scheduled_s: float
    ) -> RequestRecord:
        cell = self._run.cell
        prompt = self._job.prompts.prompt(cell.first_request + number, arrival)
        ask = Ask(cell.index, number, prompt, self._fields, self._salt, scheduled_s)
        record = await send(self._session, self._job.target, self._clock, ask, self._run.records)
        self._ended(record)
        return record


@contextlib.contextmanager
def _watching(job: Job, run: CellRun, clock: Clock) -> Iterator[None]:
    """The first worker looks at the server meanwhile."""
    if job.shard.index:
        yield
        return
    task = asyncio.create_task(watch_server(job.target, clock, run.samples))
    try:
        yield
    finally:
        task.cancel()


def raise_file_limit() -> None:
    """As many connections as this user may have."""
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
