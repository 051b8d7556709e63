"""The load spread over a Ray cluster: each worker offers a shard of every cell, on one clock.

Ray is imported only where workers are asked for.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Sequence
from dataclasses import replace
from typing import Any, Protocol

from benchmarks.loadtest.cell import Cell
from benchmarks.loadtest.cell_run import CellRun, Ended, Job, offer_cell, run_cell
from benchmarks.loadtest.offering import Shard
from cluster.commands.command_error import CommandError

LEAD_S = 1.0
"""Before a cell starts: by then every worker has heard of it."""
CLOCK_READINGS = 15
STOP_TIMEOUT_S = 30.0


class LoadGenerator(Protocol):
    """Offers the load of a cell."""

    def run(self, run: CellRun, ended: Ended) -> None:
        """Fill `run`. Raises KeyboardInterrupt, `run` being filled as far as it came."""
        ...


class ThisProcess:
    """The load comes from here."""

    def __init__(self, job: Job) -> None:
        self._job = job

    def run(self, run: CellRun, ended: Ended) -> None:
        run_cell(self._job, run, ended)


class Worker:
    """Offers one shard. An actor on an event loop, so that it hears `stop` while it works."""

    def __init__(self, job: Job) -> None:
        self._job = job
        self._task: asyncio.Task[None] | None = None

    async def now(self) -> float:
        """This machine's clock."""
        return time.time()

    async def run(self, cell: Cell, start_at: float) -> CellRun:
        """The shard of a cell that starts when time.time here reads `start_at`."""
        run = CellRun(cell)
        origin = time.perf_counter() + start_at - time.time()
        self._task = asyncio.create_task(offer_cell(self._job, run, origin, lambda _: None))
        with contextlib.suppress(asyncio.CancelledError):
            await self._task
        return run

    async def stop(self) -> None:
        """End the cell that runs."""
        if self._task is not None:
            self._task.cancel()


class RayWorkers:
    """Worker actors, spread over the nodes of the cluster that this process belongs to."""

    def __init__(self, job: Job, count: int) -> None:
        """Raises CommandError if there is no cluster."""
        import ray

        try:
            ray.init(address="auto", ignore_reinit_error=True, log_to_driver=False)
        except ConnectionError:
            raise CommandError(
                "--workers spreads the load over a Ray cluster, and this machine belongs to none. "
                "Submit it (`ray job submit -- paceline loadtest ...`), or leave --workers out"
            ) from None
        self._ray: Any = ray
        actor = ray.remote(Worker).options(num_cpus=1, scheduling_strategy="SPREAD")
        shards = [Shard(index, count) for index in range(count)]
        self._workers = [actor.remote(replace(job, shard=shard)) for shard in shards]
        self._offsets_s = [self._clock_offset_s(worker) for worker in self._workers]

    def run(self, run: CellRun, ended: Ended) -> None:
        start_at = time.time() + LEAD_S
        answers = [
            worker.run.remote(run.cell, start_at + offset_s)
            for worker, offset_s in zip(self._workers, self._offsets_s, strict=True)
        ]
        try:
            parts = self._ray.get(answers)
        except KeyboardInterrupt:
            for worker in self._workers:
                worker.stop.remote()
            merge_into(run, self._ray.get(answers, timeout=STOP_TIMEOUT_S), ended)
            raise
        merge_into(run, parts, ended)

    def _clock_offset_s(self, worker: Any) -> float:
        """What to add to this machine's clock to have the worker's: read on the quickest of some
        round trips, at its middle."""
        readings = []
        for _ in range(CLOCK_READINGS):
            asked = time.time()
            told = self._ray.get(worker.now.remote())
            answered = time.time()
            readings.append((answered - asked, told - (asked + answered) / 2))
        return float(min(readings)[1])


def merge_into(run: CellRun, parts: Sequence[CellRun], ended: Ended) -> None:
    """Put the shards of a cell together."""
    for part in parts:
        run.records += part.records
        run.samples += part.samples
        run.wall_s = max(run.wall_s, part.wall_s)
        run.client_cpu_share = max(run.client_cpu_share, part.client_cpu_share)
        run.interrupted |= part.interrupted
    for record in run.records:
        ended(record)
